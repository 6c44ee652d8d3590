"""The plan of a pass: its strategy, and its spans of chunks.

A plan depends on shapes, budget, the scope of the loss, and the tensors that need a gradient. The rows are
the supervised tokens (all tokens with `compact=False` and with static rows), and the rows of a group are
adjacent. A *span* is the rows on which the loss is evaluated together.

If a pass writes the gradients after the loss is evaluated (`Write.AFTER_LOSS`), a span is one chunk for a
loss of single tokens, as many whole groups as fit into one chunk for a loss of groups, and all rows if the
scope is "batch". A span whose rows exceed the budget has several chunks, and its logits are projected a
second time after the evaluation. In all other passes, one span has all rows, and the pass projects each chunk
once.

For a pass that solves a call (`Pass.SOLVE`), with the number of products if hidden states and weight are
trained:

    fused, resident   spans of one chunk, whose logits, or gradient up to a factor per row, stay
                      in memory until the loss is evaluated                                       3 products
    recompute         spans of several chunks, which are projected twice                          4 products
    mixed             both, in a call with groups of different sizes

and if they are not both trained:

    fused, resident,  the same with a frozen head or constant hidden states: no product for its
    recompute, mixed  gradient, so 1 product less
    cached_grad       frozen head, and a loss of groups through log p and lse alone: the chunks
                      write d logp / d hidden, which is scaled after the evaluation               2 products
    loss_only         nothing is trained: chunks are read, and the loss is evaluated once         1 product

If the loss is computed outside the pass, from per-token statistics, the plan of `Pass.STATISTICS` only reads
(recompute, loss_only) or also writes d logp / d hidden (cached_grad). For recompute, `Pass.GRADIENTS` then
projects the chunks a second time and writes, in the backward pass. With `accumulate_into`, the forward pass
is loss_only, and the backward pass solves the call again: `Plan.in_backward`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

MIB = 2**20


class Pass(Enum):
    """The purpose of a pass over the rows."""

    SOLVE = "the loss, with its gradients"
    STATISTICS = "per-token statistics, for autograd outside"
    GRADIENTS = "the gradients of the operands, given the gradients of the statistics"


class BudgetWarning(UserWarning):
    """Warning that the logits budget requires a slower plan, or is smaller than one row."""


class Kind(Enum):
    """The way in which the rows of a chunk are computed; see `replay.py`."""

    PLAIN = "their logits are projected"
    PICKED = "projected, and the logits of their kept ids picked"
    GATHERED = "the products of their kept ids, and no others"


class ChunkRows(NamedTuple):
    """The rows `start:stop` of a chunk, and the way in which they are computed."""

    start: int
    stop: int
    kind: Kind = Kind.PLAIN

    @property
    def count(self) -> int:
        return self.stop - self.start


class Span(NamedTuple):
    """Rows `start:stop` that are evaluated together, which are the groups `first:last`, and their chunks.

    The chunks contain all rows of the span, except `certain` rows of a sampling mask, which are not computed.
    A span without rows has no chunks.
    """

    start: int
    stop: int
    first: int = 0
    last: int = 0
    chunks: tuple[ChunkRows, ...] = ()


class Write(Enum):
    """When a pass completes the gradients of a chunk.

    The gradient of the logits up to a factor per row may be written earlier, when the chunk is read.
    """

    NEVER = "never"
    BEFORE_LOSS = "when the chunk is projected"
    AFTER_LOSS = "after the loss of its span is evaluated"


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
    """A strategy and its spans of chunks; `out.plan` is the plan of a call.

    Attributes:
        strategy: "fused", "resident", "recompute", "cached_grad", "loss_only" or "mixed" (resident and
            recompute groups: `parts`).
        spans: the rows on which the loss is evaluated together, with their chunks, in order.
        reads: whether a chunk is read (its statistics are computed) when it is first projected.
        writes: when the gradients of a chunk are completed.
        evaluates: whether the loss of a span is evaluated when all its chunks are read.
        rows: number of projected tokens: the supervised tokens; all tokens with `compact=False`, and of a
            small call on a GPU.
        row_bytes: bytes of one row of logits and its temporaries.
        budget: maximum number of bytes of a chunk: `logits_budget` minus `fixed_bytes`.
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
            computes the gradients (`accumulate_into`); else None. The attributes above then describe the
            forward pass.
    """

    strategy: str
    spans: tuple[Span, ...] = field(repr=False)
    reads: bool
    writes: Write
    evaluates: bool
    rows: int
    row_bytes: int
    budget: int
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
    def chunks(self) -> int:
        """Number of chunks of logits that are projected; a chunk that is projected twice counts twice."""
        return sum(
            [
                (1 + self.recomputes(span)) * sum([chunk.kind is not Kind.GATHERED for chunk in span.chunks])
                for span in self.spans
            ]
        )

    @functools.cached_property
    def d_weight_parts(self) -> int:
        """Upper bound of the number of parts (chunks, gathered rows) that are summed to d_weight."""
        return sum([len(span.chunks) for span in self.spans])

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
        once, twice = self.projected
        written = 0 if self.writes is Write.NEVER else once
        rows = self.rows if self.replay is None else max(1, self.replay.rows)
        return (once + twice + written * self.backward + self.later * self.rows) / rows

    @property
    def projected(self) -> tuple[int, int]:
        """Number of rows that are projected, and of rows that are projected a second time."""
        once = twice = 0
        for span in self.spans:
            count = sum([chunk.count for chunk in span.chunks if chunk.kind is not Kind.GATHERED])
            once += count
            twice += count if self.recomputes(span) else 0
        return once, twice

    def recomputes(self, span: Span) -> bool:
        """Whether the chunks of a span are projected a second time, after its loss is evaluated."""
        return self.writes is Write.AFTER_LOSS and len(span.chunks) > 1

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
        if not self.chunks:
            return f"{head}{replayed}{gathered}{self.strategy}: no projected token{logits}"
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
    allows_cached_grad: bool  # see `Reader.allows_cached_grad`
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
    """Choose the strategy, and cut the rows into spans and chunks of at most `budget` bytes, at `row_bytes`
    each.
    """
    rows = facts.rows
    groups = facts.groups
    C = chunk_rows(rows, row_bytes, budget)
    # d_weight of a single chunk is written in the dtype of the products; d_weight of several chunks is summed
    # in fp32. Use a single chunk if its additional rows take no more memory than the fp32 sum. It is also
    # faster (3% at 8,192 tokens).
    if (rows - C) * row_bytes <= facts.spared_bytes and rows * row_bytes <= budget:
        C = max(1, rows)
    if facts.columns:
        # Without a product there is no preferred chunk size: use the largest size that fits.
        C = max(1, -(-rows // -(-rows * row_bytes // budget))) if rows * row_bytes > budget else max(1, rows)
    chunks = _chunks(0, rows, C)
    spans: Sequence[Span] = [Span(0, rows, 0, 0 if groups is None else len(groups), tuple(chunks))]
    strategy, reads, writes = _strategy(purpose, facts)
    parts: tuple[str, ...] = ()
    if writes is Write.AFTER_LOSS and groups is None:
        spans = [Span(chunk.start, chunk.stop, chunks=(chunk,)) for chunk in chunks] or [Span(0, 0)]
    elif writes is Write.AFTER_LOSS:
        spans = _whole_groups(groups, max(1, budget // row_bytes), C)
        kinds = ["recompute" if len(span.chunks) > 1 else "resident" for span in spans if span.chunks]
        parts = tuple(dict.fromkeys(kinds)) or ("resident",)
        strategy = parts[0] if len(parts) == 1 else "mixed"
    longest = max([chunk.count for span in spans for chunk in span.chunks], default=0)
    sizes = {"rows": rows, "row_bytes": row_bytes, "budget": budget, "token_chunk": longest}
    return _plan(purpose, facts, strategy, spans, reads, writes, **sizes, parts=parts, columns=facts.columns)


def _plan(
    purpose: Pass,
    facts: Facts,
    strategy: str,
    spans: Sequence[Span],
    reads: bool,
    writes: Write,
    **fields: Any,
) -> Plan:
    """The plan with the fields that are copied from `facts`, and `fields`."""
    return Plan(
        strategy,
        tuple(spans),
        reads,
        writes,
        evaluates=purpose is Pass.SOLVE,
        backward=facts.backward,
        later=facts.later,
        fixed_bytes=facts.fixed_bytes,
        heads=facts.heads,
        logits=facts.logits,
        **fields,
    )


def _strategy(purpose: Pass, facts: Facts) -> tuple[str, bool, Write]:
    """Return (strategy, `Plan.reads`, `Plan.writes`). `make_plan` replaces "fused" by that of the groups."""
    cached_grad = facts.allows_cached_grad and not facts.trainable_head
    if purpose is Pass.GRADIENTS:
        return "recompute", facts.rereads, Write.BEFORE_LOSS
    if not facts.differentiable:
        return "loss_only", True, Write.NEVER
    if cached_grad and (purpose is Pass.STATISTICS or facts.groups is not None):
        return "cached_grad", True, Write.BEFORE_LOSS
    if purpose is Pass.STATISTICS:
        return "recompute", True, Write.NEVER
    return "fused", True, Write.AFTER_LOSS


@functools.lru_cache(maxsize=64)
def make_replay_plan(purpose: Pass, facts: Facts, replay: Replayed, *, row_bytes: int, budget: int) -> Plan:
    """Make the plan of a call with a sampling mask: plain rows, then picked rows, then all gathered rows at
    once.

    For a loss with scope "group" or "batch", the rows are not in the order of the groups. Therefore all rows
    are one span. Its strategy is "recompute" if it has several chunks, which are projected twice, and
    "resident" if it has one.
    """
    plain, picked, gathered, certain, *_ = replay
    projected = plain + picked
    chunked = projected + gathered
    rows = chunked + certain
    C = chunk_rows(max(plain, picked), row_bytes, budget)
    chunks = _chunks(0, plain, C) + _chunks(plain, projected, C, Kind.PICKED)
    if gathered:
        chunks.append(ChunkRows(projected, chunked, Kind.GATHERED))
    strategy, reads, writes = _strategy(purpose, facts._replace(allows_cached_grad=False, rereads=False))
    spans = [Span(0, rows, 0, 0 if facts.groups is None else len(facts.groups), tuple(chunks))]
    if writes is Write.AFTER_LOSS and facts.groups is None:
        spans = [Span(chunk.start, chunk.stop, chunks=(chunk,)) for chunk in chunks]
        if certain or not spans:
            spans.append(Span(chunked, rows))
    elif writes is Write.AFTER_LOSS:
        strategy = "recompute" if len(chunks) > 1 else "resident"
    longest = max([chunk.count for chunk in chunks if chunk.kind is not Kind.GATHERED], default=0)
    sizes = {"rows": projected, "row_bytes": row_bytes, "budget": budget, "token_chunk": longest}
    return _plan(purpose, facts, strategy, spans, reads, writes, **sizes, replay=replay)


def _chunks(start: int, stop: int, C: int, kind: Kind = Kind.PLAIN) -> list[ChunkRows]:
    return [ChunkRows(first, min(first + C, stop), kind) for first in range(start, stop, C)]


def _whole_groups(groups: Sequence[int], capacity: int, C: int) -> list[Span]:
    """Spans of as many whole groups as fit into a chunk of about C rows.

    A group of more than `capacity` rows is a span of several chunks.
    """
    spans: list[Span] = []
    start = stop = first = 0  # pending rows start:stop, and the index of their first group

    def flush(last: int) -> None:
        nonlocal start, first
        if last > first:
            chunks = (ChunkRows(start, stop),) if stop > start else ()
            spans.append(Span(start, stop, first, last, chunks))
        start, first = stop, last

    for group, size in enumerate(groups):
        if size > capacity:
            flush(group)
            stop += size
            spans.append(Span(start, stop, group, group + 1, tuple(_chunks(start, stop, C))))
            start = stop
            first = group + 1
            continue
        if stop + size - start > min(capacity, C):
            flush(group)
        stop += size
    flush(len(groups))
    return spans or [Span(0, 0)]
