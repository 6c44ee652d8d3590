"""Triton kernels of `distinct.py`, with one lane per slot or row, so that a call takes few launches.

    keys_kernel     ids -> keys to sort; also checks ids and offsets
    first_kernel    sorted keys -> whether each key is the first of equal keys
    rows_kernel     sorted keys -> per row: number of distinct ids, index of the target, kind
    slots_kernel    sorted keys -> the slots of the rows of a kind

Counts are sums of integers, so that atomic additions give the same results in any order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, cached_launch

BLOCK, WARPS = 256, 4
# Number of steps of a binary search; sufficient for 2^32 entries.
STEPS = tl.constexpr(32)
SIZES = ["S", "N", "M", "total", "size"]
OF_CALLS = OF_CHUNKS | {"do_not_specialize": [*OF_CHUNKS["do_not_specialize"], *SIZES]}


@triton.jit
def lower_bound(sorted_ptr, size, x):
    """The number of sorted entries below x."""
    low = tl.zeros_like(x)
    high = low + size
    for _ in range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        below = searching & (tl.load(sorted_ptr + middle, mask=searching, other=0) < x)
        low = tl.where(below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    return low


@cached_launch
@triton.jit(**OF_CALLS)
def keys_kernel(
    ids_ptr,
    starts_ptr,
    lengths_ptr,
    offsets_ptr,
    targets_ptr,
    keys_ptr,
    numbers_ptr,
    S,
    N,
    M,
    V,
    ignore_index,
    ADD_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    none = N.to(tl.int64) * V
    # For slot i: its row is the last row that starts at or before i.
    is_slot = i < S
    row = lower_bound(starts_ptr, N, tl.where(is_slot, i, 0) + 1) - 1
    has_row = is_slot & (row >= 0)
    start = tl.load(starts_ptr + row, mask=has_row, other=0)
    length = tl.load(lengths_ptr + row, mask=has_row, other=0)
    target = tl.load(targets_ptr + row, mask=has_row, other=ignore_index)
    counted = has_row & (target != ignore_index) & (i < start + length)
    token_id = tl.load(ids_ptr + i, mask=is_slot, other=0).to(tl.int64)
    outside = counted & ((token_id < 0) | (token_id >= V))
    tl.store(keys_ptr + i, tl.where(counted & ~outside, row * V + token_id, none), mask=is_slot)
    tl.atomic_add(numbers_ptr + 1, tl.sum(outside.to(tl.int64)))
    if ADD_TARGETS:
        is_row = i < N
        target = tl.load(targets_ptr + i, mask=is_row, other=ignore_index)
        length = tl.load(lengths_ptr + i, mask=is_row, other=0)
        has_set = (target != ignore_index) & (length > 0) & (target >= 0) & (target < V)
        tl.store(keys_ptr + S + i, tl.where(has_set, i * V + target, none), mask=is_row)
    # For offset i: the offsets must be non-decreasing, from 0 to at most S.
    is_offset = i <= M
    offset = tl.load(offsets_ptr + i, mask=is_offset, other=0).to(tl.int64)
    following = tl.load(offsets_ptr + i + 1, mask=i < M, other=0).to(tl.int64)
    broken = ((i < M) & (following < offset)).to(tl.int64)
    broken += ((i == 0) & (offset != 0)).to(tl.int64) + ((i == M) & (offset > S)).to(tl.int64)
    tl.atomic_add(numbers_ptr, tl.sum(broken))


@cached_launch
@triton.jit(**OF_CALLS)
def first_kernel(keys_ptr, first_ptr, total, N, V, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < total
    key = tl.load(keys_ptr + i, mask=here, other=0)
    before = tl.load(keys_ptr + i - 1, mask=here & (i > 0), other=-1)
    first = (key != before) & (key < N.to(tl.int64) * V)
    tl.store(first_ptr + i, first.to(tl.int8), mask=here)


@cached_launch
@triton.jit(**OF_CALLS)
def rows_kernel(
    keys_ptr,
    ordinals_ptr,
    lengths_ptr,
    targets_ptr,
    counts_ptr,
    begins_ptr,
    own_ptr,
    kinds_ptr,
    tallies_ptr,
    missing_ptr,
    numbers_ptr,
    total,
    N,
    V,
    ignore_index,
    most_gathered,
    CERTAIN_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < N
    # `ordinals[at - 1]` is the number of distinct keys below `keys[at]`.
    low = lower_bound(keys_ptr, total, row * V)
    high = lower_bound(keys_ptr, total, row * V + V)
    begin = tl.load(ordinals_ptr + low - 1, mask=here & (low > 0), other=0)
    count = tl.load(ordinals_ptr + high - 1, mask=here & (high > 0), other=0) - begin
    target = tl.load(targets_ptr + row, mask=here, other=ignore_index)
    length = tl.load(lengths_ptr + row, mask=here, other=0)
    has_set = here & (target != ignore_index) & (length > 0) & (target >= 0) & (target < V)
    key = tl.where(has_set, row * V + target, 0)
    at = lower_bound(keys_ptr, total, key)
    in_set = has_set & (at < total)
    in_set = in_set & (tl.load(keys_ptr + at, mask=in_set, other=-1) == key)
    own = tl.load(ordinals_ptr + at, mask=in_set, other=1) - 1
    sound = tl.load(numbers_ptr) == 0
    # The kinds of `distinct.py`: 0 plain, 1 picked, 2 gathered, 3 certain.
    kind = tl.where(count > most_gathered, 1, 2)
    if CERTAIN_ROWS:
        kind = tl.where(count == 1, 3, kind)
    kind = tl.where(count == 0, 0, kind)
    tl.store(counts_ptr + row, count, mask=here)
    tl.store(begins_ptr + row, begin, mask=here)
    tl.store(own_ptr + row, own, mask=here)
    tl.store(kinds_ptr + row, kind.to(tl.int64), mask=here)
    missing = has_set & ~in_set & sound
    tl.store(missing_ptr + row, missing.to(tl.int8), mask=here)
    picked = (here & (kind == 1)).to(tl.int64)
    gathered = (here & (kind == 2)).to(tl.int64)
    tl.store(tallies_ptr + row, picked, mask=here)
    tl.store(tallies_ptr + N + row, gathered, mask=here)
    tl.store(tallies_ptr + 2 * N + row, picked * count, mask=here)
    tl.store(tallies_ptr + 3 * N + row, gathered * count, mask=here)
    tl.atomic_add(numbers_ptr + 2, tl.sum(picked))
    tl.atomic_add(numbers_ptr + 3, tl.sum(gathered))
    tl.atomic_add(numbers_ptr + 4, tl.sum((here & (kind == 3)).to(tl.int64)))
    tl.atomic_add(numbers_ptr + 5, tl.sum(picked * count))
    tl.atomic_add(numbers_ptr + 6, tl.sum(gathered * count))
    tl.atomic_add(numbers_ptr + 7, tl.sum((here & (count == 1)).to(tl.int64)))


@cached_launch
@triton.jit(**OF_CALLS)
def slots_kernel(
    keys_ptr,
    ordinals_ptr,
    counts_ptr,
    begins_ptr,
    owns_ptr,
    kinds_ptr,
    places_ptr,
    ends_ptr,
    slot_ids_ptr,
    rows_ptr,
    bounds_ptr,
    own_ptr,
    total,
    N,
    V,
    kind,
    count,
    size,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Sorted slot i is stored at its index in the slots of the chosen rows.
    here = i < total
    key = tl.load(keys_ptr + i, mask=here, other=0)
    below = tl.load(ordinals_ptr + i - 1, mask=here & (i > 0), other=0)
    first = here & (tl.load(ordinals_ptr + i, mask=here, other=0) > below)
    row = key // V
    if EVERY:
        place = row
        to = below
    else:
        first = first & (tl.load(kinds_ptr + row, mask=first, other=0) == kind)
        place = tl.load(places_ptr + row, mask=first, other=1) - 1
        end = tl.load(ends_ptr + row, mask=first, other=0)
        begin = end - tl.load(counts_ptr + row, mask=first, other=0)
        to = begin + below - tl.load(begins_ptr + row, mask=first, other=0)
    first = first & (to < size)
    tl.store(slot_ids_ptr + to, (key - row * V).to(tl.int32), mask=first)
    tl.store(rows_ptr + to, place.to(tl.int32), mask=first)
    # For row i: the end of its slots, and the slot of its target.
    is_row = i < N
    begin = tl.load(begins_ptr + i, mask=is_row, other=0)
    length = tl.load(counts_ptr + i, mask=is_row, other=0)
    own = tl.load(owns_ptr + i, mask=is_row, other=0)
    if EVERY:
        place = i
        end = begin + length
    else:
        is_row = is_row & (tl.load(kinds_ptr + i, mask=is_row, other=0) == kind)
        place = tl.load(places_ptr + i, mask=is_row, other=1) - 1
        end = tl.load(ends_ptr + i, mask=is_row, other=0)
        own = end - length + own - begin
    own = tl.minimum(tl.maximum(own, 0), size - 1)
    tl.store(bounds_ptr + place + 1, end, mask=is_row)
    tl.store(bounds_ptr + place, 0, mask=is_row & (place == 0))
    tl.store(own_ptr + place, own, mask=is_row)
    # Fill the additional slots.
    used = tl.load(ends_ptr + N - 1)
    if EVERY:
        used = tl.load(ordinals_ptr + total - 1)
    unused = (i >= used) & (i < size)
    tl.store(slot_ids_ptr + i, tl.full([BLOCK], -1, tl.int32), mask=unused)
    tl.store(rows_ptr + i, (tl.zeros([BLOCK], tl.int32) + count).to(tl.int32), mask=unused)


def _grid(*sizes: int) -> tuple[int]:
    return (triton.cdiv(max(sizes), BLOCK),)


def distinct_ids(
    ids: Tensor,
    starts: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    targets: Tensor,
    ignore_index: int,
    V: int,
    *,
    add_targets: bool,
    most_gathered: int,
    certain: bool,
) -> tuple[Tensor, ...]:
    """The fields of `Distinct`, in their order."""
    N = targets.shape[0]
    S = ids.shape[0]
    M = offsets.shape[0] - 1
    total = S + N if add_targets else S
    long = {"dtype": torch.int64, "device": targets.device}
    numbers = torch.zeros(8, **long)
    keys = torch.empty(total, **long)
    targets, lengths = targets.contiguous(), lengths.contiguous()
    keys_kernel[_grid(S, N, M + 1)](
        ids.contiguous(),
        starts.contiguous(),
        lengths,
        offsets.contiguous(),
        targets,
        keys,
        numbers,
        S,
        N,
        M,
        V,
        ignore_index,
        ADD_TARGETS=add_targets,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    keys, _ = keys.sort()
    first = torch.empty(total, dtype=torch.int8, device=targets.device)
    if total:
        first_kernel[_grid(total)](keys, first, total, N, V, BLOCK=BLOCK, num_warps=WARPS)
    ordinals = first.cumsum(0)
    counts, begins, own, kinds = torch.empty(4, N, **long)
    tallies = torch.empty(4, N, **long)
    missing = torch.empty(N, dtype=torch.bool, device=targets.device)
    rows_kernel[_grid(N)](
        keys,
        ordinals,
        lengths,
        targets,
        counts,
        begins,
        own,
        kinds,
        tallies,
        missing.view(torch.int8),
        numbers,
        total,
        N,
        V,
        ignore_index,
        most_gathered,
        CERTAIN_ROWS=certain,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    places = tallies.cumsum(1)
    return (keys, ordinals, counts, begins, own, kinds, places, missing, numbers[0], numbers[1], numbers[2:])


def slots_of(distinct, kind: int | None, count: int, size: int, V: int) -> tuple[Tensor, ...]:
    """The fields of `Slots`, in their order."""
    N = distinct.counts.shape[0]
    total = distinct.keys.shape[0]
    device = distinct.counts.device
    bounds, own = torch.empty(2 * count + 1, dtype=torch.int64, device=device).split((count + 1, count))
    ids, rows = torch.empty(2, size, dtype=torch.int32, device=device)
    # With kind=None the kernel does not use the two vectors.
    places, ends = distinct.places[0], distinct.places[2]
    if kind is not None:
        places, ends = distinct.places[kind - 1], distinct.places[kind + 1]
    slots_kernel[_grid(total, N, size)](
        distinct.keys,
        distinct.ordinals,
        distinct.counts,
        distinct.begins,
        distinct.own,
        distinct.kinds,
        places,
        ends,
        ids,
        rows,
        bounds,
        own,
        total,
        N,
        V,
        0 if kind is None else kind,
        count,
        size,
        EVERY=kind is None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return ids, rows, bounds, own
