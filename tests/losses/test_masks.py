"""`mask=` and its like: booleans or integers that are 0 or 1, in every loss; the reference is the same call
with the targets masked by hand."""

import pytest
import torch

from logitless import CrossEntropyLoss, KTOLoss, MultiTokenLoss, ORPOLoss, linear_topk
from tests.cases import operands
from tests.losses.every_loss import LOSSES, Given, H, LossCase, given, heads
from tests.support import DEVICE

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
    for kind in (torch.bool, torch.int64, torch.uint8):
        assert call(name, x, mask.to(kind)) == expected


@pytest.mark.parametrize("name", CASES)
def test_masks_of_floats_or_of_another_shape_are_refused(name):
    x = given(T)
    additive = torch.zeros(x.targets.shape, device=DEVICE).masked_fill(~mask_of(x), -torch.inf)
    message = "^mask: expected booleans, or integers that are 0 or 1, got .*mask == 0 if it is additive"
    for mask in (additive, additive.exp().bfloat16()):
        with pytest.raises(TypeError, match=message) as caught:
            call(name, x, mask)
        assert ("as token_weights" in str(caught.value)) == name.startswith("cross-entropy")
    with pytest.raises(ValueError, match=r"^mask: expected targets' shape \(4, 5\), got \(4,\); pass one"):
        call(name, x, torch.ones(len(x.targets), device=DEVICE))


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
    with pytest.raises(TypeError, match="^mask: "):
        linear_topk(x.hidden, x.weight, 2, mask=mask.float())
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
