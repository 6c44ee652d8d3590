"""ORPO's labels of the NLL must agree with those of the completion."""

import pytest
import torch

from logitless import ORPOLoss
from tests.support import DEVICE

# Two pairs: chosen, chosen, rejected, rejected; prompts of one token.
TARGETS = [[-100, 3, 4], [-100, 5, -100], [-100, 6, 7], [-100, 8, 9]]
WHOLE = [[1, 3, 4], [1, 5, -100], [1, 6, 7], [1, 8, 9]]
# Labels of the NLL, and how many of them contradict a target of a chosen sequence.
LABELS = {
    "the whole sequence": (WHOLE, 0),
    "the completion alone": (TARGETS, 0),
    "another label": ([[1, 3, 0], *WHOLE[1:]], 1),
    "the prompt alone": ([[1, -100, -100], [1, -100, -100], *WHOLE[2:]], 3),
    "another label of a rejected sequence": ([*WHOLE[:2], [1, 0, 0], [-100] * 3], 0),
    "a label that targets leave out": ([WHOLE[0], [1, 5, 9], *WHOLE[2:]], 0),
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(("labels", "contradicting"), LABELS.values(), ids=LABELS)
def test_labels_that_contradict_the_targets_are_refused(labels, contradicting, packed):
    targets, nll_targets = (torch.tensor(x, device=DEVICE) for x in (TARGETS, labels))
    boundaries = {}
    if packed:
        # Without the first chosen sequence's first token: the halves have different lengths.
        targets, nll_targets = targets.flatten()[1:], nll_targets.flatten()[1:]
        boundaries["cu_seqlens"] = torch.tensor([0, 2, 5, 8, 11], device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(*targets.shape, 6, generator=generator, device=DEVICE)
    weight = torch.randn(10, 6, generator=generator, device=DEVICE)

    def loss():
        return ORPOLoss()(hidden, weight, targets, nll_targets=nll_targets, **boundaries).loss

    if contradicting:
        message = f"^nll_targets: expected targets' own labels .*, got {contradicting} others; "
        with pytest.raises(ValueError, match=message):
            loss()
    else:
        assert loss().isfinite()
