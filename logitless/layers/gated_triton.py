"""Triton kernels of `gated.py`: each tensor is read or written once.

A program handles a tile of rows and columns. The halves of a packed tensor are passed as two pointers with a
row stride; contiguous tensors are one long row. The rows of experts are short (512 to 2,880 columns):
therefore a tile may have several rows, and as many columns as leave little of it empty. All tiles are on the
grid's first dimension, which has the largest limit.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import cached_launch
from logitless.kernels.operands import as_rows, cdiv, widest_dtype

BLOCK, WARPS = 2048, 4
KINDS = {"silu": 0, "gelu_tanh": 1, "gelu_erf": 2}
SILU, GELU_TANH = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def activate(a, KIND: tl.constexpr):
    """Return act(a) and act'(a); the compiler removes the one that a kernel does not use."""
    if KIND == SILU:
        s = tl.sigmoid(a)
        act = a * s
        derivative = s * (1.0 + a * (1.0 - s))
    elif KIND == GELU_TANH:
        # 2 sqrt(2/pi), and that times 0.044715 and 3 * 0.044715
        s = tl.sigmoid(a * (1.5957691216057308 + 0.07135481282553 * a * a))
        act = a * s
        derivative = s + act * (1.0 - s) * (1.5957691216057308 + 0.21406443847660 * a * a)
    else:
        cdf = 0.5 + 0.5 * tl.erf(0.7071067811865476 * a)
        act = a * cdf
        derivative = cdf + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)
    return act, derivative


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    a_stride,
    b_stride,
    rows,
    columns,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < columns)
    a = tl.load(a_ptr + row * a_stride + col, mask=mask, other=0.0)
    b = tl.load(b_ptr + row * b_stride + col, mask=mask, other=0.0)
    act, _ = activate(a.to(tl.float32), KIND)
    out = act.to(a.dtype).to(tl.float32) * b.to(tl.float32)
    tl.store(out_ptr + row * columns + col, out.to(out_ptr.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def gated_backward_kernel(
    d_out_ptr,
    a_ptr,
    b_ptr,
    d_a_ptr,
    d_b_ptr,
    d_out_stride,
    a_stride,
    b_stride,
    d_stride,
    rows,
    columns,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < columns)
    g = tl.load(d_out_ptr + row * d_out_stride + col, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * a_stride + col, mask=mask, other=0.0)
    b = tl.load(b_ptr + row * b_stride + col, mask=mask, other=0.0).to(tl.float32)
    act, derivative = activate(a.to(tl.float32), KIND)
    d_b = g * act.to(a.dtype).to(tl.float32)
    tl.store(d_a_ptr + row * d_stride + col, (g * b * derivative).to(d_a_ptr.dtype.element_ty), mask=mask)
    tl.store(d_b_ptr + row * d_stride + col, d_b.to(d_b_ptr.dtype.element_ty), mask=mask)


@functools.cache
def tile_of(columns: int, elements: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of so many elements, for tensors of so many columns.

    One row, if the tiles of a row cover at most a third more columns than there are: with 3,072 columns,
    tiles of two rows took 15% more time in the backward pass on an H100. Otherwise blocks of 128 columns or
    more that cover at most a sixteenth more columns, where possible.
    """
    block = elements
    if 3 * cdiv(columns, block) * block <= 4 * columns:
        return 1, block
    while block > 128 and cdiv(columns, block) * block > columns * 17 // 16:
        block //= 2
    return elements // block, block


def _launch_shape(*tensors: Tensor) -> tuple[int, int, int, int]:
    """Return (rows, columns, rows of a tile, columns of a tile): one long row if all are contiguous."""
    columns = tensors[0].shape[-1]
    elements = tensors[0].numel()
    if all(x.is_contiguous() for x in tensors):
        return 1, elements, 1, BLOCK
    return elements // columns, columns, *tile_of(columns, BLOCK)


def forward(a: Tensor, b: Tensor, activation: str) -> Tensor:
    out = torch.empty_like(a, dtype=widest_dtype(a, b), memory_format=torch.contiguous_format)
    rows, columns, tile_rows, block = _launch_shape(a, b)
    a, a_stride = as_rows(a)
    b, b_stride = as_rows(b)
    gated_kernel[(cdiv(rows, tile_rows) * cdiv(columns, block),)](
        a,
        b,
        out,
        a_stride,
        b_stride,
        rows,
        columns,
        KIND=KINDS[activation],
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=WARPS,
    )
    return out


def backward(d_out: Tensor, a: Tensor, b: Tensor, activation: str, out: tuple[Tensor, Tensor] | None):
    """Return d_a and d_b, written to `out` (two halves of one tensor) unless it is None."""
    if out is None:
        out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b))
    rows, columns, tile_rows, block = _launch_shape(d_out, a, b, *out)
    d_out, d_out_stride = as_rows(d_out)
    a, a_stride = as_rows(a)
    b, b_stride = as_rows(b)
    d_a, d_stride = as_rows(out[0])
    gated_backward_kernel[(cdiv(rows, tile_rows) * cdiv(columns, block),)](
        d_out,
        a,
        b,
        d_a,
        as_rows(out[1])[0],
        d_out_stride,
        a_stride,
        b_stride,
        d_stride,
        rows,
        columns,
        KIND=KINDS[activation],
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=WARPS,
    )
    return out
