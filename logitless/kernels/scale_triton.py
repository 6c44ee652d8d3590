"""Triton kernel of `scale.py`: bound by memory traffic, one read and one write per element."""

import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, held

BLOCK = 2048


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


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    rows, columns = x.shape
    if factor.dim() == 0 and x.is_contiguous() and out.is_contiguous():
        # One factor: any shape will do, so take one that fills the blocks, and puts them all along the grid's
        # long dimension.
        width = next((w for w in (BLOCK, BLOCK // 2, BLOCK // 4) if x.numel() % w == 0), columns)
        if width != columns:
            return scale(x.view(-1, width), factor, out.view(-1, width)).view(rows, columns)
    scale_kernel[(rows, triton.cdiv(columns, BLOCK))](
        x,
        factor,
        out,
        x.stride(0),
        out.stride(0),
        factor.stride(0) if factor.dim() else 0,
        columns,
        IN_PLACE=x.data_ptr() == out.data_ptr() and x.dtype == out.dtype,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out
