"""A head with a frozen part and a trained one: the numbers of the joined head, without the frozen part's
gradient."""

from dataclasses import replace

import pytest
import torch

from logitless import CrossEntropyLoss, linear_cross_entropy
from logitless.engine.operands import SplitHead
from tests.losses import every_loss
from tests.losses.every_loss import LOSSES, V, on
from tests.support import DEVICE, AllocationWatcher, GemmCounter

# Columns of the trained part.
R = 3
# Several heads refuse it.
CALLS = {name: call for name, call in LOSSES.items() if name not in ("multi-token", "Medusa")}
CALLS["cross-entropy, all rows"] = on(CrossEntropyLoss, compact=False)


def parts(dtype=torch.float32):
    """Inputs whose hidden states have R columns more, the frozen part of the head, and the trained one."""
    x = every_loss.given(6, dtype=dtype)
    generator = torch.Generator(DEVICE).manual_seed(0)
    more = [torch.randn(n, generator=generator, device=DEVICE).to(dtype) for n in (R, (V, R))]
    x = x.with_hidden(lambda hidden: torch.cat((hidden, more[0].expand(*hidden.shape[:-1], R)), -1))
    x = x.with_hidden(lambda hidden: hidden.detach().requires_grad_())
    return x, x.weight.detach(), more[1].requires_grad_()


def outcome(call, x, head, *trained, **options):
    outputs = call(replace(x, weight=head), None, **options)
    return outputs, torch.autograd.grad(outputs[0], trained)


@pytest.mark.each_value
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "all frozen"])
@pytest.mark.parametrize("name", CALLS)
def test_the_joined_heads_numbers(name, is_trained):
    x, frozen, trained = parts()
    operands = x.hidden, frozen, trained, x.bias
    before = [operand.detach().clone() for operand in operands]
    leaves = [x.hidden, x.bias, trained][: 2 + is_trained]
    trained.requires_grad_(is_trained)
    x.bias.requires_grad_()
    options = {"logits_budget": 8 * V * 4}
    expected = outcome(CALLS[name], x, torch.cat((frozen, trained), 1), *leaves, **options)
    actual = outcome(CALLS[name], x, SplitHead(frozen, trained), *leaves, **options)
    torch.testing.assert_close(actual, expected)
    assert all(map(torch.equal, operands, before)), "an operand was written to"
    assert all(gradient.any() for gradient in actual[1])


def test_dtypes():
    call = LOSSES["cross-entropy"]
    x, frozen, trained = parts(torch.bfloat16)
    _, gradients = outcome(call, x, SplitHead(frozen, trained), x.hidden, trained)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    x, frozen, trained = parts()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        _, gradients = outcome(call, x, SplitHead(frozen.bfloat16(), trained), trained)
    assert gradients[0].dtype == torch.float32


def test_products_and_memory():
    """The gradient of the frozen part is no product, and no buffer; what remains is the copy of the head."""
    N, H, R, V = 64, 256, 4, 2048
    with torch.device("cpu"):
        hidden, targets = torch.randn(N, H + R, requires_grad=True), torch.randint(0, V, (N,))
        frozen, trained = torch.randn(V, H), torch.randn(V, R, requires_grad=True)
    loss = CrossEntropyLoss(logits_budget=16 * V * 4)
    for head, gemms in ((torch.cat((frozen, trained), 1), 3), (SplitHead(frozen, trained), 2 + R / (H + R))):
        with GemmCounter(N, V, H + R) as products:
            loss(hidden, head, targets).loss.backward()
        assert products.gemms == pytest.approx(gemms)
        with AllocationWatcher() as watch:
            loss(hidden, head, targets).loss.backward()
        # d_weight of the one, the copy of the other
        assert watch.peak < 1.5 * V * (H + R) * 4


def test_compiled_in_one_graph():
    (x, frozen, trained), loss = parts(), on(CrossEntropyLoss)

    def call(x, heads):
        return loss(replace(x, weight=SplitHead(frozen, trained)), heads)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    actual, expected = (outcome(f, x, None, x.hidden, trained) for f in (compiled, call))
    torch.testing.assert_close(actual, expected)


def test_refusals():
    targets = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="hidden: expected a last dimension of 5"):
        linear_cross_entropy(torch.randn(2, 7), SplitHead(torch.randn(9, 5), torch.randn(9, 3)), targets)
    with pytest.raises(ValueError, match="weight: expected the same number of rows in both"):
        linear_cross_entropy(torch.randn(2, 7), SplitHead(torch.randn(9, 5), torch.randn(1, 2)), targets)
    x, frozen, trained = parts()
    with pytest.raises(TypeError, match="weight: expected a tensor .*, got SplitHead; train the full"):
        LOSSES["multi-token"](replace(x, weight=SplitHead(frozen, trained)), None)
