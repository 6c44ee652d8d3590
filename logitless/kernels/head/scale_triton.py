"""Triton kernels of `scale.py`: bound by memory traffic, one read and one write per element."""

import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, held
from logitless.kernels.operands import multiprocessors

BLOCK, WARPS = 2048, 4
# Programs for each multiprocessor where all numbers share a factor: as many as run at once, each of which
# walks many blocks. Where a factor of 1 leaves nothing to do, only they are launched: one program per block
# took 0.2 ms for a d_weight of 151,936 x 4,096.
PROGRAMS = 16


@held
@triton.jit(**OF_CHUNKS)
def scale_kernel(
    x_ptr,
    factor_ptr,
    out_ptr,
    x_stride,
    out_stride,
    factor_stride,
    columns,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr + row * factor_stride).to(tl.float32)
    if IN_PLACE:
        # A factor of 1 leaves nothing to do: a loss that is not scaled is the usual one.
        columns = tl.where(factor == 1.0, 0, columns)
    mask = cols < columns
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


@held
@triton.jit(**OF_CHUNKS)
def scale_all_kernel(x_ptr, factor_ptr, out_ptr, numel, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if IN_PLACE:
        # A factor of 1 leaves nothing to do: a loss that is not scaled is the usual one.
        numel = tl.where(factor == 1.0, 0, numel)
    first = tl.program_id(0).to(tl.int64)
    numel += first * 0  # in int64, as the last block may reach beyond 2^31
    for block in range(first, tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        mask = at < numel
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    rows, columns = x.shape
    in_place = x.data_ptr() == out.data_ptr() and x.dtype == out.dtype
    options = {"IN_PLACE": in_place, "BLOCK": BLOCK, "num_warps": WARPS}
    if factor.dim() == 0 and x.is_contiguous() and out.is_contiguous():
        programs = min(triton.cdiv(x.numel(), BLOCK), PROGRAMS * multiprocessors(x.device))
        scale_all_kernel[(programs,)](x, factor, out, x.numel(), **options)
        return out
    scale_kernel[(rows, triton.cdiv(columns, BLOCK))](
        x,
        factor,
        out,
        x.stride(0),
        out.stride(0),
        factor.stride(0) if factor.dim() else 0,
        columns,
        **options,
    )
    return out
