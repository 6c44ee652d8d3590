"""What needs no process group: sequences that are whole."""

import pickle

import pytest
import torch

from logitless import CrossEntropyLoss
from logitless.parallel.sequences import WHOLE_SEQUENCES, SlicedSequences, WholeSequences


def test_whole_sequences_change_nothing():
    x = torch.randn(4, requires_grad=True)
    assert WHOLE_SEQUENCES.sum(x) is x and WHOLE_SEQUENCES.shared(x) is x
    assert not WHOLE_SEQUENCES.sliced and WHOLE_SEQUENCES.all_gather_tokens(x) is x
    assert WHOLE_SEQUENCES.everywhere((True, False), x.device) == (True, False)
    for unit in ("tokens", "sequences", "pairs", "chosen_tokens", None, torch.ones(4)):
        assert WHOLE_SEQUENCES.sum_unless_whole(x, unit) is x


@pytest.mark.parametrize(
    "tokens",
    [
        (3, 2),
        (torch.tensor(3, device="cpu"), torch.tensor(2, device="cpu")),
        (3, torch.tensor(2, device="cpu")),
    ],
    ids=["numbers", "tensors", "both"],
)
def test_counts_stay_what_they_are(tokens):
    """Numbers that the host knows stay numbers."""
    found = WHOLE_SEQUENCES.counts(torch.device("cpu"), *tokens)
    assert len(found) == 2 and all(a is b for a, b in zip(found, tokens, strict=True))


def test_slices_of_sequences_sum_over_units_that_no_rank_has_in_full(monkeypatch):
    """Values per sequence and per pair are computed in full on every rank."""
    sliced, x = SlicedSequences("a group"), torch.ones(())
    monkeypatch.setattr(SlicedSequences, "sum", lambda self, x: x + 1)
    for unit, expected in (("tokens", 2), ("chosen_tokens", 2), (None, 2), ("sequences", 1), ("pairs", 1)):
        assert sliced.sum_unless_whole(x, unit) == expected


def test_what_needs_no_gradient_is_shared_as_it_is():
    x = torch.ones(3)
    assert SlicedSequences("a group").shared(x) is x


def test_equal_by_value():
    """They key compiled functions."""
    assert WholeSequences() == WHOLE_SEQUENCES and hash(WholeSequences()) == hash(WHOLE_SEQUENCES)
    assert SlicedSequences("a") == SlicedSequences("a") != SlicedSequences("b")
    assert SlicedSequences("a") != WHOLE_SEQUENCES
    assert pickle.loads(pickle.dumps(WHOLE_SEQUENCES)) == WHOLE_SEQUENCES
    with pytest.raises(AttributeError):
        SlicedSequences("a").group = "b"


def test_a_loss_without_a_group_has_whole_sequences():
    assert CrossEntropyLoss().sequences is WHOLE_SEQUENCES
