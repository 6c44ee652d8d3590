"""`mask=` and its like: booleans, or numbers that are 0 or 1, in every loss; the reference is the same call
with the targets masked by hand."""

import warnings

import pytest
import torch

from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    KTOLoss,
    MultiTokenLoss,
    ORPOLoss,
    SpeculatorLoss,
    count_targets,
    linear_topk,
)
from logitless.losses import arguments
from tests.cases import operands
from tests.losses.every_loss import LOSSES, SEQUENCES, Given, H, LossCase, given, gradients, heads
from tests.support import DEVICE

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

CASES = {name: case for name, case in LOSSES.items() if isinstance(case, LossCase)}
T = 5


pytestmark = pytest.mark.usefixtures("uncompiled")


def mask_of(x) -> torch.Tensor:
    """Bool, on for the first token of every sequence."""
    mask = torch.rand(x.targets.shape, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE) < 0.6
    mask[:, :2] = True
    return mask


def call(name: str, x, mask, **options) -> list[float]:
    """Loss and metrics."""
    loss, arguments, keywords = CASES[name].prepare(x, heads(), **options)
    out = loss(*arguments, **keywords, mask=mask)
    return [number.item() for number in (out.loss, *out.metrics.values())]


@pytest.mark.parametrize("name", CASES)
def test_masks_of_flags(name):
    x = given(T)
    mask = mask_of(x)
    masked = Given(**dict(x.items()) | {"targets": x.targets.masked_fill(~mask, -100)})
    expected = call(name, masked, None)
    assert expected != call(name, x, None)
    for kind in (torch.bool, torch.int64, torch.uint8, *FLOATS):
        assert call(name, x, mask.to(kind)) == expected
    assert call(name, x, mask.float(), compact=False) == call(name, masked, None, compact=False)


def additive(mask, least=-torch.inf, kind=torch.float32):
    return torch.zeros(mask.shape, dtype=kind, device=DEVICE).masked_fill(~mask, least)


MASKS = "^mask: expected booleans, or numbers that are 0 or 1, got "
ADDITIVE = MASKS + r"\d negative numbers, as in an additive mask .*; pass mask == 0\.$"
# Masks of floats with other numbers, of a mask of booleans, and the error.
OTHER_FLOATS = {
    "additive": (additive, ADDITIVE),
    "additive, -1e4": (lambda mask: additive(mask, -1e4, torch.float16), ADDITIVE),
    "additive, least number": (
        lambda mask: additive(mask, torch.finfo(torch.bfloat16).min, torch.bfloat16),
        ADDITIVE,
    ),
    "additive, fp64": (lambda mask: additive(mask, -1e-300, torch.float64), ADDITIVE),
    "weights": (lambda mask: mask / 2, MASKS + r"1\d others; pass which tokens count, such as mask != 0"),
    "almost 1": (lambda mask: mask.double() * (1 + 1e-12), MASKS + r"1\d others; pass which tokens count"),
    "NaN": (
        lambda mask: mask.float().masked_fill(~mask, torch.nan),
        MASKS + r"\d NaN; check the computation that it comes from",
    ),
}


@pytest.mark.parametrize("what", OTHER_FLOATS)
@pytest.mark.parametrize("shift", [False, True])
def test_masks_of_other_floats(what, shift):
    make, message = OTHER_FLOATS[what]
    x = given(T)
    with pytest.raises(ValueError, match=message):
        CrossEntropyLoss()(x.hidden, x.weight, x.targets, mask=make(mask_of(x)), shift=shift)


@pytest.mark.parametrize("name", CASES)
def test_additive_masks_and_weights_are_refused(name):
    x = given(T)
    with pytest.raises(ValueError, match=ADDITIVE):
        call(name, x, additive(mask_of(x)))
    with pytest.raises(ValueError, match=OTHER_FLOATS["weights"][1]) as caught:
        call(name, x, mask_of(x) / 2)
    weights = "as token_weights." if name.startswith("cross-entropy") else "by weights of the tokens."
    has_weights = name not in SEQUENCES and name not in ("multi-token", "Medusa")
    assert str(caught.value).endswith(weights) == has_weights
    if DEVICE.type != "cuda":  # a device-side assertion ends the process's use of the GPU
        with pytest.raises(
            RuntimeError, match="^targets: expected ids .* mask of 0 and 1, not an additive one"
        ):
            call(name, x, additive(mask_of(x)), compact=False)


@pytest.mark.parametrize("name", CASES)
def test_masks_of_another_shape_or_with_a_gradient_are_refused(name):
    x = given(T)
    with pytest.raises(ValueError, match=r"^mask: expected targets' shape \(4, 5\), got \(4,\); pass one"):
        call(name, x, torch.ones(len(x.targets), device=DEVICE))
    with pytest.raises(ValueError, match="^mask: expected a tensor that requires no gradient"):
        call(name, x, mask_of(x).float().requires_grad_())
    with pytest.raises(TypeError, match=MASKS + "torch.complex64"):
        call(name, x, mask_of(x).to(torch.complex64))


WITHOUT_A_ONE = "^mask: .* got a mask of floats without a 1, .*; pass mask == 0 if it is additive"


@pytest.mark.parametrize("name", ["cross-entropy", "GRPO", "JSD", "Medusa", "multi-token"])
def test_a_mask_of_zeros_is_a_step_without_targets(name, monkeypatch):
    """And a warning, once: an additive mask that keeps every token is all zeros."""
    monkeypatch.setattr(arguments, "_warned", False)
    x = given(T)
    medusa_heads = heads()
    loss, operands_of_call, keywords = CASES[name].prepare(x, medusa_heads)
    zeros = torch.zeros(x.targets.shape, device=DEVICE)

    def value(mask):
        out = loss(*operands_of_call, **keywords, mask=mask).loss
        assert all(not grad.any() for grad in gradients(out, x, medusa_heads).values())
        return out.item()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert value(zeros.bool()) == value(zeros.long()) == 0
        x.targets.fill_(-100)
        assert value(zeros + 1) == 0  # no target, but the mask is no reason
    with pytest.warns(UserWarning, match=WITHOUT_A_ONE):
        assert value(zeros) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert value(zeros) == 0


def test_an_additive_mask_whose_dropped_tokens_are_not_predicted(monkeypatch):
    """With shift=True the first label is not read, so that nothing but zeros is left."""
    monkeypatch.setattr(arguments, "_warned", False)
    x = given(T)
    mask = torch.zeros(x.targets.shape, device=DEVICE)
    mask[:, 0] = -torch.inf
    with pytest.warns(UserWarning, match=WITHOUT_A_ONE):
        CrossEntropyLoss()(x.hidden, x.weight, x.targets, mask=mask, shift=True)


def test_masks_of_floats_where_there_are_no_labels(monkeypatch):
    monkeypatch.setattr(arguments, "_warned", False)
    x = given(T)
    mask = mask_of(x)
    teacher = {"teacher_hidden": x.teacher_hidden, "teacher_weight": x.teacher_weight}
    calls = {
        "distillation": lambda mask: DistillationLoss()(x.hidden, x.weight, mask=mask, **teacher).loss,
        "draft": lambda mask: SpeculatorLoss()([x.hidden], x.weight, mask=mask, **teacher).loss,
        "k best": lambda mask: linear_topk(x.hidden, x.weight, 2, mask=mask).logps,
        "count": lambda mask: count_targets(x.targets, mask=mask, shift=True),
    }
    for name, function in calls.items():
        expected = function(mask)
        for kind in FLOATS:
            assert torch.equal(function(mask.to(kind)), expected), name
        if name != "count":
            for other in (additive(mask), mask / 2):
                with pytest.raises(ValueError, match=MASKS):
                    function(other)
            monkeypatch.setattr(arguments, "_warned", False)
            with pytest.warns(UserWarning, match=WITHOUT_A_ONE):
                assert not function(torch.zeros_like(x.hidden[..., 0])).any()
        elif DEVICE.type != "cuda":
            for other in (additive(mask), mask / 2, mask * 2):
                with pytest.raises(
                    RuntimeError, match="^mask: expected .*; pass mask == 0 if it is additive"
                ):
                    function(other)


def test_a_mask_beside_nll_targets_is_refused():
    x = given(T)
    with pytest.raises(ValueError, match="^mask: expected None with nll_targets"):
        ORPOLoss()(x.hidden, x.weight, x.targets, nll_targets=x.targets, mask=x.targets > 0)


@pytest.mark.parametrize("value", [2, -1])
@pytest.mark.parametrize("name", CASES)
def test_integers_that_are_no_flags(name, value):
    x = given(T)
    mask = mask_of(x).long()
    mask[1, 1], mask[2, 1] = value, value
    with pytest.raises(
        ValueError, match="^mask: expected .* 0 or 1, got [24] others; pass which tokens count"
    ):
        call(name, x, mask)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device-side assertion ends the process's use of the GPU")
@pytest.mark.parametrize("name", CASES)
def test_integers_that_are_no_flags_where_nothing_is_read(name):
    x = given(T)
    mask = mask_of(x).long()
    mask[1, 1] = 2
    with pytest.raises(RuntimeError, match="^targets: expected ids .* mask of 0 and 1"):
        call(name, x, mask, compact=False)


def test_a_wrong_entry_moves_with_its_label():
    x = given(T)
    mask = mask_of(x).long()
    loss, operands = CrossEntropyLoss(), (x.hidden, x.weight, x.targets)
    expected = loss(*operands, mask=mask, shift=True).loss
    mask[:, 0] = 7  # of labels that nobody predicts
    assert loss(*operands, mask=mask, shift=True).loss.item() == expected.item()
    mask[1, 1] = 7
    with pytest.raises(ValueError, match="^mask: .* got 1 others"):
        loss(*operands, mask=mask, shift=True)


def test_masks_of_the_k_best():
    x = given(T)
    mask = mask_of(x)
    expected = linear_topk(x.hidden, x.weight, 2, mask=mask)
    assert torch.equal(linear_topk(x.hidden, x.weight, 2, mask=mask.long()).ids, expected.ids)
    with pytest.raises(ValueError, match="^mask: "):
        linear_topk(x.hidden, x.weight, 2, mask=mask * 2)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_of_sequences(compact, reduction):
    x = given(T)
    loss = KTOLoss(loss_type="apo_zero_unpaired", compact=compact, reduction=reduction)

    def value(labels):
        return loss(x.hidden, x.weight, x.targets, ref_logps=x.ref_logps, labels=labels).loss.sum().item()

    assert value(x.labels.int()) == value(x.labels)
    with pytest.raises(TypeError, match="^labels: expected booleans"):
        value(x.labels.float())
    if DEVICE.type == "cuda" and not compact:
        return  # A device-side assertion ends the process's use of the GPU.
    with pytest.raises((ValueError, RuntimeError), match="^labels: expected .*; pass labels > 0"):
        value(x.labels * 2 - 1)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, -200])
def test_narrow_targets_take_any_ignore_index(kind, ignore_index):
    """-100 in uint8 would be the id 156, where a mask or a shift sets it."""
    hidden, weight, targets, _ = operands((2, T), H, 200, torch.float32)
    targets = targets % 100
    mask = targets % 3 > 0

    def one_head(targets, **options):
        return CrossEntropyLoss(ignore_index=ignore_index)(hidden, weight, targets, **options).loss.item()

    def two_heads(targets, **options):
        loss = MultiTokenLoss(ignore_index=ignore_index)
        return loss([hidden] * 2, weight, targets, **options).loss.item()

    for options in ({"mask": mask}, {"shift": True}, {"mask": mask, "shift": True}):
        assert one_head(targets.to(kind), **options) == one_head(targets, **options)
    assert two_heads(targets.to(kind), mask=mask) == two_heads(targets, mask=mask)
