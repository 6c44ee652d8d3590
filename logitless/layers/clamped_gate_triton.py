"""Triton kernels of `clamped_gate.py`: each tensor is read or written once.

A program handles a tile of rows and columns of the result. Interleaved columns are read and written as one
contiguous block, and split in registers; a contiguous tensor of them is one long row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import cached_launch
from logitless.kernels.operands import as_rows, cdiv
from logitless.layers.gated_triton import BLOCK, WARPS, tile_of


@triton.jit
def load_gate_and_up(
    x_ptr, row, col, is_row, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load gate and up (ROWS, BLOCK) in fp32; `row` (ROWS, 1) are offsets, `col` the first column."""
    if INTERLEAVED:
        both = 2 * col + tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(x_ptr + row + both, mask=is_row & (both < 2 * columns), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, [ROWS, BLOCK, 2]))
    column = col + tl.arange(0, BLOCK)[None, :]
    mask = is_row & (column < columns)
    a = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + row + columns + column, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def clamp_gate_and_up(a, b, limit):
    """Return min(a, limit) and clamp(b, -limit, limit); NaN stays NaN, as in PyTorch."""
    g = tl.where(a > limit, limit, a)
    u = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
    return g, u


@triton.jit
def tile_at(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the program's rows (ROWS, 1), its first column, and which of the rows exist."""
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    return row, col, row < rows


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def clamped_gate_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    rows,
    columns,
    limit,
    alpha,
    offset,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, col, is_row = tile_at(rows, columns, ROWS, BLOCK)
    a, b = load_gate_and_up(x_ptr, row * x_stride, col, is_row, columns, ROWS, BLOCK, INTERLEAVED)
    g, u = clamp_gate_and_up(a, b, limit)
    out = (u + offset) * (g * tl.sigmoid(alpha * g))
    column = col + tl.arange(0, BLOCK)[None, :]
    mask = is_row & (column < columns)
    tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def clamped_gate_backward_kernel(
    d_out_ptr,
    x_ptr,
    d_x_ptr,
    d_out_stride,
    x_stride,
    rows,
    columns,
    limit,
    alpha,
    offset,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, col, is_row = tile_at(rows, columns, ROWS, BLOCK)
    column = col + tl.arange(0, BLOCK)[None, :]
    mask = is_row & (column < columns)
    a, b = load_gate_and_up(x_ptr, row * x_stride, col, is_row, columns, ROWS, BLOCK, INTERLEAVED)
    d_out = tl.load(d_out_ptr + row * d_out_stride + column, mask=mask, other=0.0).to(tl.float32)
    g, u = clamp_gate_and_up(a, b, limit)
    s = tl.sigmoid(alpha * g)
    glu = g * s
    d_a = tl.where(a <= limit, d_out * (u + offset) * (s + alpha * glu * (1.0 - s)), 0.0)
    d_b = tl.where(tl.abs(b) <= limit, d_out * glu, 0.0)
    d_a = d_a.to(d_x_ptr.dtype.element_ty)
    d_b = d_b.to(d_x_ptr.dtype.element_ty)
    row = row * (2 * columns)
    if INTERLEAVED:
        both = 2 * col + tl.arange(0, 2 * BLOCK)[None, :]
        d_x = tl.reshape(tl.join(d_a, d_b), [ROWS, 2 * BLOCK])
        tl.store(d_x_ptr + row + both, d_x, mask=is_row & (both < 2 * columns))
    else:
        tl.store(d_x_ptr + row + column, d_a, mask=mask)
        tl.store(d_x_ptr + row + columns + column, d_b, mask=mask)


def _tile(interleaved: bool, out: Tensor, *tensors: Tensor) -> tuple[int, int, int, int]:
    """Return (rows, columns, rows of a tile, columns of a tile) of the result.

    It is one long row if the columns are interleaved and all tensors contiguous.
    """
    columns = out.shape[-1]
    rows = out.numel() // columns
    if interleaved and all(x.is_contiguous() for x in tensors):
        return 1, rows * columns, 1, BLOCK
    return rows, columns, *tile_of(columns, BLOCK)


def forward(x: Tensor, interleaved: bool, *numbers: float) -> Tensor:
    """Return the gated tensor; `numbers` are limit, alpha and offset."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    rows, columns, tile_rows, block = _tile(interleaved, out, x)
    x, x_stride = as_rows(x)
    clamped_gate_kernel[(cdiv(rows, tile_rows) * cdiv(columns, block),)](
        x,
        out,
        x_stride,
        rows,
        columns,
        *numbers,
        INTERLEAVED=interleaved,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=WARPS,
    )
    return out


def backward(d_out: Tensor, x: Tensor, interleaved: bool, *numbers: float) -> Tensor:
    """Return d_x."""
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, columns, tile_rows, block = _tile(interleaved, d_out, d_out, x)
    d_out, d_out_stride = as_rows(d_out)
    x, x_stride = as_rows(x)
    clamped_gate_backward_kernel[(cdiv(rows, tile_rows) * cdiv(columns, block),)](
        d_out,
        x,
        d_x,
        d_out_stride,
        x_stride,
        rows,
        columns,
        *numbers,
        INTERLEAVED=interleaved,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=WARPS,
    )
    return d_x
