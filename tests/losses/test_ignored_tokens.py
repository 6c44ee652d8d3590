"""Gradients of tokens without a target are exactly 0 for every upstream gradient, also inf and NaN, as those
of F.cross_entropy are. Those of other tokens carry inf and NaN on, for which GradScaler looks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from logitless import (
    Batch,
    CrossEntropyLoss,
    LogitsLoss,
    MedusaLoss,
    Term,
    TokenLoss,
    TokenStats,
    linear_cross_entropy,
)
from logitless.engine.operands import SplitHead
from tests.cases import operands
from tests.losses.every_loss import LOSSES, REDUCED, Given, H, V, given, gradients, heads
from tests.support import DEVICE, host_reads

pytestmark = pytest.mark.usefixtures("uncompiled")

UPSTREAM = (0.0, math.inf, -math.inf, math.nan)
# `Medusa` also has a base head with `hidden`, and `multi-token` a second tensor of hidden states.
AHEAD = {"multi-token": 1, "Medusa": 1}


def without_targets(x: Given) -> Given:
    return Given(**dict(x.items()) | {"targets": torch.full_like(x.targets, -100)})


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
@pytest.mark.parametrize(
    ("name", "reduction"),
    [(name, kind) for name in LOSSES for kind in ("mean", "none") if kind == "mean" or name not in REDUCED],
)
def test_ignored_tokens_have_no_gradient(name, reduction, compact):
    modules = heads()
    options = {"compact": compact} | ({} if name == "logprobs" else {"reduction": reduction})
    x = given(6)
    nothing = without_targets(x)
    for some in (nothing, x):
        value = LOSSES[name](some, modules, **options)[0].sum()
        # The row at which a head that looks k tokens ahead finds no target.
        ignored = F.pad(some.targets[:, AHEAD.get(name, 0) :], (0, AHEAD.get(name, 0)), value=-100) == -100
        if name in AHEAD:  # the other heads look further
            ignored = ignored & (torch.arange(6) == 5)
        for upstream in UPSTREAM:
            actual = gradients(value * upstream, some, modules, retain_graph=True)
            assert actual.keys() >= {"hidden", "weight", "bias"}
            assert not actual["hidden"][ignored].any(), (upstream, "d_hidden of ignored rows")
            if some is nothing:
                assert not any(gradient.any() for gradient in actual.values()), upstream
            elif upstream == 0:
                assert all(gradient.isfinite().all() for gradient in actual.values())
            else:
                assert not any(gradient.isfinite().all() for gradient in actual.values()), upstream


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_call_without_tokens_has_gradients_of_0(name, compact):
    x, modules = given(0), heads()
    value = LOSSES[name](x, modules, compact=compact)[0]
    actual = gradients(value * math.nan, x, modules)
    assert actual["weight"].shape == x.weight.shape
    assert not any(gradient.any() for gradient in actual.values())


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("supervised", [(), (1, 4)], ids=["no target", "two targets"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["", "softcap"])
def test_as_cross_entropy_of_full_logits(compact, dtype, supervised, options):
    """Where inf, NaN and finite gradients are; `loss / num_items_in_batch` with 0 of them is 0 / 0."""
    h, w, targets, b = operands((6,), 5, 13, dtype)
    for x in (h, w, b):
        x.requires_grad_()
    targets = torch.where(torch.isin(torch.arange(6), torch.tensor(supervised)), targets.clamp(min=0), -100)
    logits = F.linear(h, w, b)
    stock = 5.0 * torch.tanh(logits / 5.0) if options else logits
    stock = F.cross_entropy(stock.float() if dtype == torch.float16 else stock, targets, reduction="sum")
    value = linear_cross_entropy(h, w, targets, bias=b, reduction="sum", compact=compact, **options)
    for upstream in (0.0, math.nan, *(() if supervised else (math.inf,))):
        actual, expected = (
            torch.autograd.grad(x * upstream, (h, w, b), retain_graph=True) for x in (value, stock)
        )
        for mine, truth in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, truth, equal_nan=True)
    actual = torch.autograd.grad(value / torch.tensor(0), (h, w, b))
    assert all(x.isfinite().all() != bool(supervised) for x in actual)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_trained_columns(compact, reduction):
    """LoRA: the adapter's columns, and what is trained through the hidden states."""
    frozen, trained = torch.randn(V, H), torch.randn(V, 2, requires_grad=True)
    hidden = torch.randn(6, H + 2, requires_grad=True)
    head = SplitHead(frozen, trained)
    for targets in (torch.full((6,), -100), torch.tensor([3, -100, 1, -100, 2, 0])):
        loss = CrossEntropyLoss(reduction=reduction, compact=compact)(hidden, head, targets).loss.sum()
        for upstream in (math.inf, math.nan):
            d_hidden, d_trained = torch.autograd.grad(loss * upstream, (hidden, trained), retain_graph=True)
            assert not d_hidden[targets == -100].any()
            assert not d_hidden[targets >= 0].isfinite().any()
            assert d_trained.isfinite().all() == (targets == -100).all()
            assert (d_trained == 0).all() == (targets == -100).all()


def test_a_head_whose_targets_are_all_ahead():
    """Only the first head finds a target in sequences of two tokens: the others' layers get no gradient."""
    modules = heads()
    x, labels = torch.randn(1, 2, H, requires_grad=True), torch.tensor([[3, 4]])
    base = torch.randn(V, H)
    out = MedusaLoss()(x, modules, labels, base_weight=base)
    (out.loss * math.nan).backward()
    assert x.grad[:, 0].isnan().any() and not x.grad[:, 1].any()
    for name, parameter in modules.named_parameters():
        assert not parameter.grad.any(), name


@pytest.mark.parametrize(
    "name", [name for name in LOSSES if name not in ("logprobs", "multi-token", "Medusa")]
)
@pytest.mark.parametrize("options", [{}, {"compact": False}], ids=str)
def test_a_main_gradient_without_targets_gets_0(name, options):
    """Whatever arrives: there is nothing to scale."""
    x = without_targets(given(6))
    start = torch.randn(V, H)
    for upstream in (0.5, *UPSTREAM):
        main = start.clone()
        value = LOSSES[name](x, None, accumulate_into=main, **options)[0]
        d_hidden, d_bias = torch.autograd.grad(value * upstream, (x.hidden, x.bias))
        assert torch.equal(main, start) and not d_hidden.any() and not d_bias.any()


@torch.compiler.set_stance("default")
@pytest.mark.parametrize(
    ("name", "reduction"), [("cross-entropy", "mean"), ("cross-entropy", "none"), ("Medusa", "mean")]
)
def test_in_a_graph(name, reduction):
    modules = heads()

    def step(x: Given) -> Tensor:
        return LOSSES[name](x, modules, reduction=reduction)[0].sum()

    torch._dynamo.reset()
    graph = torch.compile(step, backend="aot_eager", fullgraph=True)
    x = given(6)
    actual = gradients(graph(x) * math.nan, x, modules)
    ignored = x.targets == -100 if name not in AHEAD else torch.arange(6).expand(4, 6) == 5
    assert not actual["hidden"][ignored].any() and actual["hidden"][:, 0].isnan().all()
    assert all(gradient.isnan().any() for gradient in actual.values())
    actual = gradients(graph(without_targets(x)) * math.inf, x, modules)
    assert not any(gradient.any() for gradient in actual.values())


@torch.compiler.set_stance("default")
def test_a_main_gradient_in_a_graph():
    x, main = without_targets(given(6)), torch.zeros(V, H)

    def step(x, main):
        return LOSSES["cross-entropy"](x, None, accumulate_into=main)[0]

    torch._dynamo.reset()
    value = torch.compile(step, backend="aot_eager", fullgraph=True)(x, main)
    (value * math.nan).backward()
    assert not main.any() and not x.hidden.grad.any()


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
def test_nothing_is_read_for_it(compact):
    x = given(6)
    with host_reads() as places:
        (LOSSES["cross-entropy"](x, None, compact=compact)[0] * 2.0).backward()
    assert len(places) == compact


def test_a_grad_scaler_skips_the_step():
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0)
    weight = torch.nn.Parameter(torch.randn(V, H))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before = weight.detach().clone()
    loss = linear_cross_entropy(torch.randn(6, H), weight, torch.tensor([3, -100, 1, -100, 2, 0]))
    scaler.scale(loss * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, before) and scaler.get_scale() == 1.0


def focal(logps: Tensor) -> dict[str, Term]:
    """Its derivative is infinite where the probability is 1."""
    return {"nll": Term(-torch.sqrt(1 - logps.exp()) * logps)}


class FocalLoss(TokenLoss):
    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        return focal(stats.logps), {}


class FocalLossOfLogits(LogitsLoss):
    def terms(self, logits: Tensor, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        return focal(torch.log_softmax(logits, -1).gather(1, batch.targets[:, None])[:, 0]), {}


@pytest.mark.parametrize("kind", [FocalLoss, FocalLossOfLogits])
def test_an_infinite_derivative_at_an_ignored_token_changes_no_gradient(kind):
    torch.manual_seed(0)
    weight = torch.randn(11, 8, device=DEVICE)
    hidden = torch.randn(6, 8, device=DEVICE)
    hidden[2] = 100 * weight[0]  # the probability of token 0 is 1
    targets = torch.tensor([1, 2, -100, 4, 5, 6], device=DEVICE)
    actual = {}
    for compact in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        kind(compact=compact)(*leaves, targets).loss.backward()
        actual[compact] = [x.grad for x in leaves]
    for expected, dense in zip(actual[True], actual[False], strict=True):
        torch.testing.assert_close(dense, expected, rtol=1e-5, atol=1e-6)
