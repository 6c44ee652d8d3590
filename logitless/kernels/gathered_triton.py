"""Triton kernels of `gathered.py`, all bound by reading a row of H numbers for each of the N k slots.

`add_rows` sorts the slots by id, and cuts the list into pieces of a fixed length. `piece_kernel` sums the
runs of equal ids inside a piece. A run inside one piece is a whole row, which it writes; of a run that
crosses a boundary it leaves the parts, which `merge_kernel` sums for the piece where the run begins. So an id
that all tokens have is the work of many programs, no two programs write the same row, and nothing depends on
which of them is faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, held
from logitless.kernels.layout import check_rows, check_written, dense

SLOTS, BLOCK, WARPS = 16, 256, 4
# Slots of a piece; more where there would be more pieces than MOST_PIECES, whose parts take 8 H bytes each.
PIECE, MOST_PIECES = 256, 4096


@held
@triton.jit
def gathered_logits_kernel(
    hidden_ptr,
    weight_ptr,
    ids_ptr,
    out_ptr,
    hidden_stride,
    weight_stride,
    k,
    H,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    ids = tl.load(ids_ptr + row * k + slot, mask=slot < k, other=-1)
    rows = weight_ptr + ids[:, None] * weight_stride
    total = tl.zeros([SLOTS, BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(hidden_ptr + row * hidden_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
        w = tl.load(rows + cols[None, :], mask=(ids >= 0)[:, None] & (cols < H)[None, :], other=0.0)
        total += w.to(tl.float32) * x[None, :]
    tl.store(out_ptr + row * k + slot, tl.sum(total, 1), mask=slot < k)


@held
@triton.jit
def weighted_rows_kernel(
    weight_ptr,
    ids_ptr,
    coefficients_ptr,
    out_ptr,
    weight_stride,
    out_stride,
    k,
    H,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, k, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        ids = tl.load(ids_ptr + row * k + slot, mask=slot < k, other=-1)
        g = tl.load(coefficients_ptr + row * k + slot, mask=ids >= 0, other=0.0)
        w = tl.load(
            weight_ptr + ids[:, None] * weight_stride + cols[None, :],
            mask=(ids >= 0)[:, None] & (cols < H)[None, :],
            other=0.0,
        )
        total += tl.sum(w.to(tl.float32) * g[:, None], 0)
    tl.store(out_ptr + row * out_stride + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)


@held
@triton.jit(**OF_CHUNKS)
def piece_kernel(
    hidden_ptr,
    total_ptr,
    coefficients_ptr,
    ids_ptr,
    order_ptr,
    parts_ptr,
    hidden_stride,
    total_stride,
    k,
    H,
    count,
    piece,
    BLOCK: tl.constexpr,
):
    """`ids` (count,) sorted, `order` their slots. `parts` (pieces, 2, H): of the run that began before the
    piece, and of the one that goes on after it."""
    number = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    start = number * piece
    stop = tl.minimum(start + piece, count)
    # An id that no slot has.
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-2)
    continues = before == tl.load(ids_ptr + start)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(start, stop):
        token = tl.load(ids_ptr + i)
        after = tl.load(ids_ptr + i + 1, mask=i + 1 < count, other=-2)
        slot = tl.load(order_ptr + i)
        g = tl.load(coefficients_ptr + slot)
        x = tl.load(hidden_ptr + slot // k * hidden_stride + cols, mask=inside, other=0.0)
        total += g * x.to(tl.float32)
        if (after != token) | (i + 1 == stop):
            if continues:
                tl.store(parts_ptr + number * 2 * H + cols, total, mask=inside)
            elif after == token:
                tl.store(parts_ptr + (number * 2 + 1) * H + cols, total, mask=inside)
            elif token >= 0:
                row = total_ptr + token * total_stride + cols
                sum = tl.load(row, mask=inside, other=0.0).to(tl.float32) + total
                tl.store(row, sum.to(total_ptr.dtype.element_ty), mask=inside)
            continues = token != token
            total = tl.zeros([BLOCK], tl.float32)


@held
@triton.jit(**OF_CHUNKS)
def merge_kernel(
    total_ptr,
    ids_ptr,
    ends_ptr,
    parts_ptr,
    total_stride,
    H,
    count,
    piece,
    BLOCK: tl.constexpr,
):
    """`ends` (pieces,): where the run of a piece's last id ends."""
    number = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    start = number * piece
    stop = tl.minimum(start + piece, count)
    token = tl.load(ids_ptr + stop - 1)
    end = tl.load(ends_ptr + number)
    before = tl.load(ids_ptr + start - 1, mask=start > 0, other=-2)
    begins = (before != token) | (tl.load(ids_ptr + start) != token)
    if (end > stop) & begins & (token >= 0):
        total = tl.load(parts_ptr + (number * 2 + 1) * H + cols, mask=inside, other=0.0)
        for other in range(number + 1, (end - 1) // piece + 1):
            total += tl.load(parts_ptr + other * 2 * H + cols, mask=inside, other=0.0)
        row = total_ptr + token * total_stride + cols
        sum = tl.load(row, mask=inside, other=0.0).to(tl.float32) + total
        tl.store(row, sum.to(total_ptr.dtype.element_ty), mask=inside)


def gathered_logits(hidden: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    check_rows(hidden=hidden, weight=weight)
    check_written(out=out)
    (n, k), H = ids.shape, weight.shape[1]
    gathered_logits_kernel[(n, triton.cdiv(k, SLOTS))](
        hidden,
        weight,
        dense(ids),
        out,
        hidden.stride(0),
        weight.stride(0),
        k,
        H,
        SLOTS=SLOTS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


def weighted_rows(weight: Tensor, ids: Tensor, coefficients: Tensor, out: Tensor) -> Tensor:
    check_rows(weight=weight, out=out)
    (n, k), H = ids.shape, weight.shape[1]
    weighted_rows_kernel[(n, triton.cdiv(H, BLOCK))](
        weight,
        dense(ids),
        dense(coefficients, torch.float32),
        out,
        weight.stride(0),
        out.stride(0),
        k,
        H,
        SLOTS=SLOTS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


def add_rows(total: Tensor, ids: Tensor, coefficients: Tensor, hidden: Tensor) -> None:
    check_rows(total=total, hidden=hidden)
    k, H, count = ids.shape[1], hidden.shape[1], ids.numel()
    piece = max(PIECE, triton.cdiv(count, MOST_PIECES))
    pieces = triton.cdiv(count, piece)
    ids, order = ids.reshape(-1).sort(stable=True)
    parts = torch.empty((pieces, 2, H), device=hidden.device)
    grid = (pieces, triton.cdiv(H, BLOCK))
    piece_kernel[grid](
        hidden,
        total,
        dense(coefficients, torch.float32),
        ids,
        order,
        parts,
        hidden.stride(0),
        total.stride(0),
        k,
        H,
        count,
        piece,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    lasts = ids[torch.arange(1, pieces + 1, device=ids.device).mul_(piece).clamp_(max=count) - 1]
    ends = torch.searchsorted(ids, lasts, right=True)
    merge_kernel[grid](
        total, ids, ends, parts, total.stride(0), H, count, piece, BLOCK=BLOCK, num_warps=WARPS
    )
