"""A head with a frozen part and a trained one: the numbers of the joined head, without the frozen part's
gradient."""

from dataclasses import replace

import pytest
import torch

from logitless import CrossEntropyLoss, JSDLoss, ORPOLoss, linear_cross_entropy
from logitless.engine.operands import SplitHead
from logitless.losses.logprobs import TokenStatistics
from tests.support import DEVICE, AllocationWatcher, GemmCounter

pytestmark = pytest.mark.usefixtures("uncompiled")
N, H, R, V = 37, 24, 3, 101
BUDGET = 8 * V * 4


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden": (2, N, H + R), "frozen": (V, H), "trained": (V, R), "bias": (V,)}
    found = {
        name: torch.randn(size, generator=generator, device="cpu").to(DEVICE, dtype)
        for name, size in sizes.items()
    }
    targets = torch.randint(0, V, (2, N), generator=generator, device="cpu")
    targets[0, ::3] = -100
    return found, targets.to(DEVICE)


def logprobs(hidden, weight, targets, bias, *, entropy):
    found, _ = TokenStatistics(softcap=3.0, logits_budget=BUDGET, entropy=entropy).statistics(
        hidden, weight, targets, bias=bias
    )
    return (
        (found["logps"] * torch.arange(N, device=hidden.device)).sum()
        + 0.3 * found["lse"].sum()
        + found["entropy"].sum()
    )


def distilled(hidden, weight, targets, bias):
    shapes, generator = (
        {"teacher_hidden": (2, N, 8), "teacher_weight": (V, 8)},
        torch.Generator().manual_seed(1),
    )
    given = {
        name: torch.randn(shape, generator=generator, device="cpu").to(hidden)
        for name, shape in shapes.items()
    }
    return JSDLoss(logits_budget=8 * BUDGET)(
        hidden, weight, targets, bias=bias, mask=targets != -100, **given
    ).loss


CASES = {
    "fused": lambda h, w, t, b: (
        CrossEntropyLoss(label_smoothing=0.1, logit_scale=0.5, logits_budget=BUDGET)(h, w, t, bias=b).loss
    ),
    "whole": lambda h, w, t, b: CrossEntropyLoss(logits_budget=BUDGET)(h, w, t.clamp(min=0), bias=b).loss,
    "unsupervised_too": lambda h, w, t, b: (
        CrossEntropyLoss(compact=False, logits_budget=BUDGET)(h, w, t, bias=b).loss
    ),
    "paired": lambda h, w, t, b: ORPOLoss(logits_budget=BUDGET)(h, w, t, bias=b).loss,
    "numbers": lambda h, w, t, b: logprobs(h, w, t, b, entropy="metric"),
    "entropy": lambda h, w, t, b: logprobs(h, w, t, b, entropy=True),
    "distilled": distilled,
}


def run(case, *, split, trained=True, biased=True, dtype=torch.float32):
    found, targets = operands(dtype)
    leaves = {name: x.clone() for name, x in found.items()}
    leaves["hidden"].requires_grad_()
    leaves["trained"].requires_grad_(trained)
    leaves["bias"].requires_grad_(biased)
    head = (
        SplitHead(leaves["frozen"], leaves["trained"])
        if split
        else torch.cat((leaves["frozen"], leaves["trained"]), dim=1)
    )
    value = CASES[case](leaves["hidden"], head, targets, leaves["bias"])
    (3 * value).backward()
    for name, x in found.items():
        assert torch.equal(leaves[name], x), f"{name} was modified"
    return {"value": value.detach()} | {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize(
    "trained, biased", [(True, True), (True, False), (False, False)], ids=["trained", "no_bias", "all_frozen"]
)
@pytest.mark.parametrize("case", CASES)
def test_the_joined_heads_numbers(case, trained, biased):
    expected, found = (run(case, split=split, trained=trained, biased=biased) for split in (False, True))
    for name, x in expected.items():
        if x is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], x, msg=lambda m, name=name: f"{name}: {m}")
    assert (found["trained"] is None) is not trained


def test_dtypes():
    found = run("fused", split=True, dtype=torch.bfloat16)
    assert found["trained"].dtype == found["hidden"].dtype == torch.bfloat16
    x, targets = operands()
    with torch.autocast(targets.device.type, dtype=torch.bfloat16):
        head = SplitHead(x["frozen"].bfloat16(), x["trained"].requires_grad_())
        CASES["fused"](x["hidden"].requires_grad_(), head, targets, None).backward()
    assert x["trained"].grad.dtype == torch.float32


def test_products_and_memory():
    """The gradient of the frozen part is no product, and no buffer; what remains is the copy of the head."""
    N, H, R, V = 64, 256, 4, 2048
    hidden, targets = (
        torch.randn(N, H + R, device="cpu", requires_grad=True),
        torch.randint(0, V, (N,), device="cpu"),
    )
    frozen, trained = torch.randn(V, H, device="cpu"), torch.randn(V, R, device="cpu", requires_grad=True)
    loss = CrossEntropyLoss(logits_budget=16 * V * 4)
    for head, gemms in ((torch.cat((frozen, trained), 1), 3), (SplitHead(frozen, trained), 2 + R / (H + R))):
        with GemmCounter(N, V, H + R) as products:
            loss(hidden, head, targets).loss.backward()
        assert products.gemms == pytest.approx(gemms)
        with AllocationWatcher() as watch:
            loss(hidden, head, targets).loss.backward()
        # d_weight of the one, the copy of the other
        assert watch.peak < 1.5 * V * (H + R) * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_in_one_graph(reduction):
    loss = replace(CrossEntropyLoss(logits_budget=BUDGET), reduction=reduction)

    def step(hidden, frozen, trained, targets):
        return loss(hidden, SplitHead(frozen, trained), targets).loss.sum()

    x, targets = operands()
    found = []
    with torch.compiler.set_stance("default"):
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            hidden, trained = (x[name].clone().requires_grad_() for name in ("hidden", "trained"))
            function(hidden, x["frozen"], trained, targets).backward()
            found.append((hidden.grad, trained.grad))
    torch.testing.assert_close(found[1], found[0])


def test_wrong_width_is_refused():
    x, targets = operands()
    with pytest.raises(ValueError, match="hidden: expected a last dimension of 24"):
        CrossEntropyLoss()(x["hidden"][..., :-1], SplitHead(x["frozen"], x["trained"]), targets)


def test_both_parts_have_the_same_rows():
    with pytest.raises(ValueError, match="weight: expected as many rows in both parts"):
        linear_cross_entropy(
            torch.randn(2, 7), SplitHead(torch.randn(9, 5), torch.randn(1, 2)), torch.tensor([1, 2])
        )
