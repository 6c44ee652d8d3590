"""Triton kernels of `sets.py`.

The products and their gradients are bound by reading a row of H numbers for each slot. A program of
`slot_products_kernel` processes a few slots of arbitrary rows, so that rows with few slots need not be padded
to the longest row. The sum of a slot uses the same blocks of H in every program. The other kernels have one
program per row (and block of H), which reads the slots of the row a few at a time, in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import (
    complement,
    head_logits,
    larger,
    log1p,
    vocabulary_arguments,
)
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, check_written, dense

# Kernels that read rows of the head: SLOTS slots at a time, BLOCK elements of the row (H) of each slot, and
# WARPS warps per program. Kernels that only read logits: READ slots at a time, and one warp per program.
SLOTS, BLOCK, READ, WARPS = 8, 1024, 64, 4


@cached_launch
@triton.jit(**OF_CHUNKS)
def slot_products_kernel(
    hidden_ptr,
    weight_ptr,
    rows_ptr,
    tokens_ptr,
    out_ptr,
    hidden_stride,
    weight_stride,
    count,
    H,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    here = slot < count
    ids = tl.load(rows_ptr + slot, mask=here, other=-1).to(tl.int64)
    there = ids >= 0
    tokens = tl.load(tokens_ptr + slot, mask=there, other=0).to(tl.int64)
    hidden = hidden_ptr + tokens[:, None] * hidden_stride
    rows = weight_ptr + ids[:, None] * weight_stride
    total = tl.zeros([SLOTS], tl.float32)
    for start in range(0, H, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = there[:, None] & (cols < H)[None, :]
        x = tl.load(hidden + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        w = tl.load(rows + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(w * x, 1)
    tl.store(out_ptr + slot, total, mask=here)


@cached_launch
@triton.jit(**OF_CHUNKS)
def picked_logits_kernel(
    logits_ptr,
    rows_ptr,
    bounds_ptr,
    bias_ptr,
    z_ptr,
    logits_stride,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(bounds_ptr + row)
    stop = tl.load(bounds_ptr + row + 1)
    for begin in range(start, stop, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        here = slot < stop
        ids = tl.load(rows_ptr + slot, mask=here, other=-1)
        there = ids >= 0
        x = tl.load(logits_ptr + row * logits_stride + ids, mask=there, other=0.0)
        z, _ = head_logits(x, bias_ptr, ids, there, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
        tl.store(z_ptr + slot, tl.where(there, z, 0.0), mask=here)


@cached_launch
@triton.jit(**OF_CHUNKS)
def set_statistics_kernel(
    z_ptr,
    bounds_ptr,
    own_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    entropy_ptr,
    is_top1_ptr,
    EXTRA: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(bounds_ptr + row)
    stop = tl.load(bounds_ptr + row + 1)
    if start < stop:
        own = tl.load(own_ptr + row)
        z_y = tl.load(z_ptr + own)
        tops = tl.zeros([SLOTS], tl.float32)
        for begin in range(start, stop, SLOTS):
            slot = begin + tl.arange(0, SLOTS)
            is_other = (slot < stop) & (slot != own)
            d = tl.load(z_ptr + slot, mask=is_other, other=0.0) - z_y
            tops = tl.where(is_other, larger(tops, d), tops)
        top = tl.max(tops, 0)
        sums = tl.zeros([SLOTS], tl.float32)
        for begin in range(start, stop, SLOTS):
            slot = begin + tl.arange(0, SLOTS)
            is_other = (slot < stop) & (slot != own)
            d = tl.load(z_ptr + slot, mask=is_other, other=0.0) - z_y
            sums += tl.where(is_other, tl.exp(d - top), 0.0)
        others = tl.sum(sums, 0)
        log_total = tl.where(top > 0.0, tl.log(tl.exp(-top) + others), log1p(others))
        logps = -(log_total + top)
        lse = z_y - logps
        tl.store(logps_ptr + row, logps)
        tl.store(lse_ptr + row, lse)
        finite = tl.abs(lse) < float("inf")
        tl.store(lse_residual_ptr + row, tl.where(finite, (z_y - lse) - logps, 0.0))
        if EXTRA:
            surprise = tl.zeros([SLOTS], tl.float32)
            beaten = tl.zeros([SLOTS], tl.int32)
            for begin in range(start, stop, SLOTS):
                slot = begin + tl.arange(0, SLOTS)
                here = slot < stop
                d = tl.where(slot == own, 0.0, tl.load(z_ptr + slot, mask=here, other=0.0) - z_y)
                log_p = d + logps
                p = tl.exp(log_p)
                surprise += tl.where(here & (p != 0.0), p * log_p, 0.0)
                # Among equal logits, the lowest id is the arg-max. The ids of a row are in ascending order.
                beaten |= (here & ((d > 0.0) | ((d == 0.0) & (slot < own)))).to(tl.int32)
            tl.store(entropy_ptr + row, -tl.sum(surprise, 0))
            tl.store(is_top1_ptr + row, 1.0 - tl.max(beaten, 0).to(tl.float32))


@cached_launch
@triton.jit(**OF_CHUNKS)
def set_gradient_kernel(
    z_ptr,
    rows_ptr,
    bounds_ptr,
    own_ptr,
    logps_ptr,
    entropy_ptr,
    g_logp_ptr,
    g_lse_ptr,
    g_entropy_ptr,
    out_ptr,
    out_stride,
    gain,
    cap,
    LOGPS: tl.constexpr,
    LSE: tl.constexpr,
    ENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DENSE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """With DENSE, `out` is the gradient of a chunk (C, V); otherwise it has one entry per slot (S,)."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(bounds_ptr + row)
    stop = tl.load(bounds_ptr + row + 1)
    if start < stop:
        own = tl.load(own_ptr + row)
        z_y = tl.load(z_ptr + own)
        logps = tl.load(logps_ptr + row)
        for begin in range(start, stop, SLOTS):
            slot = begin + tl.arange(0, SLOTS)
            here = slot < stop
            z = tl.load(z_ptr + slot, mask=here, other=0.0)
            log_p = tl.where(slot == own, logps, (z - z_y) + logps)
            p = tl.exp(log_p)
            gradient = tl.zeros([SLOTS], tl.float32)
            if LOGPS:
                gradient += tl.load(g_logp_ptr + row) * tl.where(slot == own, complement(logps), -p)
            if LSE:
                gradient += tl.load(g_lse_ptr + row) * p
            if ENTROPY:
                surprise = tl.where(p != 0.0, p * (log_p + tl.load(entropy_ptr + row)), 0.0)
                gradient -= tl.load(g_entropy_ptr + row) * surprise
            slope = gain
            if HAS_SOFTCAP:
                # `LogitTransform.derivative_at` the logit.
                squashed = z / cap
                slope = gain * (1.0 - squashed * squashed)
            gradient *= slope
            if DENSE:
                ids = tl.load(rows_ptr + slot, mask=here, other=-1)
                place = out_ptr + row * out_stride + ids
                tl.store(place, gradient.to(out_ptr.dtype.element_ty), mask=ids >= 0)
            else:
                tl.store(out_ptr + slot, gradient, mask=here)


@cached_launch
@triton.jit(**OF_CHUNKS)
def slot_rows_kernel(
    weight_ptr,
    rows_ptr,
    bounds_ptr,
    coefficients_ptr,
    out_ptr,
    weight_stride,
    out_stride,
    H,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(bounds_ptr + row)
    stop = tl.load(bounds_ptr + row + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(start, stop, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        ids = tl.load(rows_ptr + slot, mask=slot < stop, other=-1).to(tl.int64)
        g = tl.load(coefficients_ptr + slot, mask=ids >= 0, other=0.0)
        w = tl.load(
            weight_ptr + ids[:, None] * weight_stride + cols[None, :],
            mask=(ids >= 0)[:, None] & (cols < H)[None, :],
            other=0.0,
        )
        total += tl.sum(w.to(tl.float32) * g[:, None], 0)
    tl.store(out_ptr + row * out_stride + cols, total.to(out_ptr.dtype.element_ty), mask=cols < H)


def slot_products(hidden: Tensor, weight: Tensor, slots, out: Tensor) -> Tensor:
    check_rows(hidden=hidden, weight=weight)
    check_written(out=out)
    count = slots.ids.shape[0]
    H = weight.shape[1]
    slot_products_kernel[(triton.cdiv(count, SLOTS),)](
        hidden,
        weight,
        dense(slots.ids),
        dense(slots.rows),
        out,
        hidden.stride(0),
        weight.stride(0),
        count,
        H,
        SLOTS=SLOTS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


def picked_logits(logits: Tensor, slots, z: Tensor, *, transform, bias: Tensor | None) -> None:
    check_rows(logits=logits)
    check_written(z=z)
    (bias, _), scalars, flags = vocabulary_arguments(transform, bias, None, z)
    picked_logits_kernel[(slots.own.shape[0],)](
        logits,
        dense(slots.ids),
        dense(slots.bounds),
        bias,
        z,
        logits.stride(0),
        *scalars,
        HAS_BIAS=flags["HAS_BIAS"],
        HAS_SOFTCAP=flags["HAS_SOFTCAP"],
        SLOTS=READ,
        num_warps=1,
    )


def set_statistics(z: Tensor, slots, out) -> None:
    written = dict(out.items())
    check_written(**written)
    extra = "entropy" in written
    set_statistics_kernel[(slots.own.shape[0],)](
        dense(z),
        dense(slots.bounds),
        dense(slots.own),
        out.logps,
        out.lse,
        out.lse_residual,
        out.entropy if extra else out.lse,
        out.is_top1 if extra else out.lse,
        EXTRA=extra,
        SLOTS=READ,
        num_warps=1,
    )


def set_gradient(z: Tensor, slots, stats, grads, transform, out: Tensor) -> None:
    """`out` is (S,), or the gradient of a chunk (C, V)."""
    if out.dim() == 2:
        check_rows(out=out)
    else:
        check_written(out=out)
    _, (gain, _, cap), flags = vocabulary_arguments(transform, None, None, z)
    upstream = {"logps": grads.logps, "lse": grads.lse, "entropy": grads.entropy}
    set_gradient_kernel[(slots.own.shape[0],)](
        dense(z),
        dense(slots.ids),
        dense(slots.bounds),
        dense(slots.own),
        dense(stats.logps),
        stats.logps if grads.entropy is None else dense(stats.entropy),
        *(z if g is None else dense(g, torch.float32) for g in upstream.values()),
        out,
        out.stride(0),
        gain,
        cap,
        **{name.upper(): g is not None for name, g in upstream.items()},
        HAS_SOFTCAP=flags["HAS_SOFTCAP"],
        DENSE=out.dim() == 2,
        SLOTS=READ,
        num_warps=1,
    )


def slot_rows(weight: Tensor, slots, coefficients: Tensor, out: Tensor) -> Tensor:
    check_rows(weight=weight, out=out)
    n, H = out.shape
    if not n:
        return out
    slot_rows_kernel[(n, triton.cdiv(H, BLOCK))](
        weight,
        dense(slots.ids),
        dense(slots.bounds),
        dense(coefficients, torch.float32),
        out,
        weight.stride(0),
        out.stride(0),
        H,
        SLOTS=SLOTS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
