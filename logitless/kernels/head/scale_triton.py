"""Triton kernels of `scale.py`. They are bound by memory traffic, with one read and one write per element."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.operands import multiprocessors

BLOCK, WARPS = 2048, 4
# Number of programs per multiprocessor if all elements have the same factor. It is the number of programs
# that run concurrently, and each scales many blocks. With a factor of 1, these programs return at once. One
# program per block would take 0.2 ms for a d_weight of 151,936 x 4,096, even with a factor of 1.
PROGRAMS = 16


@triton.jit
def scale_block(x_ptr, out_ptr, cols, columns, factor, IN_PLACE: tl.constexpr):
    """Scale one block of columns of a row."""
    if IN_PLACE:
        # With a factor of 1, skip all columns.
        columns = tl.where(factor == 1.0, 0, columns)
    mask = cols < columns
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + cols, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(**OF_CHUNKS)
def scale_kernel(
    x_ptr,
    out_ptr,
    y_ptr,
    y_out_ptr,
    factor_ptr,
    factors_ptr,
    x_stride,
    out_stride,
    y_stride,
    y_out_stride,
    columns,
    y_columns,
    factor_stride,
    factors_stride,
    TWO: tl.constexpr,  # factors
    PAIR: tl.constexpr,
    IN_PLACE: tl.constexpr,
    Y_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    factor = tl.load(factor_ptr + row * factor_stride).to(tl.float32)
    if TWO:
        factor *= tl.load(factors_ptr + row * factors_stride).to(tl.float32)
    parts = tl.cdiv(columns, BLOCK)
    if PAIR:
        if part >= parts:
            cols = (part - parts) * BLOCK + tl.arange(0, BLOCK)
            y, y_out = y_ptr + row * y_stride, y_out_ptr + row * y_out_stride
            scale_block(y, y_out, cols, y_columns, factor, Y_IN_PLACE)
    if part < parts:
        cols = part * BLOCK + tl.arange(0, BLOCK)
        scale_block(x_ptr + row * x_stride, out_ptr + row * out_stride, cols, columns, factor, IN_PLACE)


# Which rows `scale_flat` keeps at 0: none, all if a count is 0, or the rows that a mask leaves out.
NONE, ALL, ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def scale_flat(
    x_ptr,
    out_ptr,
    supervised_ptr,
    numel,
    columns,
    factor,
    GUARD: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if GUARD == ALL:
        factor = tl.where(tl.load(supervised_ptr) == 0, 0.0, factor)
    if IN_PLACE:
        # With a factor of 1, skip all elements. This is the usual case: the loss is not scaled.
        numel = tl.where(factor == 1.0, 0, numel)
    infinite = (tl.abs(factor) < float("inf")) == 0  # also true of NaN
    first = tl.program_id(0).to(tl.int64)
    numel += first * 0  # in int64, as the last block may reach beyond 2^31
    for block in range(first, tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < numel
        scaled = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * factor
        if GUARD == ROWS:
            if infinite:  # a finite factor leaves 0 as it is, without a division and a load per element
                kept = tl.load(supervised_ptr + at // columns, mask=mask, other=0)
                scaled = tl.where(kept == 0, 0.0, scaled)
        tl.store(out_ptr + at, scaled.to(out_ptr.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(**OF_CHUNKS)
def scale_all_kernel(
    x_ptr,
    out_ptr,
    y_ptr,
    y_out_ptr,
    factor_ptr,
    supervised_ptr,
    y_supervised_ptr,
    numel,
    y_numel,
    columns,
    y_columns,
    GUARD: tl.constexpr,
    Y_GUARD: tl.constexpr,
    PAIR: tl.constexpr,
    IN_PLACE: tl.constexpr,
    Y_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    scale_flat(x_ptr, out_ptr, supervised_ptr, numel, columns, factor, GUARD, IN_PLACE, BLOCK)
    if PAIR:
        scale_flat(y_ptr, y_out_ptr, y_supervised_ptr, y_numel, y_columns, factor, Y_GUARD, Y_IN_PLACE, BLOCK)


def scale_all(
    pairs: Sequence[tuple[Tensor, Tensor]], factors: Sequence[Tensor], supervised: Sequence[Tensor | None]
) -> None:
    factor = factors[0]
    more = factors[-1]
    for number in range(0, len(pairs), 2):
        x, out = pairs[number]
        y, y_out = pairs[min(number + 1, len(pairs) - 1)]
        tensors = (x, out, y, y_out)
        pair = number + 1 < len(pairs)
        options = {"PAIR": pair, "IN_PLACE": _same(x, out), "Y_IN_PLACE": _same(y, y_out)}
        options |= {"BLOCK": BLOCK, "num_warps": WARPS}
        (rows, columns), y_columns = x.shape, y.shape[1]
        if len(factors) == 1 and factor.dim() == 0 and all([a.is_contiguous() for a in tensors]):
            sizes = x.numel(), y.numel()
            programs = min(-(-max(sizes) // BLOCK), PROGRAMS * multiprocessors(x.device))
            guards = supervised[number], supervised[number + pair]
            options |= {"GUARD": _guard(guards[0]), "Y_GUARD": _guard(guards[1])}
            operands = (_pointer(guards[0], factor), _pointer(guards[1], factor), *sizes, columns, y_columns)
            scale_all_kernel[(programs,)](*tensors, factor, *operands, **options)
            continue
        strides = [a.stride(0) for a in tensors]
        steps = [a.stride(0) if a.dim() else 0 for a in (factor, more)]
        parts = -(-columns // BLOCK) + pair * -(-y_columns // BLOCK)
        operands = (*tensors, factor, more, *strides, columns, y_columns, *steps)
        scale_kernel[(rows, parts)](*operands, TWO=len(factors) == 2, **options)


def _guard(kept: Tensor | None) -> int:
    if kept is None:
        return NONE.value
    return ROWS.value if kept.dim() else ALL.value


def _pointer(kept: Tensor | None, unused: Tensor) -> Tensor:
    if kept is None:
        return unused
    return kept.view(torch.int8) if kept.dtype == torch.bool else kept


def _same(x: Tensor, out: Tensor) -> bool:
    return x.data_ptr() == out.data_ptr() and x.dtype == out.dtype
