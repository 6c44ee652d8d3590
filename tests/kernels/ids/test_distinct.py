"""Distinct kept ids, the kinds of rows and their slots, against plain Python."""

import random

import pytest
import torch

from logitless.kernels.ids.distinct import CERTAIN, GATHERED, PICKED, PLAIN, distinct_ids, slots_of
from tests.kernels.support import DEVICE

V = 50
IGNORED = -100


def drawn(seed, rows, *, gaps=False):
    """(ids of each row, targets, flat ids, starts, lengths, offsets); with `gaps`, ids between the sets."""
    draw = random.Random(seed)
    kept = [[draw.randrange(V) for _ in range(draw.choice((0, 1, 1, 2, 5, 30)))] for _ in range(rows)]
    targets = []
    for ids in kept:
        target = draw.choice(ids) if ids and draw.random() < 0.8 else draw.randrange(V)
        targets.append(IGNORED if draw.random() < 0.2 else target)
    flat, starts = [], []
    for ids in kept:
        if gaps:
            flat.append(V + 9)  # no set has this slot, so nobody checks it
        starts.append(len(flat))
        flat += ids
    lengths = [len(ids) for ids in kept]
    offsets = [0, *(sum(lengths[: n + 1]) for n in range(rows))]
    return kept, targets, flat, starts, lengths, offsets


def kinds_of_rows(targets, flat, starts, lengths, offsets, dtype=torch.int64, **options):
    options = {"add_targets": False, "most_gathered": 4, "certain": True} | options
    tensors = [torch.tensor(x, dtype=torch.int64, device=DEVICE) for x in (starts, lengths, offsets, targets)]
    ids = torch.tensor(flat, dtype=dtype, device=DEVICE)
    return distinct_ids(ids, *tensors, IGNORED, V, **options)


@pytest.mark.parametrize("rows", [1, 7, 400])
@pytest.mark.parametrize("add_targets", [False, True])
@pytest.mark.parametrize("certain", [False, True])
def test_every_result(rows, add_targets, certain):
    gaps = rows == 400
    kept, targets, flat, starts, lengths, offsets = drawn(rows, rows, gaps=gaps)
    dtype = torch.int32 if certain else torch.int64
    options = {"add_targets": add_targets, "certain": certain}
    distinct = kinds_of_rows(targets, flat, starts, lengths, offsets, dtype, **options)
    expected, missing = [], []
    for ids, target in zip(kept, targets, strict=True):
        has_set = bool(ids) and target != IGNORED
        ids = set(ids) if has_set else set()
        missing.append(has_set and not add_targets and target not in ids)
        expected.append(sorted(ids | {target} if has_set and add_targets else ids))
    kinds = [
        PLAIN if not ids else CERTAIN if len(ids) == 1 and certain else PICKED if len(ids) > 4 else GATHERED
        for ids in expected
    ]
    assert distinct.counts.tolist() == list(map(len, expected))
    assert distinct.missing.tolist() == missing
    assert distinct.kinds.tolist() == kinds
    assert distinct.outside.item() == 0 and distinct.broken.item() == 0
    of_kind = {kind: [n for n in range(rows) if kinds[n] == kind] for kind in (PICKED, GATHERED, CERTAIN)}
    sizes = {kind: sum(len(expected[n]) for n in of_kind[kind]) for kind in (PICKED, GATHERED)}
    single = sum(len(ids) == 1 for ids in expected)
    assert distinct.numbers.tolist() == [*map(len, of_kind.values()), *sizes.values(), single]
    for kind, chosen in ((PICKED, of_kind[PICKED]), (GATHERED, of_kind[GATHERED]), (None, range(rows))):
        size = sum(len(expected[n]) for n in chosen)
        for room in (0, 3):
            slots = slots_of(distinct, kind, len(chosen), size + room, V)
            if not chosen or not size + room:
                assert not slots.ids.numel() and slots.bounds.tolist() == [0] * (len(chosen) + 1)
                continue
            assert slots.ids.tolist() == [i for n in chosen for i in expected[n]] + [-1] * room
            rows_of_slots = [place for place, n in enumerate(chosen) for _ in expected[n]]
            assert slots.rows.tolist() == rows_of_slots + [len(chosen)] * room
            bounds = slots.bounds.tolist()
            assert bounds == [0, *torch.tensor([len(expected[n]) for n in chosen]).cumsum(0).tolist()]
            assert all(0 <= own < size + room for own in slots.own.tolist())
            for place, n in enumerate(chosen):
                if targets[n] in expected[n]:
                    assert slots.own[place].item() == bounds[place] + expected[n].index(targets[n])


def test_ids_outside_the_vocabulary_of_supervised_rows_are_counted():
    distinct = kinds_of_rows([3, IGNORED, 4], [3, -1, V, V, 4, 99], [0, 3, 4], [3, 1, 1], [0, 3, 4, 5])
    assert distinct.outside.item() == 2
    assert distinct.counts.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "offsets, broken", [([0, 2, 3], 0), ([0, 3, 2], 1), ([1, 2, 3], 1), ([0, 2, 9], 1), ([2, 1, 0], 3)]
)
def test_broken_offsets_are_counted_and_no_target_is_reported_missing_beside_them(offsets, broken):
    distinct = kinds_of_rows([40, 41], [1, 2, 3], [0, 2], [2, 1], offsets)
    assert distinct.broken.item() == broken
    assert distinct.missing.any().item() == (broken == 0)


@pytest.mark.parametrize("add_targets", [False, True])
@pytest.mark.parametrize("rows", [0, 3])
def test_no_ids(rows, add_targets):
    zeros = [0] * rows
    distinct = kinds_of_rows(zeros, [], zeros, zeros, [0, *zeros], add_targets=add_targets)
    assert distinct.counts.tolist() == zeros and not distinct.missing.any()
    assert distinct.numbers.tolist() == [0] * 6
