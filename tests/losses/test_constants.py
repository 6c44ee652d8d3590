"""Inputs beside hidden states and head are constants: those that a loss documents as such get no gradient in
any reduction, and others that require one are refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from logitless import CrossEntropyLoss, GRPOLoss, LogitsLoss, Term, TokenLoss
from tests.losses.every_loss import LOSSES, TRAINED, given, heads
from tests.support import DEVICE

# A LogitsLoss has the same gradients uncompiled; test_own_loss.py and test_graphs.py compile some.
pytestmark = pytest.mark.usefixtures("uncompiled")
CONSTANT = ("ref_logps", "old_logps", "advantages", "teacher_hidden", "teacher_weight", "topk_logprobs")
# Of several units, or of several heads: without a loss per unit.
REDUCED_ONLY = ("DPO, sorted", "ORPO", "CPO", "multi-token", "Medusa")


def gradients(name: str, reduction: str, requiring: tuple[str, ...]) -> dict[str, torch.Tensor | None]:
    x = given(6)
    for field in requiring:
        getattr(x, field).requires_grad_()
    options = {} if name == "logprobs" else {"reduction": reduction}
    LOSSES[name](x, heads(), **options)[0].sum().backward()
    return {field: getattr(x, field).grad for field in (*TRAINED, *CONSTANT)}


@pytest.mark.parametrize(
    ("name", "reduction"),
    [(name, "mean") for name in LOSSES] + [(name, "none") for name in LOSSES if name not in REDUCED_ONLY],
)
def test_documented_constants_get_no_gradient(name, reduction):
    detached, attached = gradients(name, reduction, ()), gradients(name, reduction, CONSTANT)
    for field in CONSTANT:
        assert attached[field] is None, field
    for field in TRAINED:
        assert (detached[field] is None) == (attached[field] is None)
        assert detached[field] is None or torch.equal(detached[field], attached[field]), field


@dataclass(frozen=True, kw_only=True)
class Uncertain(TokenLoss):
    shared_inputs: ClassVar = ("scale",)

    def terms(self, stats, batch):
        return {"nll": Term(-stats.logps * (-batch.scale).exp() + batch.scale)}, {}


@dataclass(frozen=True, kw_only=True)
class UncertainLogits(LogitsLoss):
    shared_inputs: ClassVar = ("scale",)

    def terms(self, logits, batch):
        return {"top": Term(logits.amax(-1) * batch.scale)}, {}


B, T, H, V = 2, 5, 8, 50
SHAPES = {"token_weights": (B, T), "class_weights": (V,), "scale": ()}


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (CrossEntropyLoss(), "token_weights"),
        (CrossEntropyLoss(reduction="sum"), "class_weights"),
        (Uncertain(), "scale"),
        (UncertainLogits(), "scale"),
        (UncertainLogits(reduction="none"), "scale"),
    ],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_an_input_whose_gradient_would_be_lost(loss, name, frozen):
    hidden, weight = torch.randn(B, T, H), torch.randn(V, H)
    targets = torch.zeros(B, T, dtype=torch.int64)
    if not frozen:
        hidden.requires_grad_()
    given = torch.rand(SHAPES[name], dtype=torch.float32, device=DEVICE, requires_grad=True)
    message = f"^{name}: expected a tensor that requires no gradient, got one that does; detach it"
    with pytest.raises(ValueError, match=message):
        loss(hidden, weight, targets, **{name: given})
    with torch.no_grad():
        loss(hidden, weight, targets, **{name: given})


@pytest.mark.parametrize("name", ["token_weights", "scale"])
def test_unreduced_losses_of_tokens_have_the_gradient(name):
    loss = (CrossEntropyLoss if name == "token_weights" else Uncertain)(reduction="none")
    hidden, weight = torch.randn(B, T, H).requires_grad_(), torch.randn(V, H)
    targets = torch.arange(B * T).view(B, T)
    given = torch.rand(SHAPES[name], dtype=torch.float32, device=DEVICE, requires_grad=True)
    loss(hidden, weight, targets, **{name: given}).loss.sum().backward()
    nll = torch.nn.functional.cross_entropy((hidden @ weight.T).mT, targets, reduction="none")
    plain = nll * given if name == "token_weights" else nll * (-given).exp() + given
    (expected,) = torch.autograd.grad(plain.sum(), given)
    torch.testing.assert_close(given.grad, expected)


def test_d_logps_only_where_there_are_gradients():
    loss = GRPOLoss(return_logps=True)
    hidden, weight = torch.randn(B, T, H).requires_grad_(), torch.randn(V, H)
    call = (weight, torch.zeros(B, T, dtype=torch.int64))
    advantages = torch.tensor([1.0, -2.0])
    assert loss(hidden, *call, advantages=advantages).tokens["d_logps"].all()
    assert "d_logps" not in loss(hidden.detach(), *call, advantages=advantages).tokens
    with torch.no_grad():
        assert "d_logps" not in loss(hidden, *call, advantages=advantages).tokens


def test_weights_in_another_dtype():
    hidden, weight = torch.randn(B, T, H), torch.randn(V, H)
    weights = torch.rand(B, T, dtype=torch.float64)
    targets = torch.zeros(B, T, dtype=torch.int64)
    actual = CrossEntropyLoss(reduction="none")(hidden, weight, targets, token_weights=weights)
    assert actual.loss.dtype == torch.float32
