"""The table of statistics: kernels, twins, the merge of the shards, the oracle and docs have each entry."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor

from logitless import TokenStats
from logitless.engine.batch import Batch
from logitless.engine.sampling_mask import STATISTICS_OF_SETS
from logitless.kernels.head import cross_entropy_triton, row_partials_triton, shards_triton
from logitless.kernels.head.cross_entropy import (
    TokenBuffers,
    allocate_stats,
    logits_gradient,
    stat_names,
    token_statistics,
)
from logitless.kernels.head.shards import merge_stats
from logitless.kernels.head.statistics import DIFFERENTIABLE, FLAGS, NAMES, STATISTICS, Statistic
from logitless.kernels.head.transform import LogitTransform
from logitless.kernels.launch import OF_CHUNKS
from logitless.tools.oracle import statistics_by_definition
from tests.kernels.support import DEVICE, TWINS

DOCS = Path(__file__).parents[3] / "docs"
V, WIDTH = 23, 9  # of the vocabulary and of its first shard
OPTIONS = {"transform": LogitTransform(), "ignore_index": -100}
DTYPE = torch.float64 if TWINS else torch.float32
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
every = pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: statistic.name)


def example() -> tuple[Tensor, Tensor]:
    """Logits (6, V) and targets; the targets of the first rows, in both shards, have the largest logits."""
    z = torch.randn(6, V, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")
    targets = torch.tensor([3, 20, 0, 8, 9, 22], device="cpu")
    z[[0, 1], targets[:2]] = 4.0
    return z.to(DEVICE, DTYPE), targets.to(DEVICE)


def read(z: Tensor, columns: Tensor, name: str) -> TokenBuffers:
    out = allocate_stats((name,), len(columns), DTYPE, DEVICE)
    token_statistics(z.contiguous(), columns, out, **OPTIONS)
    return out


def defined(statistic: Statistic, z: Tensor, targets: Tensor) -> Tensor:
    return statistic.compute(z, z.log_softmax(1), targets, None)


@every
def test_computed_by_its_definition(statistic):
    z, targets = example()
    expected = defined(statistic, z, targets)
    torch.testing.assert_close(
        getattr(read(z, targets, statistic.name), statistic.name), expected, **TOLERANCE
    )
    oracle = statistics_by_definition(z, Batch(targets, V, {}), None)
    assert torch.equal(oracle[statistic.name], expected)


@every
def test_merged_over_shards(statistic):
    z, targets = example()
    columns = [torch.where(targets < WIDTH, targets, WIDTH)]
    columns.append(torch.where(targets < WIDTH, V - WIDTH, targets - WIDTH))
    shards = [read(part, at, statistic.name) for part, at in zip(z.split((WIDTH, V - WIDTH), 1), columns)]
    gathered = torch.stack([torch.stack([x for _, x in shard.items()]) for shard in shards])
    out = allocate_stats((statistic.name,), len(targets), DTYPE, DEVICE)
    merge_stats(gathered, columns[0], out, rank=0, ignore_index=-100)
    expected = defined(statistic, z, targets)
    torch.testing.assert_close(getattr(out, statistic.name), expected, **TOLERANCE)


@every
def test_derivative(statistic):
    if not statistic.derivative:
        assert statistic.name not in DIFFERENTIABLE
        return
    z, targets = example()
    x = z.clone().requires_grad_()
    upstream = torch.linspace(0.5, 1.5, len(targets), dtype=DTYPE, device=DEVICE)
    (expected,) = torch.autograd.grad(defined(statistic, x, targets), x, upstream)
    stats, grads = read(z, targets, "entropy"), TokenBuffers(**{statistic.name: upstream})
    gradient = torch.empty_like(z)
    logits_gradient(z, targets, stats, grads, gradient=gradient, **OPTIONS)
    torch.testing.assert_close(gradient, expected, **TOLERANCE)


KERNELS = {
    "row": cross_entropy_triton.row_kernel,
    "merge": shards_triton.merge_kernel,
    "finish": row_partials_triton.finish_kernel,
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_have_a_pointer_of_each_statistic_in_order(kernel):
    names = (kernel if hasattr(kernel, "arg_names") else kernel.kernel).arg_names
    start = names.index("logps_ptr")
    pointers = [name.removesuffix("_ptr") for name in names[start : start + len(NAMES)]]
    assert all(name.startswith(pointer) for name, pointer in zip(NAMES, pointers, strict=True)), pointers
    assert {f"{pointer}_ptr" for pointer in pointers} <= {*OF_CHUNKS["do_not_specialize_on_alignment"]}
    assert [name for name in names if name in FLAGS] == [*FLAGS]


def test_levels_have_a_constexpr_each():
    levels = [statistic.level for statistic in STATISTICS]
    assert levels == sorted(levels) and stat_names(()) == NAMES[: levels.count(1)]
    first = {level: NAMES[levels.index(level)] for level in sorted({*levels})}
    assert [*FLAGS.values()] == [name for level, name in first.items() if level > 1]


def test_over_kept_ids_everything_that_is_allocated_is_computed():
    assert {*stat_names(STATISTICS_OF_SETS)} == {*STATISTICS_OF_SETS, "lse_residual"}


@every
def test_documented(statistic):
    assert statistic.name in inspect.get_annotations(TokenStats)
    assert f"\n    {statistic.name}: " in inspect.cleandoc(TokenStats.__doc__)
    if statistic.level > 1:
        assert f"`{statistic.name}`" in (DOCS / "howto" / "own-loss.md").read_text()


def test_table_of_the_design_page():
    table = "\n| statistic | level | definition | d statistic / d z | over shards |\n|---|---|---|---|---|\n"
    for x in STATISTICS:
        derivative = x.derivative or "constant"
        table += f"| `{x.name}` | {x.level} | {x.definition} | {derivative} | {x.merged} |\n"
    assert f"{table}\n" in (DOCS / "design.md").read_text(), f"docs/design.md should have{table}"
