"""How a call will run: strategy and chunk boundaries, from shapes, budget, scope and what needs a gradient.

A plan is a list of steps over the rows (supervised tokens, whole groups side by side). A step projects its rows to logits, may
*read* them into per-token numbers, may then *solve* a range of rows (evaluate the loss there and its gradient with respect to
those numbers), and may *write*: turn the logits into their gradient and multiply it out. Every strategy is such a list:

    fused, resident   read + solve + write, chunk by chunk                    logits are projected once: 3 GEMMs
    recompute         read ... read + solve of all of it, then write ... write   projected twice: 4 GEMMs
    row_scaled        read + write of d logp / d hidden, solve at the end     no d_weight: 2 GEMMs
    loss_only         read ... read + solve                                   1 GEMM
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch

MIB = 2**20


class BudgetWarning(UserWarning):
    """The logits budget forces a slower plan, or cannot hold even one row."""


class Span(NamedTuple):
    """Rows `start:stop`, which are groups `first:last`."""

    start: int
    stop: int
    first: int = 0
    last: int = 0


class Step(NamedTuple):
    start: int
    stop: int
    read: bool = False
    write: bool = False
    solve: Span | None = None


@dataclass(frozen=True)
class Plan:
    strategy: str
    steps: tuple[Step, ...] = field(repr=False)
    rows: int
    row_bytes: int
    budget: int
    parts: tuple[str, ...] = ()

    @property
    def chunks(self) -> int:
        """How many chunks of logits are projected."""
        return sum(step.stop > step.start for step in self.steps)

    @property
    def token_chunk(self) -> int:
        """Rows of the largest chunk."""
        return max((step.stop - step.start for step in self.steps), default=0)

    @property
    def chunk_bytes(self) -> int:
        return self.token_chunk * self.row_bytes

    def describe(self) -> str:
        parts = f" ({', '.join(self.parts)})" if len(self.parts) > 1 else ""
        return (
            f"{self.strategy}{parts}: {self.rows} supervised tokens in {self.chunks} chunks of up to {self.token_chunk}, "
            f"{self.chunk_bytes / MIB:.1f} of {self.budget / MIB:.1f} MiB"
        )


@cache
def default_budget(device: torch.device) -> int:
    """1 GiB, or a thirty-second of a small card's memory; a quarter of that on the CPU, whose caches like small chunks."""
    if device.type == "cpu":
        return 256 * MIB
    backend = getattr(torch, device.type, None)
    if hasattr(backend, "get_device_properties"):
        return min(1024 * MIB, backend.get_device_properties(device).total_memory // 32)
    return 512 * MIB


# Chunk sizes whose products run well on every shape of `python -m benchmarks gemm`: on an H200, d_weight summed in fp32, 4,096 rows
# cost 0.0-1.3% over the best size of the shape, 2,048 rows 1.4-5.1%, 1,536 rows 7-10%, 1,024 rows 11.8-16.7%; others
# vary by 10%.
GOOD_CHUNKS = (4096, 2048, 1536, 1024, 512)
# Rows of a tile of the products.
TILE = 128


def chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Rows of a chunk: all of them, else the largest good size that fits in the budget, else what fits, evened out."""
    capacity = max(1, budget // row_bytes)
    good = next((size for size in GOOD_CHUNKS if size <= capacity), None)
    if rows <= (good or capacity):
        return max(1, rows)
    if good is None:
        return -(-rows // -(-rows // capacity))
    # A few rows more in every chunk cost less than a last chunk of only a few, which reads and writes all of d_weight too.
    stretched = -(-rows // (rows // good) // TILE) * TILE
    return stretched if stretched <= min(capacity, good + good // 8) else good


def make_plan(
    *,
    rows: int,
    groups: Sequence[int] | None,
    row_bytes: int,
    budget: int,
    differentiable: bool,
    trainable_head: bool,
    linear_in_logps: bool,
    solved: bool = True,
    rewalk: bool = False,
    rereads: bool = False,
) -> Plan:
    """
    Args:
        rows: supervised tokens.
        groups: rows of each group of tokens that must be seen together; None when every token stands alone.
        row_bytes: memory of one row of logits and of every temporary beside it.
        budget: bytes that a chunk may take.
        differentiable: whether anything needs a gradient.
        trainable_head: whether weight or bias do.
        linear_in_logps: whether the loss reaches the logits through log p(target) (and lse) alone.
        solved: whether the loss is evaluated here; False when per-token numbers are handed out instead.
        rewalk: the second walk of a call whose per-token gradients have arrived from outside; `rereads` says whether the gradient
            of a chunk comes from reading it again.
    """
    C = chunk_rows(rows, row_bytes, budget)

    def chunks(start: int, stop: int, **what):
        return [Step(a, min(a + C, stop), **what) for a in range(start, stop, C)]

    def plan(strategy: str, steps: list[Step], parts=()):
        return Plan(strategy, tuple(steps), rows, row_bytes, budget, parts)

    def solving(steps: list[Step], first: int, last: int):
        """`steps`, the last of which solves all of their rows; one empty step where there are no rows at all."""
        steps = steps or [Step(0, 0)]
        span = Span(steps[0].start, steps[-1].stop, first, last)
        return [*steps[:-1], steps[-1]._replace(solve=span)]

    everything = (0, 0 if groups is None else len(groups))
    if rewalk:
        return plan("recompute", chunks(0, rows, read=rereads, write=True))
    if not differentiable:
        reads = chunks(0, rows, read=True)
        return plan("loss_only", solving(reads, *everything) if solved else reads)
    if not solved:
        if linear_in_logps and not trainable_head:
            return plan("row_scaled", chunks(0, rows, read=True, write=True))
        return plan("recompute", chunks(0, rows, read=True))
    if groups is None:
        reads = chunks(0, rows, read=True, write=True) or [Step(0, 0)]
        return plan("fused", [step._replace(solve=Span(step.start, step.stop)) for step in reads])
    if linear_in_logps and not trainable_head:
        return plan("row_scaled", solving(chunks(0, rows, read=True, write=True), *everything))
    return plan(*_whole_groups(groups, max(1, budget // row_bytes), C, chunks, solving))


def _whole_groups(groups, capacity: int, C: int, chunks, solving) -> tuple[str, list[Step], tuple[str, ...]]:
    """Pack whole groups into resident chunks of about C rows; walk a group beyond the capacity twice."""
    steps, parts = [], []
    start = stop = first = 0

    def flush(last: int):
        nonlocal start, first
        if last > first:
            steps.append(Step(start, stop, True, True, Span(start, stop, first, last)))
            parts.extend(["resident"] if stop > start else [])
        start, first = stop, last

    for group, size in enumerate(groups):
        if size > capacity:
            flush(group)
            stop += size
            steps += solving(chunks(start, stop, read=True), group, group + 1) + chunks(start, stop, write=True)
            parts.append("recompute")
            start, first = stop, group + 1
            continue
        if stop + size - start > min(capacity, C):
            flush(group)
        stop += size
    flush(len(groups))
    kinds = tuple(dict.fromkeys(parts)) or ("resident",)
    return (kinds[0] if len(kinds) == 1 else "mixed"), steps, kinds
