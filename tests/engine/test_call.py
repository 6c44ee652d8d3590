"""`prepare`: a public call, checked and flattened; what `shift` moves follows from the role of an input."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from logitless import CrossEntropyLoss, DPOLoss, LogitsLoss, Term, TokenLoss
from tests.engine.calls import call, given
from tests.support import DEVICE

H, V = 4, 11


@dataclass(frozen=True, kw_only=True)
class EveryRole(LogitsLoss):
    token_inputs: ClassVar = ("weights",)
    prediction_inputs: ClassVar = ("best",)
    vocabulary_inputs: ClassVar = ("table",)
    shared_inputs: ClassVar = ("whole",)
    teacher: ClassVar = True

    def terms(self, logits, batch):
        return {"nll": Term(logits.sum(-1))}, {}


@dataclass(frozen=True, kw_only=True)
class OfSequences(TokenLoss):
    scope: ClassVar = "group"
    unit: ClassVar = "sequences"
    sequence_inputs: ClassVar = ("offsets",)

    def terms(self, stats, batch):
        return {"sums": Term(batch.sum_by_sequence(-stats.logps) - batch.offsets, over="sequences")}, {}


def head(*shape: int, dtype=torch.float32):
    """Hidden states (*shape, H), weight and targets that count up from 1."""
    numel = torch.Size(shape).numel()
    return (
        torch.randn(*shape, H).to(dtype),
        torch.randn(V, H).to(dtype),
        (torch.arange(numel) % V).view(shape),
    )


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1, device=DEVICE).view(shape)


def inputs(*shape: int, trailing: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    return {
        "weights": counted(*shape, *trailing),
        "best": counted(*shape, 3),
        "table": counted(V),
        "whole": counted(2, 5),
        "teacher_hidden": counted(*shape, 6),
        "teacher_weight": counted(V, 6),
    }


@pytest.mark.parametrize("trailing", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("shift", [False, True], ids=["", "shift"])
def test_flattened_to_one_row_per_token(shape, trailing, shift):
    """With shift position i predicts targets[i + 1]: token inputs move, and what is of the position stays."""
    hidden, weight, targets = head(*shape)
    given_inputs = inputs(*shape, trailing=trailing)
    actual = given(EveryRole(), hidden, weight, targets, shift=shift, **given_inputs)
    N, T = targets.numel(), shape[-1]
    assert torch.equal(actual.hidden, hidden.view(N, H))
    assert actual.targets.dtype == torch.int64 and actual.sequence_count == 0
    rows = [[*row[1:], -100] if shift else row for row in targets.reshape(-1, T).tolist()]
    assert actual.targets.tolist() == [label for row in rows for label in row]
    weights = given_inputs["weights"].reshape(-1, T, *trailing)
    moved = actual.inputs["weights"]
    assert moved.shape == (N, *trailing)
    assert torch.equal(moved.view_as(weights)[:, : T - shift], weights[:, int(shift) :])
    for name in ("best", "teacher_hidden"):
        x = given_inputs[name]
        assert torch.equal(actual.inputs[name], x.reshape(N, x.shape[-1])), name
    for name in ("table", "whole", "teacher_weight"):
        assert torch.equal(actual.inputs[name], given_inputs[name]), name
    assert actual.inputs["teacher_bias"] is None
    assert list(actual.inputs) == list(EveryRole.roles)


BOUNDS = {"two": [0, 4, 7], "empty ones": [0, 0, 3, 3, 7, 7], "single tokens": list(range(8)), "one": [0, 7]}
BOUNDS |= {"no tokens": [0, 0, 0]}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_shift_stays_in_packed_sequences(bounds):
    N = bounds[-1]
    hidden, weight, targets = head(N)
    given_inputs = inputs(N, trailing=(2,))
    boundaries = torch.tensor(bounds)
    actual = given(EveryRole(), hidden, weight, targets, shift=True, cu_seqlens=boundaries, **given_inputs)
    ends = [bound - 1 for bound in bounds[1:]]
    expected = [-100 if i in ends else targets.tolist()[i + 1] for i in range(N)]
    assert actual.targets.tolist() == expected
    for i in range(N):
        if i not in ends:
            assert torch.equal(actual.inputs["weights"][i], given_inputs["weights"][i + 1])
    assert torch.equal(actual.inputs["best"], given_inputs["best"])
    assert torch.equal(actual.inputs["teacher_hidden"], given_inputs["teacher_hidden"])


# -- sequences and normalizers


def test_sequence_count():
    hidden, weight, targets = head(4, 3)
    assert given(CrossEntropyLoss(), hidden, weight, targets).sequence_count == 0
    assert given(OfSequences(), hidden, weight, targets, offsets=counted(4)).sequence_count == 4
    bounds = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    flat = given(
        OfSequences(), hidden.view(12, H), weight, targets.view(12), cu_seqlens=bounds, offsets=counted(3, 2)
    )
    assert (
        flat.sequence_count == 3
        and flat.cu_seqlens.dtype == torch.int64
        and flat.inputs["offsets"].shape == (3, 2)
    )
    with pytest.raises(ValueError, match=r"^hidden: expected a multiple of 2 sequences, got 3; "):
        given(DPOLoss(), hidden[:3], weight, targets[:3], ref_logps=counted(3, 3))
    with pytest.raises(ValueError, match=r"^hidden: expected shape \(B, T, H\), got \(12, 4\); "):
        given(OfSequences(), hidden.view(12, H), weight, targets.view(12), offsets=counted(3))


STARTS_ALIKE = r"expected a shape that starts with targets' \(2, 3\), got"
MISFITS = {
    "weights": (counted(3), rf"{STARTS_ALIKE} \(3,\); "),
    "best": (counted(2, 4, 3), rf"{STARTS_ALIKE} \(2, 4, 3\); "),
    "table": (counted(V + 1), rf"expected shape \({V},\), one per token id, got \({V + 1},\); "),
    "teacher_hidden": (counted(3, 6), STARTS_ALIKE),
    "offsets": (counted(1), r"expected shape \(2,\), one entry per sequence, got \(1,\); "),
}


@pytest.mark.parametrize("name", MISFITS)
def test_inputs_that_do_not_fit_their_role(name):
    value, message = MISFITS[name]
    loss, right = (OfSequences(), {}) if name == "offsets" else (EveryRole(), inputs(2, 3))
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        given(loss, *head(2, 3), **right | {name: value})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_num_items_is_a_tensor_of_the_statistics_dtype(dtype):
    hidden, weight, targets = head(2, 3, dtype=dtype)
    actual = given(CrossEntropyLoss(), hidden, weight, targets, num_items=7)
    assert actual.num_items.dtype == torch.promote_types(dtype, torch.float32) and actual.num_items == 7
    assert given(CrossEntropyLoss(), hidden, weight, targets).num_items is None
    with pytest.raises(ValueError, match=r"^num_items: expected a number or a 0-d tensor, got \(1,\); "):
        given(CrossEntropyLoss(), hidden, weight, targets, num_items=torch.ones(1))


def test_dtype_of_the_products():
    hidden, weight, targets = head(2, 3)
    assert given(CrossEntropyLoss(), hidden, weight, targets).dtype == torch.float32
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert given(CrossEntropyLoss(), hidden, weight, targets).dtype == torch.bfloat16
        hidden, weight, targets = head(2, 3, dtype=torch.float64)
        assert given(CrossEntropyLoss(), hidden, weight, targets).dtype == torch.float64
    for name in ("accum_dtype", "logits_dtype"):
        with pytest.raises(
            ValueError, match=rf"^{name}: expected None, torch.float64 or a wider dtype, got torch.float32; "
        ):
            given(CrossEntropyLoss(**{name: torch.float32}), hidden, weight, targets)


def test_teacher_weights_get_no_gradient():
    hidden, weight, targets = head(2, 3)
    teacher = inputs(2, 3)
    teacher["teacher_weight"].requires_grad_()
    assert not given(EveryRole(), hidden, weight, targets, **teacher).inputs["teacher_weight"].requires_grad


@pytest.mark.parametrize("trainable", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_needs(trainable):
    hidden, weight, targets = head(2, 3)
    operands = hidden, weight, torch.randn(V)
    for number in trainable:
        operands[number].requires_grad_()
    made = call(CrossEntropyLoss(), hidden, weight, targets, operands[2])
    assert made.needs[:3] == tuple(number in trainable for number in range(3)) and not made.needs.layers
    assert made.trainable == bool(trainable)
    with torch.no_grad():
        assert not call(CrossEntropyLoss(), hidden, weight, targets, operands[2]).trainable
