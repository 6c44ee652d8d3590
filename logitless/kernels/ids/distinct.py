"""The distinct kept ids of each row, the kind of each row, and the slots of the rows of a kind.

    distinct_ids    sort the ids of all rows, mark the first of equal ids, count distinct ids, and check the
                    sets
    slots_of        return the slots of the rows of one kind

These operators run before the first product of a call, while the GPU waits for the host. The Triton kernels
are in `distinct_triton.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.ids.sets import Slots

# The kinds of rows. PLAIN: no set. PICKED: the logits of the set are picked from a chunk of logits. GATHERED:
# the logits of the set are computed from gathered rows of the head. CERTAIN: a set of one id, whose logit is
# not needed.
PLAIN, PICKED, GATHERED, CERTAIN = range(4)


class Distinct(NamedTuple):
    """The distinct ids of all rows on the device, before the host knows their number."""

    keys: Tensor  # (S,) int64, sorted: row * V + id; N * V for slots that do not count
    ordinals: Tensor  # (S,) int64: number of distinct keys up to and including this one
    counts: Tensor  # (N,) int64: number of distinct ids of each row
    begins: Tensor  # (N,) int64: number of distinct ids of all previous rows
    own: Tensor  # (N,) int64: index of the row's target in the distinct ids of all rows
    kinds: Tensor  # (N,) int64: the kind of each row
    places: Tensor  # (4, N) int64, cumulative: picked rows, gathered rows, picked slots, gathered slots
    missing: Tensor  # (N,) bool: rows whose set does not contain the target; False if offsets are invalid
    broken: Tensor  # () int64: number of invalid offsets
    outside: Tensor  # () int64: number of ids of supervised rows outside the vocabulary
    numbers: (
        Tensor  # (6,) int64: rows picked, gathered and certain; slots picked and gathered; sets of one id
    )


def distinct_ids(
    ids: Tensor,  # (S,) integers
    starts: Tensor,  # (N,) int64, non-decreasing: the ids of row n are ids[starts[n]:starts[n] + lengths[n]]
    lengths: Tensor,  # (N,) int64
    offsets: Tensor,  # (M + 1,) integers. Checked to be non-decreasing, from 0 to at most S
    targets: Tensor,  # (N,) int64
    ignore_index: int,  # target of rows whose sets are ignored
    V: int,
    *,
    add_targets: bool,  # whether a missing target becomes a slot
    most_gathered: int,  # rows with more distinct ids are picked
    certain: bool,  # whether a row with one id is of the kind `CERTAIN`
) -> Distinct:
    """Find the distinct ids and the kind of each row, without a host sync."""
    if targets.shape[0] and uses_triton(targets.device, torch.float32):
        from logitless.kernels.ids import distinct_triton

        fields = distinct_triton.distinct_ids(
            ids,
            starts,
            lengths,
            offsets,
            targets,
            ignore_index,
            V,
            add_targets=add_targets,
            most_gathered=most_gathered,
            certain=certain,
        )
        return Distinct(*fields)
    N = targets.shape[0]
    S = ids.shape[0]
    device = targets.device
    broken = (offsets.diff() < 0).sum() + (offsets[0] != 0) + (offsets[-1] > S)
    supervised = targets != ignore_index
    outside = outside_ids(ids, starts, lengths, supervised, V)
    counted, row = _counted(S, starts, lengths, supervised)
    none = N * V
    keys = torch.where(counted & ~outside, row * V + ids.long(), none)
    has_set = supervised & (lengths > 0) & (targets >= 0) & (targets < V)
    target_keys = torch.where(has_set, torch.arange(N, device=device) * V + targets, none)
    if add_targets:
        keys = torch.cat((keys, target_keys))
    keys, _ = keys.sort()
    first = keys < none
    first[1:] &= keys[1:] != keys[:-1]
    ordinals = first.cumsum(0)
    before = torch.nn.functional.pad(ordinals, (1, 0))
    ends = before[torch.searchsorted(keys, (torch.arange(N + 1, device=device) * V).clamp(max=none))]
    counts = ends.diff()
    if keys.shape[0]:
        at = torch.searchsorted(keys, target_keys).clamp(max=keys.shape[0] - 1)
        missing = has_set & (keys[at] != target_keys)
        own = (ordinals[at] - 1).clamp(min=0)
    else:
        missing = has_set
        own = torch.zeros_like(counts)
    kinds = torch.where(counts > most_gathered, PICKED, GATHERED)
    single = counts == 1
    if certain:
        kinds = torch.where(single, CERTAIN, kinds)
    kinds = torch.where(counts == 0, PLAIN, kinds)
    picked = kinds == PICKED
    gathered = kinds == GATHERED
    tallies = torch.stack((picked.long(), gathered.long(), picked * counts, gathered * counts))
    totals = tallies.sum(1)
    numbers = torch.stack((*totals[:2], (kinds == CERTAIN).sum(), *totals[2:], single.sum()))
    return Distinct(
        keys,
        ordinals,
        counts,
        ends[:-1],
        own,
        kinds,
        tallies.cumsum(1),
        missing & (broken == 0),
        broken.long(),
        outside.sum(),
        numbers,
    )


def _counted(S: int, starts: Tensor, lengths: Tensor, supervised: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each slot (S,), whether it belongs to the set of a supervised row, and its row."""
    N = supervised.shape[0]
    place = torch.arange(S, device=starts.device)
    row = (torch.searchsorted(starts, place, right=True) - 1).clamp(0, max(0, N - 1))
    if not N:
        return torch.zeros_like(row, dtype=torch.bool), row
    return supervised[row] & (place >= starts[row]) & (place < starts[row] + lengths[row]), row


def outside_ids(ids: Tensor, starts: Tensor, lengths: Tensor, supervised: Tensor, V: int) -> Tensor:
    """(S,) bool: whether the slot belongs to a supervised row and its id is outside the vocabulary."""
    counted, _ = _counted(ids.shape[0], starts, lengths, supervised)
    return counted & ((ids < 0) | (ids >= V))


def slots_of(distinct: Distinct, kind: int | None, count: int, size: int, V: int) -> Slots:
    """Return the slots of all rows of a kind, PICKED or GATHERED, in row order.

    Args:
        distinct: the distinct ids of all rows.
        kind: the kind; None: all rows, including rows without slots.
        count: number of rows of this kind.
        size: at least the number of their slots. Additional slots at the end have the id -1 and the row
            `count`.
        V: size of the vocabulary.
    """
    device = distinct.counts.device
    if not count or not size:
        none = torch.empty(0, dtype=torch.int32, device=device)
        bounds = torch.zeros(count + 1, dtype=torch.int64, device=device)
        return Slots(none, none, bounds, bounds[:-1])
    if uses_triton(device, torch.float32):
        from logitless.kernels.ids import distinct_triton

        return Slots(*distinct_triton.slots_of(distinct, kind, count, size, V))
    N = distinct.counts.shape[0]
    if kind is None:
        chosen = torch.ones(N, dtype=torch.bool, device=device)
        place = torch.arange(N, device=device)
        ends = distinct.begins + distinct.counts
    else:
        chosen = distinct.kinds == kind
        place = distinct.places[kind - PICKED] - 1
        ends = distinct.places[kind - PICKED + 2]
    begins = ends - distinct.counts
    index = torch.nonzero_static(chosen, size=count)[:, 0]
    bounds = torch.nn.functional.pad(ends[index], (1, 0))
    row = (distinct.keys // V).clamp(max=N - 1)
    first = distinct.ordinals.diff(prepend=distinct.ordinals.new_zeros(1)) > 0
    taken = torch.nonzero_static(first & chosen[row], size=size, fill_value=0)[:, 0]
    filled = torch.arange(size, device=device) < bounds[-1]
    own = begins[index] + distinct.own[index] - distinct.begins[index]
    return Slots(
        torch.where(filled, distinct.keys[taken] % V, -1).to(torch.int32),
        torch.where(filled, place[row[taken]], count).to(torch.int32),
        bounds,
        own.clamp(0, size - 1),
    )
