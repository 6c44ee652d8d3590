"""Sums over sequences and their transpose: exact, apart, deterministic and differentiable."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from logitless.engine.segments import EqualSegments, Segments
from tests.support import DEVICE

# Lengths in row order, sequences of a group.
CASES = {
    "one sequence": ([5], 1),
    "sequences": ([3, 1, 4], 1),
    "a pair": ([3, 2], 2),
    "pairs": ([3, 1, 4, 2, 5, 2], 2),
    "triples": ([3, 1, 4, 2, 5, 2], 3),
    "empty ones": ([0, 3, 0, 0, 2, 0], 2),
    "all empty": ([0, 0, 0, 0], 2),
    "none": ([], 2),
}
cases = pytest.mark.parametrize(("lengths", "roles"), CASES.values(), ids=CASES)


def segments_of(lengths: list[int], roles: int) -> Segments:
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return Segments(sizes, sum(lengths), len(lengths) // roles, roles)


def equal_segments(length: int, count: int, roles: int) -> Segments:
    return EqualSegments(length, count // roles, roles, DEVICE)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float64).to(DEVICE)


def numbers_in_row_order(lengths: list[int], roles: int) -> list[int]:
    """Which sequence, in sequence order (role by role), each one in row order (group by group) is."""
    groups = len(lengths) // roles
    return [role * groups + group for group in range(groups) for role in range(roles)]


@cases
def test_sum_and_spread(lengths, roles):
    segments, numbers = segments_of(lengths, roles), numbers_in_row_order(lengths, roles)
    x = random(sum(lengths))
    expected = [0.0] * len(lengths)
    for number, start, length in zip(numbers, segments.starts.tolist(), lengths, strict=True):
        expected[number] = math.fsum(x[start : start + length].tolist())
    torch.testing.assert_close(segments.sum(x).tolist(), expected)
    y = random(len(lengths), seed=1)
    assert segments.to_row_order(y).tolist() == [y.tolist()[number] for number in numbers]
    assert torch.equal(segments.to_sequence_order(segments.to_row_order(y)), y)
    assert segments.spread(y).tolist() == [
        y.tolist()[number] for number, length in zip(numbers, lengths) for _ in range(length)
    ]


@cases
def test_gradients(lengths, roles):
    segments = segments_of(lengths, roles)
    x, y = random(sum(lengths)).requires_grad_(), random(len(lengths), seed=1).requires_grad_()
    for function, given in ((segments.sum, x), (segments.spread, y)):
        if not given.numel():
            continue
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradgradcheck(lambda t, function=function: function(t).square(), given)
        by_function = torch.func.grad(lambda t, function=function: function(t).square().sum())(given.detach())
        (by_autograd,) = torch.autograd.grad(function(given).square().sum(), given)
        torch.testing.assert_close(by_function, by_autograd)


@pytest.mark.parametrize(
    "lengths", [[16_384, 16_384], [16_384, 0, 1, 40_000], [100] * 300], ids=["two", "ragged", "many"]
)
@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
def test_sums_in_fp32_are_exact(lengths, strided):
    """As exact as a rounded sum in fp64; added one by one, 16k numbers like these lose 1e-5 to 1e-4."""
    segments = segments_of(lengths, 1)
    x = (-5 - random(sum(lengths)).abs()).float()
    if strided:
        x = torch.stack((x, x + 1), 1)[:, 0]
    wide = replace(segments, lengths=segments.lengths.clone()).sum(x.double())
    expected = [math.fsum(part.tolist()) for part in x.split(lengths)]
    torch.testing.assert_close(wide.tolist(), expected, rtol=1e-13, atol=0)
    forms = [segments]
    if len(set(lengths)) == 1:
        forms.append(equal_segments(lengths[0], len(lengths), 1))
    allowed = torch.finfo(torch.float32).eps * (0.5 if DEVICE.type == "cpu" else 8)
    for form in forms:
        y = torch.zeros(len(lengths), requires_grad=True)
        (gradient,) = torch.autograd.grad(form.spread(y), y, x)
        for ours in (form.sum(x), gradient):
            assert ours.dtype == torch.float32
            for actual, truth in zip(ours.tolist(), expected, strict=True):
                assert abs(actual - truth) <= allowed * abs(truth) * (1 + 1e-6)


@pytest.mark.parametrize(("length", "count", "roles"), [(5, 6, 2), (2, 3, 1), (4, 1, 1), (16_384, 2, 1)])
def test_sequences_of_one_length(length, count, roles):
    """As `Segments` of equal lengths, also strided, with gradients."""
    segments = equal_segments(length, count, roles)
    others = segments_of([length] * count, roles)
    assert others.count == count
    for name in ("lengths", "ids", "starts"):
        assert torch.equal(getattr(segments, name), getattr(others, name))
    wide = random(length * count, 2).float()[:, 0].requires_grad_()
    x = random(count, seed=1).float().requires_grad_()
    for function, given in (("sum", wide), ("spread", x)):
        found = []
        for each in (segments, others):
            out = getattr(each, function)(given)
            upstream = random(*out.shape, seed=2).float()
            found.append((out, *torch.autograd.grad(out, given, upstream)))
        torch.testing.assert_close(*found, rtol=6e-8, atol=0 if DEVICE.type == "cpu" else 1e-4)
    spread = segments.spread(x.detach())
    spread[0] = 7
    assert (spread == 7).sum() == 1 and not (x == 7).any(), "new memory, which terms may change in place"


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("roles", [1, 2])
def test_what_is_not_finite_stays_in_its_sequence(value, roles):
    lengths = [3, 2, 4, 1]
    segments, x = segments_of(lengths, roles), random(10).float()
    clean = segments.sum(x)
    x[4] = value  # the second sequence in row order
    hit = numbers_in_row_order(lengths, roles)[1]
    actual = segments.sum(x)
    assert not actual[hit].isfinite()
    others = [i for i in range(4) if i != hit]
    assert actual[others].tolist() == clean[others].tolist()
    # Backwards alike: an upstream gradient that is not finite reaches the tokens of its sequence alone.
    y = torch.ones(4, requires_grad=True)
    spread = segments.spread(y)
    (gradient,) = torch.autograd.grad(spread, y, x)
    assert not gradient[hit].isfinite() and gradient[others].isfinite().all()
    leaf = random(10).requires_grad_()
    upstream = torch.ones(4, dtype=torch.float64)
    upstream[hit] = value
    (gradient,) = torch.autograd.grad(segments.sum(leaf), leaf, upstream)
    assert gradient.isfinite().tolist() == [True] * 3 + [False] * 2 + [True] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits_in_every_run(dtype):
    lengths = [5000, 1, 0, 17_000, 333, 64]
    x, y = random(sum(lengths)).to(dtype).requires_grad_(), random(6).to(dtype).requires_grad_()
    runs = []
    for _ in range(3):
        segments = segments_of(lengths, 2)
        sums, spread = segments.sum(x), segments.spread(y)
        gradients = (
            *torch.autograd.grad(sums.square().sum(), x),
            *torch.autograd.grad(spread.square().sum(), y),
        )
        runs.append((sums.detach(), spread.detach(), *gradients))
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))
