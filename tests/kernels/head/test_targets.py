"""Which targets are supervised, which are no ids, and which are columns of a shard."""

import itertools

import pytest
import torch

from logitless.kernels.head.targets import (
    clamped,
    cleaned,
    count_targets,
    counted,
    marked,
    masked,
    one_per_position,
    shard_columns,
)
from tests.kernels.support import DEVICE, Random, strided

KINDS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
KINDS += (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def with_invalid_ids(V: int, N: int, ignore_index: int) -> tuple[torch.Tensor, Random]:
    """(N,) targets, of which a third is ignored and some are outside of [0, V); the random numbers."""
    random = Random(N)
    targets = random.integers(V + 4, N) - 2
    targets[::3] = ignore_index
    return targets, random


@pytest.mark.parametrize("N", [0, 1, 7, 3000])
@pytest.mark.parametrize("ignore_index", [-100, 0, 5])
def test_marks(N, ignore_index):
    V = 11
    targets, random = with_invalid_ids(V, N, ignore_index)
    others = random.uniform(2, N) < 0.5
    supervised = targets != ignore_index
    outside = supervised & ((targets < 0) | (targets > V - 1))
    for kind in (torch.int64, torch.int32):
        actual = marked(strided(targets.to(kind)), V, ignore_index)
        assert actual.dtype == torch.bool and torch.equal(actual, torch.stack((supervised, outside)))
        actual = marked(targets.to(kind), V, ignore_index, strided(others))
        assert torch.equal(actual[:2], torch.stack((supervised, outside)))
        assert torch.equal(actual[2:], others & supervised)


@pytest.mark.parametrize("N", [0, 1, 7, 9000])
@pytest.mark.parametrize("ignore_index", [-100, 0, 5])
def test_counts_of_targets(N, ignore_index):
    V = 11
    targets, _ = with_invalid_ids(V, N, ignore_index)
    for kind in (torch.int64, torch.int32):
        counts = torch.full((2,), -1, device=DEVICE)
        inverse = count_targets(strided(targets.to(kind)), V, ignore_index, counts)
        supervised = [y for y in targets.tolist() if y != ignore_index]
        assert counts.tolist() == [len(supervised), sum(not 0 <= y < V for y in supervised)]
        assert inverse.tolist() == [(1 / torch.tensor(max(len(supervised), 1.0))).item()]


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 7), (3000,)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_masks(shape, kind):
    random, wrong = Random(), -(2**63)
    targets, mask = random.integers(40, *shape), random.integers(2, *shape).to(kind)
    expected = torch.tensor(
        [y if m else -7 for y, m in zip(targets.flatten().tolist(), mask.flatten().tolist())],
        dtype=torch.int64,
        device=DEVICE,
    ).view(shape)
    assert torch.equal(masked(targets, mask, -7, wrong), expected)
    assert torch.equal(masked(strided(targets), strided(mask), -7, wrong), expected)
    if kind.is_floating_point:
        eps = torch.finfo(kind).eps
        negative, others = (-torch.inf, -1e4, -eps), (torch.inf, 0.5, eps, 1 + eps)
        values = {torch.nan: wrong + 2, **dict.fromkeys(negative, wrong + 1), **dict.fromkeys(others, wrong)}
    else:
        values = dict.fromkeys((2, 127, 255 if kind == torch.uint8 else -1), wrong)
    for value, code in values.items() if kind != torch.bool and mask.numel() else ():
        mask.flatten()[-1:], expected.flatten()[-1:] = value, code
        assert torch.equal(masked(targets, mask, -7, wrong), expected)


@pytest.mark.parametrize("N", [0, 1, 7, 3000])
def test_clamped_targets(N):
    V, random = 11, Random(N)
    ids = random.integers(V, N)
    for targets in (ids, strided(ids)):
        actual, wrong = clamped(targets, V, -100)
        assert actual.dtype == torch.int64 and torch.equal(actual, ids) and not wrong.any()
    for place, value in itertools.product({0, N // 2, N - 1} if N else (), (-100, -1, V)):
        targets = ids.clone()
        targets[place] = value
        actual, wrong = clamped(targets, V, -100)
        assert wrong.sum() == 1 and torch.equal(actual, targets.clamp(0, V - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_clamped_targets_beside_a_normalizer(dtype):
    targets = torch.arange(5, device=DEVICE)
    for count, wrong in ((3, 0), (0, 1)):
        items = torch.tensor(count, dtype=dtype, device=DEVICE)
        assert clamped(targets, 5, -100, items)[1].sum() == wrong
    assert clamped(targets, 5, 4)[1].sum() == 1


@pytest.mark.parametrize(("m", "N", "parts"), [(1, 0, 1), (2, 1, 1), (3, 5000, 1), (2, 60, 4), (1, 12, 12)])
def test_counts(m, N, parts):
    marks = Random(N).uniform(m, N) < 0.7
    expected = [
        sum(part)
        for row in marks.tolist()
        for part in (row[i * N // parts : (i + 1) * N // parts] for i in range(parts))
    ]
    actual = counted(marks, parts)
    assert actual.dtype == torch.int64 and actual.tolist() == expected


BOUNDS = {
    "one sequence": ([0, 6], True),
    "empty sequences": ([0, 0, 2, 2, 6, 6], True),
    "many": ([*range(4000), 6, 6], False),
    "too late": ([1, 3, 6], False),
    "too early": ([-1, 3, 6], False),
    "too short": ([0, 3, 5], False),
    "too long": ([0, 3, 7], False),
    "falling": ([0, 4, 3, 6], False),
    "falling at the end": ([0, 7, 6], False),
    "a single one": ([6], False),
}


@pytest.mark.parametrize(("bounds", "right"), BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("parts", [1, 3])
def test_boundaries_beside_the_counts(bounds, right, parts):
    marks = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0]], device=DEVICE).bool()
    bounds = torch.tensor(bounds, device=DEVICE)
    for x in (bounds, strided(bounds)):
        *actual, wrong = counted(marks, parts, x).tolist()
        assert actual == counted(marks, parts).tolist()
        assert (wrong == 0) == right


def test_long_boundaries_that_fall_in_the_middle():
    bounds, marks = torch.arange(10001, device=DEVICE), torch.ones(1, 10000, device=DEVICE).bool()
    assert counted(marks, cu_seqlens=bounds).tolist() == [10000, 0]
    bounds[4096] = 4094
    count, wrong = counted(marks, cu_seqlens=bounds).tolist()
    assert count == 10000 and wrong > 0


def test_boundaries_without_tokens():
    marks = torch.ones(1, 0, device=DEVICE).bool()
    for bounds, right in (([0], True), ([0, 0], True), ([0, 1], False)):
        count, wrong = counted(marks, cu_seqlens=torch.tensor(bounds, device=DEVICE)).tolist()
        assert count == 0 and (wrong == 0) == right


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 70), (300, 2), (3, 5, 64)], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 0, 5])
def test_one_of_several_ids(shape, ignore_index):
    """A wrong one, which must be found, before any other; none of empty slots."""
    random = Random(shape[0])
    ids = random.integers(40, *shape) + 1
    ids[..., ::2] = ignore_index
    ids[1::3] = ignore_index
    if ids.numel():
        ids[-1, ..., 1:], ids[-1, ..., 0] = ignore_index, 17
        ids[0, ..., 0] = -7
    expected = []
    for row in ids.reshape(-1, shape[-1]).tolist():
        filled = [x for x in row if x != ignore_index]
        expected.append(ignore_index if not filled else min(filled) if min(filled) < 0 else max(filled))
    for x in (ids, strided(ids)):
        actual = one_per_position(x, ignore_index)
        assert actual.dtype == torch.int64 and actual.shape == shape[:-1]
        assert actual.flatten().tolist() == expected


@pytest.mark.parametrize("n", [0, 1, 7, 3000])
@pytest.mark.parametrize("ignore_index", [-100, 0, 5])
@pytest.mark.parametrize("start", [0, 4])
def test_columns_of_a_shard(n, ignore_index, start):
    width, ids = 6, Random(n).integers(14, n)
    ids[::3] = ignore_index
    columns = range(start, start + width)
    expected = [-100 if y == ignore_index else y - start if y in columns else width for y in ids.tolist()]
    actual = shard_columns(strided(ids), start, width, ignore_index, -100)
    assert actual.device.type == DEVICE.type and actual.tolist() == expected


@pytest.mark.parametrize("N", [1, 7, 3000])
def test_clamped_targets_where_some_are_ignored(N):
    V, random = 11, Random(N)
    ids = random.integers(V, N)
    supervised = torch.arange(N, device=DEVICE) % 3 != 1
    targets = torch.where(supervised, ids, -100)
    actual, wrong = clamped(targets, V, -100, supervised=supervised)
    assert torch.equal(actual, targets) and not wrong.any()
    for place, value in itertools.product({0, N // 2, N - 1}, (-100, -1, V, 3)):
        others = targets.clone()
        others[place] = value
        actual, wrong = clamped(others, V, -100, supervised=supervised)
        assert wrong.sum() == (value != -100 if not supervised[place] else value != 3)
        assert torch.equal(actual, torch.where(supervised, others.clamp(0, V - 1), -100))


@pytest.mark.parametrize("N", [1, 7, 3000])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int64])
def test_cleaned_targets(N, dtype):
    V, random = 11, Random(N)
    given = torch.where(torch.arange(N, device=DEVICE) % 3 != 1, random.integers(V, N), -100)
    items = None if dtype is None else torch.tensor(2, dtype=dtype, device=DEVICE)
    for targets in (given, strided(given)):
        ids, supervised, counts = cleaned(targets, V, -100, items)
        assert torch.equal(ids, given) and torch.equal(supervised, given != -100)
        assert counts.tolist() == [(given != -100).sum(), 0]
    for place, value in itertools.product({0, N // 2, N - 1}, (-1, V)):
        targets = given.clone()
        targets[place] = value
        ids, supervised, counts = cleaned(targets, V, -100, items)
        assert torch.equal(ids, torch.where(targets != -100, targets.clamp(0, V - 1), -100))
        assert torch.equal(supervised, targets != -100)
        assert counts.tolist() == [(targets != -100).sum(), 1]
    if items is not None:
        assert cleaned(given, V, -100, torch.zeros_like(items))[2][1] > 0
    assert cleaned(given.fill_(4), V, 4)[2].tolist() == [0, 0]
