"""Options and numbers of a call: what is no finite number, or would be ignored, is refused by name."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from logitless import (
    CrossEntropyLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    MedusaLoss,
    Term,
    TokenLoss,
)
from tests.losses.every_loss import BrierLoss
from tests.support import DEVICE

# The functions themselves are tested; that they are compiled, test_own_loss.py shows once.
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def call():
    """(hidden (4, 6, 8), weight (32, 8), targets (4, 6))."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(4, 6, 8, generator=generator)
    weight = torch.randn(32, 8, generator=generator)
    return hidden, weight, torch.randint(32, (4, 6), generator=generator)


@dataclass(frozen=True, kw_only=True)
class ScaledLoss(TokenLoss):
    """A user's own loss with numeric fields."""

    factor: "float" = 1.0
    steps: int | None = None
    weights: tuple[float, ...] = field(default=(1.0,))

    def terms(self, stats, batch):
        return {"loss": Term(-self.factor * stats.logps)}, {}


@pytest.mark.parametrize(
    ("loss", "options", "error"),
    [
        (CrossEntropyLoss, {"temperature": "1"}, TypeError),
        (CrossEntropyLoss, {"ignore_index": None}, TypeError),
        (CrossEntropyLoss, {"ignore_index": 1.5}, TypeError),
        (CrossEntropyLoss, {"label_smoothing": True}, TypeError),
        (CrossEntropyLoss, {"logit_scale": float("nan")}, ValueError),
        (DPOLoss, {"beta": "0.1"}, TypeError),
        (DPOLoss, {"beta": float("inf")}, ValueError),
        (DPOLoss, {"loss_weights": 0.5}, TypeError),
        (DPOLoss, {"loss_weights": ["1"]}, TypeError),
        (GRPOLoss, {"epsilon_high": float("nan")}, ValueError),
        (MedusaLoss, {"coefficients": (1.0, "x")}, TypeError),
        (ScaledLoss, {"factor": "2"}, TypeError),
        (ScaledLoss, {"steps": 2.0}, TypeError),
        (ScaledLoss, {"weights": (float("inf"),)}, ValueError),
    ],
)
def test_options_are_finite_numbers(loss, options, error):
    (name,) = options
    with pytest.raises(error, match=f"^{name}: expected .*number.*, got "):
        loss(**options)


def test_numbers_of_other_libraries_are_numbers():
    loss = CrossEntropyLoss(label_smoothing=np.float32(0.5), ignore_index=np.int64(-1), softcap=30)
    assert (loss.label_smoothing, loss.ignore_index) == (0.5, -1)
    assert DPOLoss(loss_type=["sigmoid", "sft"], loss_weights=[1, 2]).loss_weights == (1, 2)
    assert DPOLoss(ref_softcap="same").ref_softcap == "same"


@pytest.mark.parametrize("kl", [torch.zeros(2, device="cpu"), "x", True, float("nan")])
def test_kl_is_one_finite_number(call, kl):
    labels = torch.tensor([True, False, True, False])
    with pytest.raises((TypeError, ValueError), match="^kl: expected "):
        KTOLoss()(*call, labels=labels, kl=kl, ref_logps=torch.zeros(4))


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 1, 0)])
def test_the_order_of_cross_entropy_is_named(call, order):
    with pytest.raises(TypeError, match=r"the order is \(hidden, weight, targets\)"):
        CrossEntropyLoss()(*(call[i] for i in order))


def test_num_items_counts_what_a_term_is_divided_by(call):
    @dataclass(frozen=True, kw_only=True)
    class TokensOfSequences(ScaledLoss):
        scope = "group"
        unit = "sequences"

    with pytest.raises(ValueError, match="^num_items: expected None .* 'sequences'.*, got .* over tokens"):
        TokensOfSequences()(*call, num_items=3)
    with pytest.raises(TypeError, match="^num_items: "):
        CrossEntropyLoss()(*call, num_items="3")
    # sft is divided by the chosen tokens alone.
    total = DPOLoss(loss_type="sft", reduction="sum")(*call, ref_logps=torch.zeros(4)).loss
    mean = DPOLoss(loss_type="sft")(*call, ref_logps=torch.zeros(4), num_items=5).loss
    torch.testing.assert_close(mean, total / 5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_of_bf16_operands_is_fp32(call, reduction):
    hidden, weight, targets = call
    loss = JSDLoss(logits_dtype=torch.float64, reduction=reduction)
    teacher = {"teacher_hidden": hidden.bfloat16(), "teacher_weight": weight.bfloat16()}
    out = loss(hidden.bfloat16(), -weight.bfloat16(), targets, **teacher)
    assert {x.dtype for x in (out.loss, *out.metrics.values())} == {torch.float32}


def kto(loss_type: str, reference: torch.Tensor):
    loss = KTOLoss(beta=1.0, loss_type=loss_type, undesirable_weight=0.0)
    given = {"kl": 0.0} if loss_type == "kto" else {}
    return loss, {"labels": torch.tensor([True, False]), "ref_logps": reference} | given


def dpo(loss_type: str, reference: torch.Tensor):
    return DPOLoss(beta=1.0, loss_type=loss_type), {"ref_logps": reference}


@pytest.mark.parametrize("far", [15.0, -15.0])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("make", "loss_type"),
    [(kto, "kto"), (kto, "apo_zero_unpaired"), (dpo, "apo_zero"), (dpo, "apo_down")],
)
def test_sequences_far_from_the_reference_keep_their_digits(make, loss_type, side, far):
    """In fp32 the gradient of two sequences, one of them 15 nats from its reference, is that of fp64."""
    actual = []
    for dtype in (torch.float32, torch.float64):
        bias = torch.zeros(2, dtype=dtype, requires_grad=True)
        reference = torch.full((2,), -0.5, dtype=dtype)
        reference[side] = far
        loss, given = make(loss_type, reference)
        operands = torch.zeros(2, 1, 1, dtype=dtype), torch.zeros(2, 1, dtype=dtype), torch.tensor([[0], [1]])
        loss(*operands, bias=bias, **given).loss.backward()
        actual.append(bias.grad.double())
    torch.testing.assert_close(*actual, rtol=1e-5, atol=0)


def test_a_target_beyond_the_vocabulary_may_be_the_ignored_one():
    """The Brier loss of docs/howto/own-loss.md, where nothing is left out."""
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    ignored = BrierLoss(ignore_index=1000, compact=False)(hidden, weight, torch.tensor([1, 1000, 2])).loss
    kept = BrierLoss()(hidden[[0, 2]], weight, torch.tensor([1, 2])).loss
    torch.testing.assert_close(ignored, kept)
