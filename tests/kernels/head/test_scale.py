"""Scaling of rows: computed in fp32 and rounded once, for every pair of dtypes, in place and apart."""

import itertools
import math

import pytest
import torch

from logitless.kernels.head.scale import scale, scale_all
from tests.cases import DTYPES
from tests.kernels.support import DEVICE, Random, poisoned, rounded

SHAPES = [(1, 1), (5, 17), (3, 5003), (4, 2048), (6, 1024), (3, 512), (2, 4100)]
PAIRS = {f"{x} to {out}": (DTYPES[x], DTYPES[out]) for x, out in itertools.product(DTYPES, DTYPES)}


@pytest.mark.parametrize("per_row", [True, False], ids=["factor per row", "one factor"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS.values(), ids=PAIRS)
def test_rounds_once(dtype, out_dtype, shape, per_row):
    random = Random()
    x = random.normal(*shape).to(dtype)
    factor = random.normal(*(shape[:1] if per_row else ())) * 3
    factor.view(-1)[0] = 1.0 if per_row else factor  # which leaves nothing to do in place
    expected = rounded(x.float() * (factor[:, None] if per_row else factor), out_dtype)
    out = poisoned(*shape, dtype=out_dtype)
    kept = x.clone()
    assert scale(x, factor, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    assert torch.equal(x, kept)
    if dtype == out_dtype:
        scale(x, factor, x)
        assert torch.equal(x, expected)


@pytest.mark.parametrize("per_row", [True, False], ids=["factor per row", "one factor"])
def test_strides(per_row):
    buffer, out = torch.randn(5, 40, device=DEVICE), poisoned(5, 50, dtype=torch.bfloat16)
    factor = torch.randn(10, device=DEVICE)[::2] if per_row else torch.tensor(1.7, device=DEVICE)
    x = buffer[:, 3:33]
    scale(x, factor, out[:, 10:40])
    assert torch.equal(out[:, 10:40], rounded(x * (factor[:, None] if per_row else factor), torch.bfloat16))
    assert out[:, :10].isnan().all() and out[:, 40:].isnan().all()
    transposed = torch.randn(30, 5, device=DEVICE).t()
    wide = poisoned(5, 30, dtype=torch.float32)
    scale(transposed, factor, wide)
    assert torch.equal(wide, transposed * (factor[:, None] if per_row else factor))


@pytest.mark.parametrize("factors", ["one for all", "one a row", "two a row"])
@pytest.mark.parametrize("widths", [(17, 5003), (5003, 17), (2048, 2048)], ids=str)
def test_several_matrices_at_once(widths, factors):
    """In place and apart, of dtypes of their own; three are no pair."""
    random = Random()
    x, y, z = (random.normal(7, width) for width in (*widths, 40))
    given = [
        random.normal(*(() if factors == "one for all" else (7,))) for _ in range(1 + (factors[0] == "t"))
    ]
    product = given[0].reshape(-1, 1) if len(given) == 1 else (given[0] * given[1])[:, None]
    half, out = y.bfloat16(), poisoned(7, widths[0], dtype=torch.bfloat16)
    expected = [
        rounded(x * product, torch.bfloat16),
        rounded(half.float() * product, torch.bfloat16),
        z * product,
    ]
    scale_all(((x, out), (half, half), (z, z)), given)
    for actual, wanted in zip((out, half, z), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("factor", [math.inf, math.nan, -0.75, 1.0])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp16")])
@pytest.mark.parametrize("guards", ["rows", "rows, some", "rows, none", "none", "unguarded"])
def test_ignored_rows_stay_0_for_every_factor(guards, factor, dtype, out_dtype):
    """A matrix of which some rows are supervised, and one that any supervised row reaches."""
    random = Random()
    supervised = random.integers(2, 41).bool()
    x, y = random.normal(41, 305).to(DTYPES[dtype]), random.normal(7, 305).to(DTYPES[dtype])
    x[~supervised] = 0
    if guards.endswith("none"):
        supervised[:], x[:], y[:] = False, 0, 0
    count = supervised.sum()
    given = {
        "rows": (supervised, None),
        "rows, some": (supervised, count),
        "rows, none": (supervised, count),
        "none": (count, count),
        "unguarded": (),
    }[guards]
    expected = [rounded(matrix.float() * factor, DTYPES[out_dtype]) for matrix in (x, y)]
    if guards != "unguarded":
        expected[0][~supervised] = 0
    if guards.endswith("none"):
        expected[1][:] = 0
    outs = [poisoned(*matrix.shape, dtype=DTYPES[out_dtype]) for matrix in (x, y)]
    factor = torch.tensor(factor, device=DEVICE)
    ways = [((x, outs[0]), (y, outs[1]))]
    if dtype == out_dtype:
        ways.append(((x, x), (y, y)))
    for pairs in ways:
        scale_all(pairs, (factor,), given)
        for (_, actual), wanted in zip(pairs, expected, strict=True):
            assert torch.equal(actual.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_any_length_fits_the_grid(monkeypatch):
    """CUDA allows 65,535 blocks along the second dimension; one row of 2^28 numbers must not lie along it."""
    pytest.importorskip("triton")
    from logitless.kernels.head import scale_triton

    class Grid:
        def __getitem__(self, grid):
            actual.append(grid)
            return lambda *args, **options: None

    actual = []
    monkeypatch.setattr(scale_triton, "scale_kernel", Grid())
    monkeypatch.setattr(scale_triton, "scale_all_kernel", Grid())
    for shape in ((1, 2**28), (2**17, 2048), (3, 5 * 2**20), (2**28, 1)):
        x = torch.empty(shape, device="meta")
        scale_triton.scale_all(((x, x), (x, x)), (torch.empty((), device="meta"),), (None, None))
    # A factor of 1 must not launch as many programs as there are blocks.
    assert all(grid[0] <= 65535 for grid in actual), actual
    for shape in ((2**28, 1), (2**17, 2048)):
        x = torch.empty(shape, device="meta")
        scale_triton.scale_all(((x, x), (x, x)), (torch.empty(shape[0], device="meta"),), (None, None))
    assert all(grid[1] <= 65535 for grid in actual if len(grid) > 1), actual


@pytest.mark.parametrize("factor", [1.0, -0.75])
def test_few_programs_scale_many_blocks(factor):
    """More blocks than programs, also in place; the last of them ends within a row."""
    x = Random().normal(41, 3005)
    out, truth = poisoned(41, 3005, dtype=torch.bfloat16), x * factor
    scale(x, torch.tensor(factor, device=DEVICE), out)
    assert torch.equal(out, rounded(truth, torch.bfloat16))
    scale(x, torch.tensor(factor, device=DEVICE), x)
    assert torch.equal(x, truth)
