"""The name by which a compiled graph knows a loss: one for equal losses, another for every other."""

import pickle

import pytest

from logitless.losses.cross_entropy import CrossEntropyLoss
from logitless.losses.dpo import DPOLoss
from logitless.losses.multi_token import MultiTokenLoss

OTHERS = {
    "a number": (CrossEntropyLoss(z_loss=0.1), CrossEntropyLoss(z_loss=0.2)),
    "a flag": (CrossEntropyLoss(dft=True), CrossEntropyLoss(dft=False)),
    "a text": (DPOLoss(loss_type="ipo"), DPOLoss(loss_type="hinge")),
    "None or a number": (CrossEntropyLoss(softcap=None), CrossEntropyLoss(softcap=1.0)),
    "numbers in a tuple": (MultiTokenLoss(coefficients=(1.0, 0.3)), MultiTokenLoss(coefficients=(1.0, 0.4))),
    "the class": (CrossEntropyLoss(), MultiTokenLoss()),
}


@pytest.mark.parametrize("losses", OTHERS.values(), ids=OTHERS)
def test_other_losses_have_other_identities(losses):
    first, second = losses
    assert first.identity != second.identity
    assert first.name_in_graphs() != second.name_in_graphs()


@pytest.mark.parametrize("losses", OTHERS.values(), ids=OTHERS)
def test_equal_losses_have_one_identity(losses):
    for loss in losses:
        copy = pickle.loads(pickle.dumps(loss))
        assert copy == loss and copy is not loss
        assert copy.identity == loss.identity
        assert copy.name_in_graphs() == loss.name_in_graphs()
