"""`Rows`: the rows of a call that are projected, in order. The rows of a group are adjacent."""

import functools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.engine.operands import sequence_numbers
from logitless.engine.segments import Segments, segments_of
from logitless.engine.spec import Fault
from logitless.engine.teacher_rows import TeacherRows
from logitless.kernels.head.targets import counted
from logitless.parallel.collectives import ALONE, Peers
from logitless.parallel.vocabulary import Shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Grouping(NamedTuple):
    """The sequences of a call, and the groups that they form."""

    sequences: int = 0  # number of sequences; 0: the loss does not depend on sequences
    sequences_per_group: int = 1  # 2 for pairs
    grouped: bool = False  # whether the tokens of a group must be evaluated together

    @property
    def groups(self) -> int:
        return self.sequences // self.sequences_per_group

    @property
    def interleaves(self) -> bool:
        """Whether the sequences of a group are not adjacent in the call."""
        return 1 < self.sequences_per_group < self.sequences


class Rows(NamedTuple):
    """The rows of a call, in the order in which they are projected ("row order")."""

    count: int
    # Supervised tokens: `count`, unless unsupervised rows are projected as well. With `cp_group`, this and
    # `chosen_tokens` are sums over the ranks.
    tokens: int | Tensor
    chosen_tokens: int | Tensor  # supervised tokens in the first half of the sequences; 0 without sequences
    index: Tensor | None  # (count,) int64 positions in the flattened call; None: all rows, in call order
    group_sizes: Sequence[int] | None  # rows of each group; None for a loss of single tokens
    # (sequences,) rows of each sequence, in row order; or one number for all; None: a loss of single tokens
    sequence_sizes: Tensor | int | None
    roles: int = 1  # sequences per group
    shards: Shards | None = None  # shards of the head, with `tp_group`
    counted: Sequence[int] = ()  # the `others` of `compact_rows`, read in the host sync
    replay: Any = None  # `replay.Replay` of a call with a sampling mask
    teacher: TeacherRows | None = None  # if the loss declares `teacher_rows`
    # What the backward pass needs to keep the gradients of ignored tokens at 0 for every upstream gradient.
    supervised: Tensor | None = None  # (N,) bool, in call order; None: every token is supervised
    supervised_count: Tensor | None = None  # () int64, of this rank; None: the host knows that it is not 0

    def at(self, start: int, stop: int) -> slice | Tensor:
        """The positions of rows start:stop in the flattened call."""
        return slice(start, stop) if self.index is None else self.index[start:stop]

    def segments(self, rows: int, first: int, last: int, device: torch.device) -> Segments | None:
        """The sequences of groups first:last, which have `rows` rows in total."""
        sizes = self.sequence_sizes
        if sizes is None:
            return None
        if isinstance(sizes, Tensor):
            sizes = sizes[first * self.roles : last * self.roles]
        return segments_of(sizes, rows, last - first, self.roles, device)

    def sequences(self, first: int, last: int, device: torch.device) -> Tensor | slice:
        """Call indices of the sequences of groups first:last, role by role (of pairs: first the chosen); a
        slice if these are all of them."""
        sizes = self.sequence_sizes
        groups = (sizes.shape[0] if isinstance(sizes, Tensor) else self.count // sizes) // self.roles
        if last - first == groups:
            return slice(None)
        roles = torch.arange(self.roles, device=device)[:, None]
        return (roles * groups + torch.arange(first, last, device=device)).reshape(-1)

    def scattered(self, x: Tensor, N: int) -> Tensor:
        """Scatter (rows, ...) to (N, ...) in call order, with zeros at all other positions."""
        return x if self.index is None else x.new_zeros(N, *x.shape[1:]).index_copy_(0, self.index, x)


class Shard(NamedTuple):
    """This rank's shard of a head, before the ranks exchange their shards."""

    group: "ProcessGroup"
    code: int  # see `Shards.code`
    V: int  # size of the vocabulary that this rank assumes
    sure: bool  # whether V was exchanged in this call


class VocabSizeChanged(Exception):
    """Raised on all ranks if a rank assumed a wrong size of the vocabulary. Contains the right size."""

    def __init__(self, V: int):
        super().__init__(f"the vocabulary has {V} ids")
        self.V = V


class _Layout(NamedTuple):
    """The sequences of a call, computed on the device before the host sync."""

    order: Tensor | None  # (N,) positions in the call, group by group; None: the order of the call
    # (sequences,) number of rows of each sequence; or one number for all
    counts: Tensor | int  # in call order
    sizes: Tensor | int  # in row order
    chosen: Tensor | None  # () supervised tokens of the first half of the sequences; None: summed later


def compact_rows(
    marks: Tensor,  # (1 + m, N) bool: the supervised tokens, and the tokens that each of m faults marks
    faults: Sequence[Fault],  # the m faults that mark tokens come first
    grouping: Grouping,
    cu_seqlens: Tensor | None,
    *,
    compact: bool,
    peers: Peers = ALONE,
    shard: Shard | None = None,
    boundaries: str = "cu_seqlens",  # name of the argument, for error messages
    others: Tensor | None = None,  # (n,) additional numbers of this rank to read in the sync: `Rows.counted`
) -> Rows:
    """Choose the rows to project, and raise the faults that were counted on the device.

    This function has the one host sync of a pass, in which the host reads its counts; the docstring of
    `choose` lists the calls with a second sync. With compact=False it has none: all rows are projected, and
    faults are asserted on the device. The host then knows the number of packed sequences but not their
    lengths, so the caller combines them into one group. A fault on one of the peers is raised on all of them.
    Boundaries are checked even if the loss does not depend on sequences.
    """
    supervised = marks[0]
    packed = cu_seqlens is not None
    layout = None
    N = supervised.shape[0]
    apart = compact and not packed and not peers.groups
    counts = _counted(marks, faults, grouping.sequences if apart else 0, cu_seqlens)
    if packed:
        marking = marks.shape[0] - 1
        faults = (*faults[:marking], boundary_fault(cu_seqlens, N, boundaries), *faults[marking:])
    if grouping.sequences or grouping.grouped:
        if packed:
            # The boundaries may be invalid until the fault is read. Clamp them, so that no index is out of
            # bounds.
            layout = _packed(supervised, grouping, cu_seqlens.clamp(0, N), compact)
        else:
            layout = _padded(supervised, grouping, counts.of_sequences, compact)
    if not compact:
        numbers = counts.numbers
        fault_counts = peers.table(numbers[1:]).sum(0) if peers.groups else numbers[1:]
        for fault, fits in zip(faults, (fault_counts == 0).unbind(), strict=True):
            fault.assert_async(fits)
        rows = _every_row(N, numbers[0], grouping, layout)
        return rows._replace(supervised=supervised, supervised_count=numbers[0])
    exchange = RankExchange(peers, shard) if peers.groups else None
    rows = _supervised_rows(supervised, counts, faults, grouping, layout, exchange, others)
    return rows._replace(
        supervised=None if rows.count == N > 0 else supervised,
        supervised_count=None if rows.count else supervised.new_zeros((), dtype=torch.int64),
    )


def all_rows(N: int, grouping: Grouping, device: torch.device) -> Rows:
    """All rows of padded sequences, for a call in which every token is supervised, without a host sync."""
    if not (grouping.sequences or grouping.grouped):
        return Rows(N, N, 0, None, None, None, grouping.sequences_per_group)
    # Not `equal_sizes`: these sums of sequences have the bits of those by `compact_rows`.
    length = N // max(1, grouping.sequences)
    counts = torch.full((grouping.sequences,), length, dtype=torch.int64, device=device)
    layout = _Layout(_order(N, grouping, device), counts, _in_row_order(counts, grouping), None)
    chosen = grouping.sequences // 2 * length
    return _every_row(N, N, grouping, layout)._replace(chosen_tokens=chosen)


def static_rows(supervised: Tensor, tokens: Tensor, grouping: Grouping) -> Rows:
    """All rows of padded sequences, of which `supervised` (N,) are supervised, `tokens` () in number.

    A pass over them is discarded if `tokens` is 0.
    """
    layout = None
    if grouping.sequences or grouping.grouped:
        layout = _padded(supervised, grouping, None, compact=False)
    rows = _every_row(supervised.shape[0], tokens, grouping, layout)
    return rows._replace(supervised=supervised)


def equal_sizes(N: int, sequences: int, device: torch.device) -> Tensor | int:
    """The rows of each of some padded sequences with N rows: one number, unless a sequence has at most one
    row, on which a compiled graph must not depend."""
    length = N // max(1, sequences)
    return length if length > 1 else torch.full((sequences,), length, dtype=torch.int64, device=device)


class _Counts(NamedTuple):
    """Counts of the supervised tokens and of each fault, on the device."""

    # (n,) The first `marks` quantities have one count per sequence. The quantities after them have one count.
    numbers: Tensor
    marks: int = 0  # number of quantities that are counted per sequence; 0: all have one count
    sequences: int = 0

    @property
    def of_sequences(self) -> Tensor | None:
        """(sequences,) supervised tokens; None if they were not counted per sequence."""
        return self.numbers[: self.sequences] if self.marks else None

    def added_up(self, numbers: list[int]) -> list[int]:
        """Return the total of each quantity, then the tokens of each sequence if they were counted.

        `numbers`: the values of `self.numbers` on the host, which other counts may follow.
        """
        end = self.marks * self.sequences
        tables = [numbers[start : start + self.sequences] for start in range(0, end, self.sequences or 1)]
        return [*map(sum, tables), *numbers[end:], *(tables[0] if tables else ())]


def _counted(marks: Tensor, faults: Sequence[Fault], sequences: int, cu_seqlens: Tensor | None) -> _Counts:
    """Count the marks per padded sequence, or over the whole call if `sequences` is 0.

    The order of the counts is: the marks, the invalid boundaries (with `cu_seqlens`), the other faults.
    """
    count = marks.shape[0]
    mark_counts = counted(marks, max(1, sequences), cu_seqlens)
    fault_counts = [fault.count for fault in faults[count - 1 :]]
    numbers = torch.cat((mark_counts, torch.stack(fault_counts))) if fault_counts else mark_counts
    return _Counts(numbers, count, sequences) if sequences else _Counts(numbers)


def boundary_fault(cu_seqlens: Tensor, N: int, name: str) -> Fault:
    """The fault of invalid boundaries, which `_counted` counts. `name` is the name of the argument."""
    remedy = "let them cover every token of hidden once"
    details = partial(_seen_boundaries, cu_seqlens, N, remedy)
    return Fault(cu_seqlens, name, f"non-decreasing boundaries from 0 to {N}", "others", remedy, details)


def _seen_boundaries(cu_seqlens: Tensor, N: int, remedy: str) -> tuple[str, str]:
    """Return details and remedy of the error about invalid boundaries. Called only on failure."""
    bounds = cu_seqlens.tolist()
    falls = [i for i in range(1, len(bounds)) if bounds[i] < bounds[i - 1]]
    if falls:
        i = falls[0]
        return f": entry {i} is {bounds[i]} after {bounds[i - 1]}", remedy
    if bounds[0] == 0 and bounds[-1] == N:  # the boundaries of another rank are wrong
        return "", remedy
    return f": the first is {bounds[0]}, the last {bounds[-1]}", remedy


def _padded(supervised: Tensor, grouping: Grouping, counts: Tensor | None, compact: bool) -> _Layout:
    """The layout of padded sequences.

    `counts` (sequences,) are their supervised tokens; None: count them here.
    """
    N = supervised.shape[0]
    device = supervised.device
    sequences = grouping.sequences
    if not compact:
        counts = equal_sizes(N, sequences, device)
    elif counts is None:
        counts = supervised.view(sequences, N // max(1, sequences)).sum(1)
    chosen = None if compact else supervised[: N // 2].sum()
    return _Layout(_order(N, grouping, device), counts, _in_row_order(counts, grouping), chosen)


def _order(N: int, grouping: Grouping, device: torch.device) -> Tensor | None:
    """(N,) call positions of sequences of one length, group by group; None: the order of the call."""
    if not grouping.interleaves:
        return None
    positions = torch.arange(N, device=device).view(grouping.sequences_per_group, grouping.groups, -1)
    return positions.transpose(0, 1).reshape(-1)


def _packed(supervised: Tensor, grouping: Grouping, cu_seqlens: Tensor, compact: bool) -> _Layout:
    """The layout of packed sequences, between the boundaries."""
    N = supervised.shape[0]
    device = supervised.device
    sequences, roles, _ = grouping
    ends = torch.cat((supervised.new_zeros(1, dtype=torch.int64), supervised.cumsum(0)))
    counts = ends[cu_seqlens[1:]] - ends[cu_seqlens[:-1]] if compact else cu_seqlens.diff()
    order = None
    if grouping.interleaves:
        positions = torch.arange(N, device=device)
        number = sequence_numbers(cu_seqlens, positions)
        order = torch.argsort(number % grouping.groups * roles + number // grouping.groups, stable=True)
    half = cu_seqlens[sequences // 2 :][:1]  # a 0-d index would be a host sync
    chosen = None if compact else ends[half].view(())
    return _Layout(order, counts, _in_row_order(counts, grouping), chosen)


def _in_row_order(counts: Tensor | int, grouping: Grouping) -> Tensor | int:
    if not isinstance(counts, Tensor):
        return counts
    return counts.view(grouping.sequences_per_group, grouping.groups).t().reshape(-1)


def _every_row(N: int, tokens: Tensor, grouping: Grouping, layout: _Layout | None) -> Rows:
    if layout is None:
        return Rows(N, tokens, 0, None, None, None)
    groups = grouping.groups
    group_sizes = [N // max(1, groups)] * groups if grouping.grouped else None
    return Rows(
        N, tokens, layout.chosen, layout.order, group_sizes, layout.sizes, grouping.sequences_per_group
    )


class RankExchange(NamedTuple):
    """The exchange of counts and shard sizes between the ranks that share a call, in one collective."""

    peers: Peers
    shard: Shard | None

    def gather(self, numbers: Tensor) -> Tensor:
        """All-gather the counts (n,) of this rank to a flat table of all ranks.

        The row of a rank contains its global rank and code, the V that it assumes, and its counts.
        """
        code, V = (0, 0) if self.shard is None else (self.shard.code, self.shard.V)
        constants = _constants((dist.get_rank() << 32) + code, V, numbers.device)
        return self.peers.table(torch.cat((constants, numbers))).view(-1)

    def check(
        self, faults: Sequence[Fault], numbers: Sequence[int]
    ) -> tuple[Shards | None, int, Sequence[int]]:
        """Raise the faults of all ranks. The message names the ranks that have the fault.

        Args:
            faults: the faults, in the order of the counts.
            numbers: the table of `gather` on the host, followed by additional numbers of this rank.

        Returns:
            (the shards if the head is sharded; this rank's number of rows; the numbers after the table).

        Raises:
            VocabSizeChanged: a rank assumed a wrong size of the vocabulary.
            ValueError: a fault on any rank.
        """
        width = 3 + len(faults)
        place = self.peers.place
        rows = [numbers[at : at + width] for at in range(0, self.peers.size * width, width)]
        shards = None
        if self.shard is not None:
            first = place - self.shard.group.rank()
            codes = [code % 2**32 for code, *_ in rows[first : first + self.shard.group.size()]]
            shards = Shards.read(codes)
            if not self.shard.sure and any(V != shards.V for _, V, *_ in rows):
                raise VocabSizeChanged(shards.V)
        for i, fault in enumerate(faults, 3):
            wrong = {row[0] >> 32: row[i] for row in rows if row[i]}
            if wrong:
                fault.raise_(max(wrong.values()), sorted(wrong))
        return shards, rows[place][2], numbers[self.peers.size * width :]


@functools.lru_cache(maxsize=64)
def _constants(first: int, second: int, device: torch.device) -> Tensor:
    """Two integers as a tensor on a device, cached, because they are equal in every call."""
    return torch.tensor((first, second), dtype=torch.int64, device=device)


def _supervised_rows(
    supervised: Tensor,
    counts: _Counts,
    faults: Sequence[Fault],
    grouping: Grouping,
    layout: _Layout | None,
    exchange: RankExchange | None,
    others: Tensor | None,
) -> Rows:
    N = supervised.shape[0]
    shards = None
    numbers = counts.numbers
    if exchange is not None:
        numbers = exchange.gather(numbers)
    if others is not None:
        numbers = torch.cat((numbers, others.to(numbers.dtype)))
    if layout is not None and counts.of_sequences is None:
        numbers = torch.cat((numbers, layout.counts))
    numbers = numbers.tolist()  # the sync
    if counts.marks:
        numbers = counts.added_up(numbers)
    if exchange is not None:
        shards, count, lengths = exchange.check(faults, numbers)
    else:
        count, *numbers = numbers
        for fault, wrong in zip(faults, numbers):
            if wrong:
                fault.raise_(wrong)
        lengths = numbers[len(faults) :]
    extra = 0 if others is None else others.shape[0]
    counted, lengths = lengths[:extra], lengths[extra:]
    order = index = None if layout is None else layout.order
    if count < N:
        index = torch.nonzero_static(supervised if order is None else supervised[order], size=count)[:, 0]
        index = index if order is None else order[index]
    if layout is None:
        return Rows(count, count, 0, index, None, None, grouping.sequences_per_group, shards, counted)
    chosen = sum(lengths[: grouping.sequences // 2])
    groups = grouping.groups
    group_sizes = [sum(lengths[group::groups]) for group in range(groups)] if grouping.grouped else None
    return Rows(
        count, count, chosen, index, group_sizes, layout.sizes, grouping.sequences_per_group, shards, counted
    )
