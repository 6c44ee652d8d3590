"""`Replay`: the kinds of rows in a call with a sampling mask, and the slots of their sets.

There are four kinds of rows, by the number of distinct ids of the row's set:

    plain      no set: softmax over the whole vocabulary; projected as in any call
    picked     more ids than `most_gathered(V)`: projected; the logits of the ids are picked from the chunk
    gathered   at least 2 ids: only the products with the ids' rows of the head are computed
    certain    one id: log p = 0 and entropy = 0, without gradient; no logits are computed

The kind depends only on the row's set and the size of the vocabulary. Therefore the computation of a token
does not depend on the other tokens of the call. If the loss needs lse, certain rows are gathered as well. The
chunk loop processes the rows in the order of their kinds ("chunk order").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine.rows import Rows
from logitless.engine.sampling_mask import NAME, Sets
from logitless.engine.spec import Fault, LossSpec
from logitless.kernels.ids.distinct import (
    GATHERED,
    PICKED,
    Distinct,
    distinct_ids,
    outside_ids,
    slots_of,
)
from logitless.kernels.ids.sets import Slots

# Reading k rows of the head for a token is faster than its products with the whole head for k up to about V /
# 180 (a renormalized top-64 of 151,936 ids takes 12% of the time of three products). These are constants, so
# that the kind of a row depends only on its set and V.
GATHER_BREAK_EVEN, LEAST = 180, 64
# The log-probability over a set of one id is 0. A sampled log-probability below this bound belongs to another
# distribution.
RAW = -1e-3


def most_gathered(V: int) -> int:
    """The largest number of ids of a row that are gathered."""
    return max(LEAST, V // GATHER_BREAK_EVEN)


class Kinds(NamedTuple):
    """The kinds of the rows of a call, before the host knows the number of rows of each kind."""

    distinct: Distinct
    faults: Sequence[Fault]  # faults that mark tokens come first


@dataclass
class Replay:
    """The rows of a call by kind, and the slots of their sets.

    Attributes:
        chunked: the rows of the chunk loop, in chunk order.
        order: (rows,) indices of the rows in chunk order, certain rows last; None: the rows are already in
            chunk order.
        plain, picked, gathered, certain: the number of rows of each kind. With compact=False, all rows are
            picked, because the host does not know their sets.
        slots: the slots of the picked and of the gathered rows, by kind.
        kept_ids: number of ids in all sets; None with compact=False.
        single: number of rows whose set has one id; None with compact=False.
        logits: the logits of the slots by kind, after they are computed.
    """

    chunked: Rows
    order: Tensor | None
    plain: int
    picked: int
    gathered: int
    certain: int
    slots: dict[int, Slots]
    kept_ids: int | None
    single: int | None
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def replayed(self) -> int | None:
        """Number of rows with a set; None with compact=False."""
        return None if self.kept_ids is None else self.picked + self.gathered + self.certain

    def in_chunk_order(self, x: Tensor) -> Tensor:
        """Reorder (rows, ...) from row order to chunk order."""
        return x if self.order is None else x[self.order]

    def in_row_order(self, x: Tensor) -> Tensor:
        """Reorder (rows, ...) from chunk order to row order."""
        if self.order is None:
            return x
        return torch.empty_like(x).index_copy_(0, self.order, x)


def needs_logits(loss: LossSpec) -> bool:
    """Whether the loss needs the logits of certain rows, for their lse."""
    return "lse" in loss.differentiates or loss.return_logps


def kinds_of(
    sets: Sets,
    targets: Tensor,
    inputs: Mapping[str, Tensor | None],
    V: int,
    loss: LossSpec,
    *,
    add_targets: bool,
) -> Kinds:
    """Determine the kind of each row, and check the sets, without a host sync."""
    distinct = distinct_ids(
        *sets,
        targets,
        loss.ignore_index,
        V,
        add_targets=add_targets,
        most_gathered=most_gathered(V),
        certain=not needs_logits(loss),
    )
    marks = [_missing(distinct.missing)]
    for name in loss.sampled_logps:
        x = inputs.get(name)
        if x is not None:
            raw = (distinct.counts == 1) & (distinct.broken == 0) & (x < RAW)
            marks.append(_raw(name, x, raw))
    offsets = _offsets(distinct.broken, sets)
    outside = _outside(distinct.outside, sets, targets != loss.ignore_index, V)
    return Kinds(distinct, (*marks, offsets, outside))


def replay_of(kinds: Kinds, rows: Rows, V: int, *, compact: bool, grouped: bool) -> Rows:
    """Return `rows` with their `Replay`.

    For a loss of single tokens, the returned rows are in chunk order.
    """
    distinct = kinds.distinct
    kind = distinct.kinds
    if not compact:
        slots = slots_of(distinct, None, rows.count, distinct.keys.shape[0], V)
        replay = Replay(rows, None, 0, rows.count, 0, 0, {PICKED: slots}, None, None)
        return rows._replace(replay=replay)
    picked, gathered, certain, *sizes, single = rows.counted
    plain = rows.count - picked - gathered - certain
    slots = {
        which: slots_of(distinct, which, count, size, V)
        for which, count, size in zip((PICKED, GATHERED), (picked, gathered), sizes, strict=True)
    }
    order = None
    if rows.count not in (plain, picked, gathered, certain):
        row_kinds = kind if rows.index is None else kind[rows.index]
        order = row_kinds.argsort(stable=True)
    index = rows.index
    if order is not None:
        index = order if index is None else index[order]
    if not grouped:
        rows = rows._replace(index=index)
        order = None
    chunked_count = plain + picked + gathered
    if certain:
        everything = torch.arange(rows.count, device=kind.device) if index is None else index
        index = everything[:chunked_count]
    chunked = rows._replace(
        count=chunked_count, chosen_tokens=0, index=index, group_sizes=None, sequence_sizes=None, roles=1
    )
    slot_count = sum(sizes) + certain
    return rows._replace(
        replay=Replay(chunked, order, plain, picked, gathered, certain, slots, slot_count, single)
    )


def _offsets(broken: Tensor, sets: Sets) -> Fault:
    S = sets.ids.shape[0]

    def details() -> tuple[str, str]:
        values = sets.offsets.tolist()
        falls = [n for n in range(1, len(values)) if values[n] < values[n - 1]]
        if falls:
            return f": entry {falls[0]} is {values[falls[0]]} after {values[falls[0] - 1]}", remedy
        return f": the first is {values[0]}, the last {values[-1]}", remedy

    remedy = "pass the offsets that belong to these token_ids"
    return Fault(broken, NAME, f"offsets that rise from 0 to at most {S}", "others", remedy, details)


def _missing(missing: Tensor) -> Fault:
    def details() -> tuple[str, str]:
        rows = missing.nonzero()[:, 0]
        where = f", the first at row {rows[0].item()}" if rows.numel() else ""
        return where, remedy

    remedy = 'pass missing="add", or the sets of these tokens'
    return Fault(missing, NAME, "every supervised target in its set", "{count} that are not", remedy, details)


def _raw(name: str, x: Tensor, raw: Tensor) -> Fault:
    def details() -> tuple[str, str]:
        rows = raw.nonzero()[:, 0]
        where = ""
        if rows.numel():
            where = f", the first, {x[rows[0]].item():.3g}, at row {rows[0].item()}"
        return where, remedy

    remedy = (
        "ask the server for them (vLLM: logprobs_mode='processed_logprobs'), or compute them with the mask"
    )
    expected = "log-probabilities over the sampling mask, so 0 for tokens with one kept id"
    return Fault(raw, name, expected, f"{{count}} below {RAW:g}", remedy, details)


def _outside(count: Tensor, sets: Sets, supervised: Tensor, V: int) -> Fault:
    def details() -> tuple[str, str]:
        wrong = sets.ids[outside_ids(sets.ids, sets.starts, sets.lengths, supervised, V)]
        if not wrong.numel():  # the invalid ids are on other ranks
            return "", remedy
        return f": the least is {wrong.min().item()}, the greatest {wrong.max().item()}", remedy

    remedy = "pass the server's ids of this vocabulary"
    return Fault(count, NAME, f"ids in [0, {V})", "{count} outside", remedy, details)
