"""Triton kernels of `targets.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import dense

BLOCK, COUNTED, WARPS = 1024, 4096, 4
# Positions per program, and slots of a position that are loaded at a time.
POSITIONS, SLOTS = 16, 64


@cached_launch
@triton.jit(**OF_CHUNKS)
def mark_kernel(
    targets_ptr,
    others_ptr,
    marks_ptr,
    rows,
    V,
    ignore_index,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    y = tl.load(targets_ptr + at, mask=inside, other=0)
    supervised = y != ignore_index
    outside = supervised & ((y < 0) | (y >= V))
    tl.store(marks_ptr + at, supervised.to(tl.int8), mask=inside)
    at += rows
    tl.store(marks_ptr + at, outside.to(tl.int8), mask=inside)
    for i in tl.static_range(OTHERS):
        other = tl.load(others_ptr + (at + (i - 1) * rows), mask=inside, other=0) != 0
        tl.store(marks_ptr + (at + (i + 1) * rows), (other & supervised).to(tl.int8), mask=inside)


def marked(targets: Tensor, V: int, ignore_index: int, others: Tensor | None) -> Tensor:
    N = targets.shape[0]
    count = 0 if others is None else others.shape[0]
    marks = torch.empty(2 + count, N, dtype=torch.int8, device=targets.device)
    operand = marks if others is None else dense(others).view(torch.int8)
    flags = {"OTHERS": count, "BLOCK": BLOCK, "num_warps": WARPS}
    targets = dense(targets, torch.int64)
    mark_kernel[(triton.cdiv(N, BLOCK),)](targets, operand, marks, N, V, ignore_index, **flags)
    return marks.view(torch.bool)


@cached_launch
@triton.jit(**OF_CHUNKS)
def mask_kernel(
    targets_ptr, mask_ptr, masked_ptr, rows, ignore_index, WRONG: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    y = tl.load(targets_ptr + at, mask=inside, other=0)
    m = tl.load(mask_ptr + at, mask=inside, other=0)
    others = tl.full([BLOCK], WRONG, tl.int64)
    if m.dtype.is_floating():
        if m.dtype.primitive_bitwidth == 16:  # Triton's interpreter compares bf16 as integers
            m = m.to(tl.float32)
        others += tl.where(m < 0, 1, tl.where(m != m, 2, 0))
    y = tl.where(m == 0, ignore_index, y)
    y = tl.where((m == 0) | (m == 1), y, others)
    tl.store(masked_ptr + at, y, mask=inside)


def masked(targets: Tensor, mask: Tensor, ignore_index: int, wrong: int) -> Tensor:
    targets = dense(targets, torch.int64)
    out = torch.empty_like(targets)
    N = targets.numel()
    flags = {"WRONG": wrong, "BLOCK": BLOCK, "num_warps": WARPS}
    mask_kernel[(triton.cdiv(N, BLOCK),)](targets, dense(mask), out, N, ignore_index, **flags)
    return out


@cached_launch
@triton.jit(do_not_specialize=["rows", "length", "bounds", "N"])
def count_kernel(
    marks_ptr, bounds_ptr, counts_ptr, rows, length, bounds, N, PACKED: tl.constexpr, COUNTED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([COUNTED], tl.int32)
    if PACKED:
        # The program after the programs of the rows counts invalid boundaries.
        if row == rows:
            for start in range(0, bounds, COUNTED):
                at = start + tl.arange(0, COUNTED)
                inside = at < bounds
                bound = tl.load(bounds_ptr + at, mask=inside, other=0)
                before = tl.load(bounds_ptr + at - 1, mask=inside & (at > 0), other=0)
                ends = ((at == 0) & (bound != 0)) | ((at == bounds - 1) & (bound != N))
                falls = (at > 0) & (bound < before)
                total += (inside & (ends | falls)).to(tl.int32)
    if row < rows:
        for start in range(0, length, COUNTED):
            at = start + tl.arange(0, COUNTED)
            total += tl.load(marks_ptr + row * length + at, mask=at < length, other=0).to(tl.int32)
    tl.store(counts_ptr + row, tl.sum(total, 0).to(tl.int64))


def counted(marks: Tensor, N: int, cu_seqlens: Tensor | None) -> Tensor:
    rows, length = marks.shape
    marks = dense(marks).view(torch.int8)
    packed = cu_seqlens is not None
    counts = torch.empty(rows + packed, dtype=torch.int64, device=marks.device)
    bounds = dense(cu_seqlens, torch.int64) if packed else counts
    flags = {"PACKED": packed, "COUNTED": COUNTED, "num_warps": WARPS}
    count_kernel[(rows + packed,)](marks, bounds, counts, rows, length, bounds.shape[0], N, **flags)
    return counts


@cached_launch
@triton.jit(**OF_CHUNKS)
def count_targets_kernel(targets_ptr, counts_ptr, inverse_ptr, rows, V, ignore_index, COUNTED: tl.constexpr):
    supervised = tl.zeros([COUNTED], tl.int32)
    outside = tl.zeros([COUNTED], tl.int32)
    for start in range(0, rows, COUNTED):
        at = start + tl.arange(0, COUNTED)
        y = tl.load(targets_ptr + at, mask=at < rows, other=ignore_index)
        is_supervised = y != ignore_index
        supervised += is_supervised.to(tl.int32)
        outside += (is_supervised & ((y < 0) | (y >= V))).to(tl.int32)
    count = tl.sum(supervised, 0)
    tl.store(counts_ptr, count.to(tl.int64))
    tl.store(counts_ptr + 1, tl.sum(outside, 0).to(tl.int64))
    tl.store(inverse_ptr, tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32)))


def count_targets(targets: Tensor, V: int, ignore_index: int, counts: Tensor) -> Tensor:
    targets = dense(targets, torch.int64)
    inverse = torch.empty(1, dtype=torch.float32, device=targets.device)
    operands = (targets, counts, inverse, targets.shape[0], V, ignore_index)
    count_targets_kernel[(1,)](*operands, COUNTED=COUNTED, num_warps=WARPS)
    return inverse


@cached_launch
@triton.jit(**OF_CHUNKS)
def one_per_position_kernel(
    ids_ptr, found_ptr, rows, k, ignore_index, POSITIONS: tl.constexpr, SLOTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    inside = row < rows
    least = tl.zeros([POSITIONS], tl.int64)
    largest = tl.zeros([POSITIONS], tl.int64)
    filled = tl.zeros([POSITIONS], tl.int32)
    for start in range(0, k, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        there = inside[:, None] & (slot < k)[None, :]
        ids = tl.load(ids_ptr + row[:, None] * k + slot[None, :], mask=there, other=0)
        one = there & (ids != ignore_index)
        ids = tl.where(one, ids, 0)
        least = tl.minimum(least, tl.min(ids, 1))
        largest = tl.maximum(largest, tl.max(ids, 1))
        filled = tl.maximum(filled, tl.max(one.to(tl.int32), 1))
    chosen = tl.where(least < 0, least, largest)
    tl.store(found_ptr + row, tl.where(filled > 0, chosen, ignore_index), mask=inside)


def one_per_position(ids: Tensor, ignore_index: int) -> Tensor:
    targets = torch.empty(ids.shape[:-1], dtype=torch.int64, device=ids.device)
    rows = targets.numel()
    k = ids.shape[-1]
    ids = dense(ids, torch.int64)
    flags = {"POSITIONS": POSITIONS, "SLOTS": SLOTS, "num_warps": WARPS}
    one_per_position_kernel[(triton.cdiv(rows, POSITIONS),)](ids, targets, rows, k, ignore_index, **flags)
    return targets


@cached_launch
@triton.jit(**OF_CHUNKS)
def shard_columns_kernel(
    targets_ptr, columns_ptr, rows, start, width, ignore_index, ignored, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(targets_ptr + at, mask=at < rows, other=0)
    column = tl.where((y >= start) & (y < start + width), y - start, width)
    tl.store(columns_ptr + at, tl.where(y == ignore_index, ignored, column), mask=at < rows)


def shard_columns(targets: Tensor, start: int, width: int, ignore_index: int, ignored: int) -> Tensor:
    rows = targets.shape[0]
    targets = dense(targets, torch.int64)
    columns = torch.empty_like(targets)
    grid = (triton.cdiv(rows, BLOCK),)
    numbers = (rows, start, width, ignore_index, ignored)
    shard_columns_kernel[grid](targets, columns, *numbers, BLOCK=BLOCK, num_warps=WARPS)
    return columns


@cached_launch
@triton.jit(**OF_CHUNKS)
def clamp_kernel(
    targets_ptr,
    num_items_ptr,
    supervised_ptr,
    ids_ptr,
    counts_ptr,
    rows,
    V,
    ignore_index,
    HAS_ITEMS: tl.constexpr,
    HAS_SUPERVISED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    at = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    y = tl.load(targets_ptr + at, mask=inside, other=0)
    wrong = (y == ignore_index) | (y < 0) | (y >= V)
    ids = tl.minimum(tl.maximum(y, 0), V - 1)
    if HAS_SUPERVISED:
        supervised = tl.load(supervised_ptr + at, mask=inside, other=1) != 0
        wrong = tl.where(supervised, wrong, y != ignore_index)
        ids = tl.where(supervised, ids, ignore_index)
    count = tl.sum((inside & wrong).to(tl.int32), 0)
    if HAS_ITEMS:
        count += tl.where(tl.load(num_items_ptr) > 0, 0, 1)
    tl.store(ids_ptr + at, ids, mask=inside)
    tl.store(counts_ptr + part, count.to(tl.int64))


def clamped(
    targets: Tensor, V: int, ignore_index: int, num_items: Tensor | None, supervised: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = targets.shape[0]
    targets = dense(targets, torch.int64)
    parts = triton.cdiv(rows, BLOCK)
    ids = torch.empty_like(targets)
    wrong = torch.empty(parts, dtype=torch.int64, device=targets.device)
    items = wrong if num_items is None else num_items
    flags = {"HAS_ITEMS": num_items is not None, "HAS_SUPERVISED": supervised is not None}
    mask = wrong if supervised is None else dense(supervised, torch.bool).view(torch.int8)
    flags |= {"BLOCK": BLOCK, "num_warps": WARPS}
    clamp_kernel[(parts,)](targets, items, mask, ids, wrong, rows, V, ignore_index, **flags)
    return ids, wrong


@cached_launch
@triton.jit(**OF_CHUNKS)
def clean_kernel(
    targets_ptr,
    num_items_ptr,
    ids_ptr,
    supervised_ptr,
    counts_ptr,
    rows,
    V,
    ignore_index,
    parts,
    HAS_ITEMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    at = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    y = tl.load(targets_ptr + at, mask=inside, other=ignore_index)
    supervised = y != ignore_index
    outside = supervised & ((y < 0) | (y >= V))
    ids = tl.where(supervised, tl.minimum(tl.maximum(y, 0), V - 1), ignore_index)
    wrong = tl.sum(outside.to(tl.int32), 0)
    if HAS_ITEMS:
        wrong += tl.where(tl.load(num_items_ptr) > 0, 0, 1)
    tl.store(ids_ptr + at, ids, mask=inside)
    tl.store(supervised_ptr + at, supervised.to(tl.int8), mask=inside)
    tl.store(counts_ptr + part, tl.sum(supervised.to(tl.int32), 0).to(tl.int64))
    tl.store(counts_ptr + parts + part, wrong.to(tl.int64))


def cleaned(
    targets: Tensor, V: int, ignore_index: int, num_items: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = targets.shape[0]
    targets = dense(targets, torch.int64)
    parts = triton.cdiv(rows, BLOCK)
    ids = torch.empty_like(targets)
    supervised = torch.empty(rows, dtype=torch.bool, device=targets.device)
    counts = torch.empty(2, parts, dtype=torch.int64, device=targets.device)
    items = counts if num_items is None else num_items
    flags = {"HAS_ITEMS": num_items is not None, "BLOCK": BLOCK, "num_warps": WARPS}
    numbers = (rows, V, ignore_index, parts)
    clean_kernel[(parts,)](targets, items, ids, supervised.view(torch.int8), counts, *numbers, **flags)
    return ids, supervised, counts.view(2) if parts == 1 else counts.sum(1)
