"""The plan of a pass: its strategy and its chunks.

A plan depends on shapes, budget, the scope of the loss, and the tensors that need a gradient. It is a list of
steps over rows. The rows are the supervised tokens (all tokens with `compact=False`), and the rows of a group
are adjacent. A step projects its rows to logits. It may then *read* (compute per-token statistics of the
logits), *evaluate* (compute the loss of a span of rows, and its gradient with respect to the statistics), and
*write* (overwrite the logits with their gradient, and compute d_hidden and d_weight from it). Every strategy
is a list of such steps. The list below is for a pass that solves a call (`Pass.SOLVE`). The number of
products is for trained hidden states and weight; with a frozen head, only hidden is trained:

    fused, resident   read + evaluate + write, chunk by chunk                     3 products; frozen head 2
    recompute         read ... read + evaluate all of it, then write ... write    4 products
    cached_grad       read + write of d logp / d hidden, evaluate at the end      frozen head: 2
    loss_only         read ... read + evaluate                                    nothing is trained: 1

If the loss is computed outside the pass, from per-token statistics, the plan of `Pass.STATISTICS` only reads
(recompute, loss_only) or also writes d logp / d hidden (cached_grad), and does not evaluate. For recompute,
`Pass.GRADIENTS` then writes in the backward pass. With `accumulate_into`, the forward pass is loss_only, and
the backward pass solves the call again: `Plan.in_backward`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

MIB = 2**20


class Pass(Enum):
    """The purpose of a pass over the rows."""

    SOLVE = "the loss, with its gradients"
    STATISTICS = "per-token statistics, for autograd outside"
    GRADIENTS = "the gradients that belong to numbers handed out before"


class BudgetWarning(UserWarning):
    """Warning that the logits budget requires a slower plan, or is smaller than one row."""


class Span(NamedTuple):
    """Rows `start:stop`, which are the groups `first:last`."""

    start: int
    stop: int
    first: int = 0
    last: int = 0


class Kind(Enum):
    """The way in which the rows of a step are computed; see `replay.py`."""

    PLAIN = "their logits are projected"
    PICKED = "projected, and the logits of their kept ids picked"
    GATHERED = "the products of their kept ids, and no others"


class Step(NamedTuple):
    """A chunk of rows `start:stop` and the operations on its logits. A step without rows may evaluate."""

    start: int
    stop: int
    read: bool = False
    write: bool = False
    evaluate: Span | None = None  # rows of which the loss is computed; may differ from the chunk's
    kind: Kind = Kind.PLAIN


class Replayed(NamedTuple):
    """The number of rows of each kind in a call with a sampling mask; see `replay.py`."""

    plain: int
    picked: int
    gathered: int
    certain: int
    tokens: int | None  # rows with a set; None with compact=False, as the host does not know the number
    kept_ids: int | None  # number of ids in all sets
    single: int | None  # number of sets with one id

    @property
    def rows(self) -> int:
        """All rows of the call."""
        return self.plain + self.picked + self.gathered + self.certain

    def describe(self) -> str:
        """The beginning of `Plan.describe`."""
        if self.tokens is None:
            return "replayed: the sets are on the device (compact=False); "
        how = f", {self.picked:,} projected" if self.picked else ""
        spared = self.gathered + self.certain
        share = f", {spared / self.rows:.0%} of the tokens not projected" if spared else ""
        return (
            f"replayed: {self.tokens:,} of {self.rows:,} tokens over {self.kept_ids:,} ids, "
            f"{self.single:,} certain{how}{share}; "
        )


@dataclass(frozen=True)
class Plan:
    """A strategy and its steps; `out.plan` is the plan of a call.

    Attributes:
        strategy: "fused", "resident", "recompute", "cached_grad", "loss_only" or "mixed" (resident and
            recompute groups: `parts`).
        steps: the chunks, in order.
        rows: number of projected tokens: the supervised tokens, or all tokens with `compact=False`.
        row_bytes: bytes of one row of logits and its temporaries.
        budget: maximum number of bytes of a chunk: `logits_budget` minus `fixed_bytes`.
        chunks: number of chunks of logits that are projected. A chunk that is projected twice in this pass
            counts twice.
        token_chunk: rows of the largest chunk.
        parts: the distinct strategies of the groups, such as ("resident",) or ("resident", "recompute").
            Empty if the plan was not made group by group.
        columns: number of logits that are computed per row; 0: the logits of all ids.
        backward: number of products for the gradients of a chunk: 1 if d_hidden is needed, plus 1 if d_weight
            is needed.
        later: number of products per row in the backward pass if the forward pass only computes statistics
            (`reduction="none"`); 0 in other calls.
        fixed_bytes: bytes of `logits_budget` for temporaries that do not depend on the number of rows.
        heads: number of heads of the call. The plan is that of the last head.
        logits: dtype of the logits from which the statistics are computed, such as "bfloat16" for rounded
            logits, or "float32" for the accumulators of the product.
        replay: the number of tokens of each kind, in a call with a sampling mask. `rows` then counts only the
            projected tokens.
        in_backward: the plan of the backward pass, if the backward pass projects every chunk again and
            computes the gradients (`accumulate_into` without `accumulate_now`); else None. The attributes
            above then describe the forward pass.
    """

    strategy: str
    steps: tuple[Step, ...] = field(repr=False)
    rows: int
    row_bytes: int
    budget: int
    chunks: int
    token_chunk: int
    parts: tuple[str, ...] = ()
    columns: int = 0
    backward: int = 0
    later: int = 0
    fixed_bytes: int = 0
    heads: int = 1
    logits: str = ""
    replay: Replayed | None = None
    in_backward: "Plan | None" = None

    @property
    def replayed(self) -> int | None:
        """Number of tokens with a set of kept ids; None without a sampling mask or with compact=False."""
        return None if self.replay is None else self.replay.tokens

    @property
    def certain(self) -> int | None:
        """Number of tokens whose set has one id; None if `replayed` is None."""
        return None if self.replay is None else self.replay.single

    @property
    def kept_ids(self) -> int | None:
        """Number of ids in all sets; None if `replayed` is None."""
        return None if self.replay is None else self.replay.kept_ids

    @property
    def d_weight_parts(self) -> int:
        """Upper bound of the number of parts (chunks, gathered rows) that are summed to d_weight."""
        return self.chunks + sum(step.kind is Kind.GATHERED for step in self.steps)

    @property
    def chunk_bytes(self) -> int:
        return self.token_chunk * self.row_bytes

    @property
    def products(self) -> float:
        """Products with the head per projected token, in forward and backward pass; 0 for gathered columns.

        With a sampling mask, the average over all supervised tokens; 0 if every token has a small set.
        """
        if self.in_backward is not None:
            return replace(self, in_backward=None).products + self.in_backward.products
        if self.columns or not self.rows:
            return 0.0
        projected = [step for step in self.steps if step.kind is not Kind.GATHERED]
        projections = sum((step.stop - step.start) * (1 + step.write * self.backward) for step in projected)
        if self.replay is not None:
            return (projections + self.later * self.rows) / max(1, self.replay.rows)
        return projections / self.rows + self.later

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Describe the plan in one line, for `print(out.plan)`; with `in_backward`, both passes."""
        if self.in_backward is not None:
            passes = replace(self, in_backward=None).describe(), self.in_backward.describe()
            total = f", {self.products:.3g} products in all" if self.products else ""
            return f"{passes[0]}; then, in the backward pass, {passes[1]}{total}"
        head = f"the last of {self.heads} heads: " if self.heads > 1 else ""
        parts = f" ({', '.join(self.parts)})" if len(self.parts) > 1 else ""
        gathered = f"gathered: {_counted(self.columns, 'column')}, " if self.columns else ""
        chunks = (
            f"{_counted(self.chunks, 'chunk')} of {'' if self.chunks == 1 else 'up to '}{self.token_chunk}"
        )
        size = self.fixed_bytes / MIB
        fixed = f" (the budget less {size:.1f} for fixed temporaries)" if self.fixed_bytes else ""
        products = f", {_counted(f'{self.products:.3g}', 'product')}" if self.products else ""
        replayed = "" if self.replay is None else self.replay.describe()
        # Statistics over kept ids are compared with those of a server, which must use logits of the same
        # dtype.
        logits = f", logits in {self.logits}" if self.replay is not None else ""
        return (
            f"{head}{replayed}{gathered}{self.strategy}{parts}: "
            f"{_counted(self.rows, 'projected token')} in {chunks}, "
            f"{self.chunk_bytes / MIB:.1f} of {self.budget / MIB:.1f} MiB{fixed}{products}{logits}"
        )


def _counted(number: int | str, what: str) -> str:
    return f"{number} {what}{'' if str(number) == '1' else 's'}"


# Chunk sizes whose products are fast for every shape of `python -m benchmarks gemm`. On an H200 with d_weight
# summed in fp32, 4,096 rows take 0.0-1.3% more time than the best size for the shape, 2,048 rows 1.4-5.1%,
# 1,536 rows 7-10%, and 1,024 rows 11.8-16.7%. The times of other sizes vary by 10%.
GOOD_CHUNKS = (4096, 2048, 1536, 1024, 512)
# Rows of a tile of the products.
TILE = 128


def chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Return the number of rows of a chunk.

    It is the largest of `GOOD_CHUNKS` that fits into the budget, enlarged by at most 1/8 if that avoids a
    small last chunk, and at most `rows`. If none of `GOOD_CHUNKS` fits, the rows are divided into equal
    chunks that fit.
    """
    capacity = max(1, budget // row_bytes)
    good = next((size for size in GOOD_CHUNKS if size <= capacity), None)
    if rows <= (good or capacity):
        return max(1, rows)
    if good is None:
        return -(-rows // -(-rows // capacity))
    # Slightly larger chunks cost less than a last chunk with few rows, which would read and write all of
    # d_weight.
    stretched = -(-rows // (rows // good) // TILE) * TILE
    return stretched if stretched <= min(capacity, good + good // 8) else good


class Facts(NamedTuple):
    """The properties of a call that determine its strategy."""

    rows: int  # projected tokens
    # Rows of each group that must be evaluated together; None for a loss of single tokens.
    groups: tuple[int, ...] | None
    differentiable: bool  # whether anything needs a gradient
    trainable_head: bool  # whether weight or bias need a gradient
    linear_in_logps: bool  # whether the loss depends on the logits only through log p(target) (and lse)
    rereads: bool = False  # whether Pass.GRADIENTS must read a chunk again to compute its gradient
    columns: int = 0  # columns that are gathered for each row, instead of the whole head
    spared_bytes: int = 0  # bytes of d_weight's sum in a wider dtype, which a single chunk does not need
    # The following fields are copied to the plan; see `Plan`.
    backward: int = 0
    later: int = 0
    fixed_bytes: int = 0
    heads: int = 1
    logits: str = ""


@functools.lru_cache(maxsize=64)
def make_plan(purpose: Pass, facts: Facts, *, row_bytes: int, budget: int) -> Plan:
    """Choose the strategy and cut the rows into chunks of at most `budget` bytes, at `row_bytes` each."""
    rows, groups, differentiable, trainable_head, linear_in_logps, rereads, columns, _, *passed_on = facts
    C = chunk_rows(rows, row_bytes, budget)
    # d_weight of a single chunk is written in the dtype of the products; d_weight of several chunks is summed
    # in fp32. Use a single chunk if its additional rows take no more memory than the fp32 sum. It is also
    # faster (3% at 8,192 tokens).
    if (rows - C) * row_bytes <= facts.spared_bytes and rows * row_bytes <= budget:
        C = max(1, rows)
    if columns:
        # Without a product there is no preferred chunk size: use the largest size that fits.
        C = max(1, -(-rows // -(-rows * row_bytes // budget))) if rows * row_bytes > budget else max(1, rows)
    cached_grad = linear_in_logps and not trainable_head
    everything = Span(0, rows, 0, 0 if groups is None else len(groups))
    strategy = "recompute"
    parts = ()
    if purpose is Pass.GRADIENTS:
        steps = _chunks(0, rows, C, read=rereads, write=True)
    elif not differentiable:
        strategy = "loss_only"
        steps = _chunks(0, rows, C, read=True)
        steps = _evaluating(steps, everything) if purpose is Pass.SOLVE else steps
    elif cached_grad and (purpose is Pass.STATISTICS or groups is not None):
        strategy = "cached_grad"
        steps = _chunks(0, rows, C, read=True, write=True)
        steps = _evaluating(steps, everything) if purpose is Pass.SOLVE else steps
    elif purpose is Pass.STATISTICS:
        steps = _chunks(0, rows, C, read=True)
    elif groups is None:
        steps = _chunks(0, rows, C, read=True, write=True) or [Step(0, 0)]
        strategy = "fused"
        steps = [step._replace(evaluate=Span(step.start, step.stop)) for step in steps]
    else:
        strategy, steps, parts = _whole_groups(groups, max(1, budget // row_bytes), C)
    sizes = [step.stop - step.start for step in steps if step.stop > step.start]
    chunks = len(sizes)
    longest = max(sizes, default=0)
    return Plan(strategy, tuple(steps), rows, row_bytes, budget, chunks, longest, parts, columns, *passed_on)


@functools.lru_cache(maxsize=64)
def make_replay_plan(purpose: Pass, facts: Facts, replay: Replayed, *, row_bytes: int, budget: int) -> Plan:
    """Make the plan of a call with a sampling mask: plain rows, then picked rows, then all gathered rows at
    once.

    For a loss with scope "group" or "batch", the rows are not in the order of the groups. Therefore the plan
    first computes all statistics, then evaluates the loss once, and then computes the gradients, for which
    rows are projected again.
    """
    plain, picked, gathered, certain, *_ = replay
    projected = plain + picked
    chunked = plain + picked + gathered
    rows = chunked + certain
    C = chunk_rows(max(plain, picked), row_bytes, budget)

    def steps_of(**passes: bool) -> list[Step]:
        chunks = _chunks(0, plain, C, **passes)
        chunks += [x._replace(kind=Kind.PICKED) for x in _chunks(plain, projected, C, **passes)]
        if gathered:
            chunks.append(Step(projected, chunked, kind=Kind.GATHERED, **passes))
        return chunks

    everything = Span(0, rows, 0, 0 if facts.groups is None else len(facts.groups))
    strategy = "recompute"
    parts = ()
    if purpose is Pass.GRADIENTS:
        steps = steps_of(write=True)
    elif not facts.differentiable:
        strategy = "loss_only"
        steps = steps_of(read=True)
        steps = _evaluating(steps, everything) if purpose is Pass.SOLVE else steps
    elif purpose is Pass.STATISTICS:
        steps = steps_of(read=True)
    elif facts.groups is None:
        strategy = "fused"
        steps = steps_of(read=True, write=True)
        steps = [step._replace(evaluate=Span(step.start, step.stop)) for step in steps]
        if certain or not steps:
            steps.append(Step(chunked, chunked, evaluate=Span(chunked, rows)))
    elif projected:
        steps = _evaluating(steps_of(read=True), everything) + steps_of(write=True)
    else:
        strategy = "resident"
        steps = _evaluating(steps_of(read=True, write=True), everything)
    sizes = [x.stop - x.start for x in steps if x.stop > x.start and x.kind is not Kind.GATHERED]
    passed_on = facts.backward, facts.later, facts.fixed_bytes, facts.heads, facts.logits
    return Plan(
        strategy,
        tuple(steps),
        projected,
        row_bytes,
        budget,
        len(sizes),
        max(sizes, default=0),
        parts,
        0,
        *passed_on,
        replay,
    )


def _chunks(start: int, stop: int, C: int, *, read: bool = False, write: bool = False) -> list[Step]:
    return [Step(first, min(first + C, stop), read, write) for first in range(start, stop, C)]


def _evaluating(steps: list[Step], span: Span) -> list[Step]:
    """Return `steps` with the last step evaluating the loss of `span`.

    Without steps, add a step without rows.
    """
    *others, last = steps or [Step(0, 0)]
    return [*others, last._replace(evaluate=span)]


def _whole_groups(groups: Sequence[int], capacity: int, C: int) -> tuple[str, list[Step], tuple[str, ...]]:
    """Pack whole groups into resident chunks of about C rows.

    A group of more than `capacity` rows is projected twice.
    """
    steps: list[Step] = []
    parts: list[str] = []
    start = stop = first = 0  # pending rows start:stop, and the index of their first group

    def flush(last: int) -> None:
        nonlocal start, first
        if last > first:
            steps.append(Step(start, stop, True, True, Span(start, stop, first, last)))
            parts.extend(["resident"] if stop > start else [])
        start, first = stop, last

    for group, size in enumerate(groups):
        if size > capacity:
            flush(group)
            stop += size
            span = Span(start, stop, group, group + 1)
            steps += _evaluating(_chunks(start, stop, C, read=True), span) + _chunks(
                start, stop, C, write=True
            )
            parts.append("recompute")
            start = stop
            first = group + 1
            continue
        if stop + size - start > min(capacity, C):
            flush(group)
        stop += size
    flush(len(groups))
    kinds = tuple(dict.fromkeys(parts)) or ("resident",)
    return (kinds[0] if len(kinds) == 1 else "mixed"), steps or [Step(0, 0, evaluate=Span(0, 0))], kinds
