"""Triton kernels of `gathered.py`. All are bound by reading a row of H numbers for each of the N k slots.

`add_rows` sorts the slots by id. The programs for a row of the head read the slots of its id, a few at a
time, so that each row is written once. In addition, the sorted slots are divided into pieces of equal length.
If all slots of a piece have the same id (an id that many tokens have fills several pieces), separate programs
sum the piece, and the programs for the row add these sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, check_written, dense

# Number of slots that are processed at a time, and numbers of each slot's row: for reading rows at arbitrary
# positions, and (RUN_) for ids with few slots. On an H200 with 8,192 tokens, 64 ids per token and H 4,096
# (4.3 GB), the logits take 1.1 ms, the sums of rows 0.9 ms, and the gradients of the rows 1.1 ms.
SLOTS, BLOCK, RUN_SLOTS, RUN_BLOCK, WARPS = 8, 1024, 2, 2048, 4
# Number of slots that are compared with as many other slots at a time.
COMPARED = 64


@cached_launch
@triton.jit(**OF_CHUNKS)
def wrong_slots_kernel(ids_ptr, values_ptr, wrong_ptr, n, k, V, largest, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    outside = tl.zeros([SLOTS], tl.int32)
    above = tl.zeros([SLOTS], tl.int32)
    for start in range(0, k, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        ids = tl.load(ids_ptr + row * k + slot, mask=slot < k, other=0)
        values = tl.load(values_ptr + row * k + slot, mask=slot < k, other=-float("inf")).to(tl.float32)
        outside |= (((ids < 0) | (ids >= V)) & (values != -float("inf"))).to(tl.int32)
        above |= tl.where(values <= largest, 0, 1)
    tl.store(wrong_ptr + row, tl.max(outside, 0).to(tl.int8))
    tl.store(wrong_ptr + n + row, tl.max(above, 0).to(tl.int8))


@cached_launch
@triton.jit(**OF_CHUNKS)
def first_slots_kernel(
    ids_ptr,
    values_ptr,
    rows_ptr,
    kept_ptr,
    k,
    start,
    width,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * k
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    ids = tl.load(ids_ptr + token + slot, mask=slot < k, other=-1)
    values = tl.load(values_ptr + token + slot, mask=slot < k, other=-float("inf")).to(tl.float32)
    before = tl.zeros([SLOTS], tl.int32)
    for begin in range(0, (tl.program_id(1) + 1) * SLOTS, SLOTS):
        other = begin + tl.arange(0, SLOTS)
        other_ids = tl.load(ids_ptr + token + other, mask=other < k, other=-1)
        filled = tl.load(values_ptr + token + other, mask=other < k, other=-float("inf")) != -float("inf")
        same = (ids[:, None] == other_ids[None, :]) & filled[None, :] & (other[None, :] < slot[:, None])
        before |= tl.max(same.to(tl.int32), 1)
    first = (values != -float("inf")) & (before == 0)
    rows = ids - start
    rows = tl.where(first & (rows >= 0) & (rows < width), rows, -1)
    tl.store(rows_ptr + token + slot, rows.to(tl.int32), mask=slot < k)
    tl.store(kept_ptr + token + slot, tl.where(first, values, -float("inf")), mask=slot < k)


@cached_launch
@triton.jit
def gathered_logits_kernel(
    hidden_ptr,
    weight_ptr,
    rows_ptr,
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
    ids = tl.load(rows_ptr + row * k + slot, mask=slot < k, other=-1).to(tl.int64)
    rows = weight_ptr + ids[:, None] * weight_stride
    total = tl.zeros([SLOTS], tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(hidden_ptr + row * hidden_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
        w = tl.load(rows + cols[None, :], mask=(ids >= 0)[:, None] & (cols < H)[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * x[None, :], 1)
    tl.store(out_ptr + row * k + slot, total, mask=slot < k)


@cached_launch
@triton.jit(**OF_CHUNKS)
def weighted_rows_kernel(
    weight_ptr,
    rows_ptr,
    coefficients_ptr,
    base_ptr,
    factor_ptr,
    out_ptr,
    weight_stride,
    base_stride,
    out_stride,
    k,
    H,
    HAS_BASE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BASE:
        base = tl.load(base_ptr + row * base_stride + cols, mask=cols < H, other=0.0)
        total += tl.load(factor_ptr + row) * base.to(tl.float32)
    for start in range(0, k, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        ids = tl.load(rows_ptr + row * k + slot, mask=slot < k, other=-1).to(tl.int64)
        g = tl.load(coefficients_ptr + row * k + slot, mask=ids >= 0, other=0.0)
        w = tl.load(
            weight_ptr + ids[:, None] * weight_stride + cols[None, :],
            mask=(ids >= 0)[:, None] & (cols < H)[None, :],
            other=0.0,
        )
        total += tl.sum(w.to(tl.float32) * g[:, None], 0)
    tl.store(out_ptr + row * out_stride + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)


@triton.jit
def slots_sum(
    total,
    hidden_ptr,
    coefficients_ptr,
    order_ptr,
    tokens_ptr,
    hidden_stride,
    k,
    H,
    cols,
    start,
    stop,
    RAGGED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return `total` plus the sum of coefficient * hidden over the sorted slots start:stop.

    The token of a slot is slot // k; with RAGGED, it is an entry of `tokens`.
    """
    for begin in range(start, stop, SLOTS):
        place = begin + tl.arange(0, SLOTS)
        here = place < stop
        slot = tl.load(order_ptr + place, mask=here, other=0)
        g = tl.load(coefficients_ptr + slot, mask=here, other=0.0)
        if RAGGED:
            token = tl.load(tokens_ptr + slot, mask=here, other=0).to(tl.int64)
        else:
            token = slot // k
        rows = hidden_ptr + token[:, None] * hidden_stride
        x = tl.load(rows + cols[None, :], mask=here[:, None] & (cols < H)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32) * g[:, None], 0)
    return total


@cached_launch
@triton.jit(**OF_CHUNKS)
def piece_kernel(
    hidden_ptr,
    pieces_ptr,
    coefficients_ptr,
    ids_ptr,
    order_ptr,
    tokens_ptr,
    hidden_stride,
    k,
    H,
    length,
    RAGGED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum each piece whose slots all have the same id.

    `ids` (N k,) are sorted; `pieces` is (N k // length, H) fp32.
    """
    piece = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = piece * length
    stop = (piece + 1) * length
    token = tl.load(ids_ptr + start)
    if (token >= 0) & (token == tl.load(ids_ptr + stop - 1)):
        total = tl.zeros([BLOCK], tl.float32)
        total = slots_sum(
            total,
            hidden_ptr,
            coefficients_ptr,
            order_ptr,
            tokens_ptr,
            hidden_stride,
            k,
            H,
            cols,
            start,
            stop,
            RAGGED,
            SLOTS,
        )
        tl.store(pieces_ptr + piece * H + cols, total, mask=cols < H)


@cached_launch
@triton.jit(**OF_CHUNKS)
def run_kernel(
    hidden_ptr,
    total_ptr,
    pieces_ptr,
    coefficients_ptr,
    starts_ptr,
    order_ptr,
    tokens_ptr,
    hidden_stride,
    total_stride,
    k,
    H,
    length,
    RAGGED: tl.constexpr,
    FIRST: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the slots of one id.

    `order` (N k,): the slots sorted by id; `starts` (V + 1,): first slot of each id.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    start = tl.load(starts_ptr + token)
    stop = tl.load(starts_ptr + token + 1)
    # Sum the id's slots before and after the pieces that it fills.
    first = tl.cdiv(start, length)
    last = stop // length
    before = tl.where(first < last, first * length, stop)
    after = tl.where(first < last, last * length, stop)
    total = tl.zeros([BLOCK], tl.float32)
    total = slots_sum(
        total,
        hidden_ptr,
        coefficients_ptr,
        order_ptr,
        tokens_ptr,
        hidden_stride,
        k,
        H,
        cols,
        start,
        before,
        RAGGED,
        SLOTS,
    )
    for piece in range(first, last):
        total += tl.load(pieces_ptr + piece * H + cols, mask=inside, other=0.0)
    total = slots_sum(
        total,
        hidden_ptr,
        coefficients_ptr,
        order_ptr,
        tokens_ptr,
        hidden_stride,
        k,
        H,
        cols,
        after,
        stop,
        RAGGED,
        SLOTS,
    )
    out = total_ptr + token * total_stride + cols
    if FIRST:
        tl.store(out, total.to(total_ptr.dtype.element_ty), mask=inside)
    elif start < stop:
        total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, total.to(total_ptr.dtype.element_ty), mask=inside)


def wrong_slots(ids: Tensor, values: Tensor, V: int, largest: float) -> Tensor:
    n, k = ids.shape
    wrong = torch.empty(2, ids.shape[0], dtype=torch.int8, device=ids.device)
    operands = dense(ids, torch.int64), dense(values, torch.float32)
    wrong_slots_kernel[(n,)](*operands, wrong, n, k, V, largest, SLOTS=COMPARED, num_warps=WARPS)
    return wrong.view(torch.bool)


def first_slots(ids: Tensor, values: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    rows, first_values = (
        torch.empty(ids.shape, dtype=x, device=ids.device) for x in (torch.int32, torch.float32)
    )
    first_slots_kernel[(ids.shape[0], triton.cdiv(ids.shape[1], COMPARED))](
        dense(ids, torch.int64),
        dense(values, torch.float32),
        rows,
        first_values,
        ids.shape[1],
        start,
        width,
        SLOTS=COMPARED,
        num_warps=WARPS,
    )
    return rows, first_values


def gathered_logits(hidden: Tensor, weight: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    check_rows(hidden=hidden, weight=weight)
    check_written(out=out)
    n, k = ids.shape
    H = weight.shape[1]
    gathered_logits_kernel[(n, triton.cdiv(k, SLOTS))](
        hidden,
        weight,
        dense(ids, torch.int32),
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


def weighted_rows(
    weight: Tensor,
    ids: Tensor,
    coefficients: Tensor,
    out: Tensor,
    base: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    n, k = ids.shape
    H = weight.shape[1]
    coefficients = dense(coefficients, torch.float32)
    has_base = base is not None
    base = out if base is None else base
    check_rows(weight=weight, out=out, base=base)
    weighted_rows_kernel[(n, triton.cdiv(H, BLOCK))](
        weight,
        dense(ids, torch.int32),
        coefficients,
        base,
        dense(factor, torch.float32) if has_base else coefficients,
        out,
        weight.stride(0),
        base.stride(0),
        out.stride(0),
        k,
        H,
        HAS_BASE=has_base,
        SLOTS=SLOTS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


def add_rows(
    total: Tensor,
    ids: Tensor,
    coefficients: Tensor,
    hidden: Tensor,
    *,
    first: bool,
    tokens: Tensor | None = None,  # (n,) int32 token of each slot, for ids (n, 1)
) -> None:
    check_rows(total=total, hidden=hidden)
    V, H = total.shape
    n, k = ids.shape
    coefficients = dense(coefficients, torch.float32)
    ragged = tokens is not None
    ids, order = dense(ids, torch.int32).view(-1).sort(stable=True)
    starts = torch.searchsorted(ids, torch.arange(V + 1, dtype=torch.int32, device=ids.device))
    length = piece_length(-(-n // max(1, hidden.shape[0])) if ragged else k)
    tokens = dense(tokens, torch.int32) if ragged else ids  # not read without RAGGED
    pieces = coefficients.new_empty(n * k // length, H)
    if len(pieces):
        piece_kernel[(len(pieces), triton.cdiv(H, BLOCK))](
            hidden,
            pieces,
            coefficients,
            ids,
            order,
            tokens,
            hidden.stride(0),
            k,
            H,
            length,
            RAGGED=ragged,
            SLOTS=SLOTS,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    run_kernel[(V, triton.cdiv(H, RUN_BLOCK))](
        hidden,
        total,
        pieces,
        coefficients,
        starts,
        order,
        tokens,
        hidden.stride(0),
        total.stride(0),
        k,
        H,
        length,
        RAGGED=ragged,
        FIRST=first,
        SLOTS=RUN_SLOTS,
        BLOCK=RUN_BLOCK,
        num_warps=WARPS,
    )


def piece_length(k: int) -> int:
    """Number of sorted slots per piece.

    The sums of all pieces take at most N H bytes, half as much as hidden.
    """
    return max(64, 4 * k)
