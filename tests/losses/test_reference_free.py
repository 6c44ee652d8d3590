"""ORPO's labels of the NLL must agree with those of the completion."""

import pytest
import torch

from logitless import ORPOLoss
from logitless.losses.reference_free import _contradicting, _of_chosen
from tests.support import DEVICE

IGNORED = -100
# Two pairs: chosen, chosen, rejected, rejected; prompts of two tokens.
TARGETS = [[-100, -100, 3, 4], [-100, -100, 5, -100], [-100, -100, 6, 7], [-100, -100, 8, 9]]
WHOLE = [[1, 2, 3, 4], [1, 2, 5, -100], [1, 2, 6, 7], [1, 2, 8, 9]]
LABELS = {
    "the whole sequence": (WHOLE, 0),
    "the completion alone": (TARGETS, 0),
    "another label": ([[1, 2, 3, 0], *WHOLE[1:]], 1),
    "the prompt alone": ([[1, 2, -100, -100], [1, 2, -100, -100], *WHOLE[2:]], 3),
    "another label of a rejected sequence": ([*WHOLE[:2], [1, 2, 0, 0], [-100] * 4], 0),
    "a label that targets leave out": ([WHOLE[0], [1, 2, 5, 9], *WHOLE[2:]], 0),
}


def tensors(labels: list[list[int]], packed: bool):
    targets, nll_targets = (torch.tensor(x, device=DEVICE) for x in (TARGETS, labels))
    if not packed:
        return targets, nll_targets, {}
    # Without the first chosen sequence's first token: the halves have different lengths.
    starts = {"cu_seqlens": torch.tensor([0, 3, 7, 11, 15], device=DEVICE)}
    return targets.flatten()[1:], nll_targets.flatten()[1:], starts


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("labels, count", LABELS.values(), ids=LABELS)
def test_contradicting_labels_are_counted(labels, count, packed):
    targets, nll_targets, starts = tensors(labels, packed)
    chosen = _of_chosen(targets, starts.get("cu_seqlens"))
    assert _contradicting(targets, nll_targets, chosen, IGNORED).item() == count


def test_faults_name_the_argument():
    targets, nll_targets, _ = tensors(LABELS["another label"][0], False)
    count = _contradicting(targets, nll_targets, _of_chosen(targets, None), IGNORED)
    (fault,) = ORPOLoss().faults(targets, {"completion": None, "contradicting": count}, 9)
    assert fault.count is count and fault.argument == "nll_targets"
    assert not ORPOLoss().faults(targets, {"completion": None, "contradicting": None}, 9)


def call(labels: list[list[int]], packed: bool, **options):
    targets, nll_targets, starts = tensors(labels, packed)
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(*targets.shape, 6, generator=generator, device=DEVICE)
    weight = torch.randn(10, 6, generator=generator, device=DEVICE)
    return ORPOLoss(**options)(hidden, weight, targets, nll_targets=nll_targets, **starts)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["another label", "the prompt alone"])
def test_contradicting_labels_are_refused(name, packed):
    with pytest.raises(ValueError, match="^nll_targets: expected"):
        call(LABELS[name][0], packed)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", [name for name, (_, count) in LABELS.items() if not count])
def test_agreeing_labels_are_taken(name, packed):
    assert call(LABELS[name][0], packed).loss.isfinite()
