"""Triton kernels of `lora_dropout.py`.

A program computes one projection; programs with consecutive numbers compute those of one input, so that x is
read once from memory, and from the cache for the other projections. Programs that add to d_x loop over them.

Byte k of a row of bits has those of the columns 128 (k // 16) + k % 16 + 16 j, with j from 0 to 7: threads
with neighbouring columns read neighbouring bytes, and a tile of 128 columns reads 16 of them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import cached_launch
from logitless.kernels.operands import as_rows, cdiv, multiprocessors

RUN = tl.constexpr(16)
TILE = tl.constexpr(8 * 16)
BLOCK = 64  # rows
BYTES = 1024  # of a program that draws bits
# Philox4x32 with 7 rounds passes all tests of BigCrush: Salmon et al., Parallel Random Numbers: As Easy as
# 1, 2, 3, 2011, https://doi.org/10.1145/2063384.2063405.
ROUNDS = tl.constexpr(7)
# Padded rank -> stages of the loads, so that their tiles fit into shared memory.
STAGES = {16: 3, 32: 3, 64: 2, 128: 1}


@triton.jit
def pair_of_bits(word, threshold, SHIFT: tl.constexpr):
    """Return the bits SHIFT and SHIFT + 1: whether each half of a random word is at least the threshold."""
    low = ((word & 0xFFFF) >= threshold).to(tl.uint32)
    high = ((word >> 16) >= threshold).to(tl.uint32)
    return (low << SHIFT) | (high << (SHIFT + 1))


@cached_launch
@triton.jit
def draw_bits_kernel(bits_ptr, seed_ptr, size, threshold, BYTES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    low = index.to(tl.uint32)
    zero = low * 0
    threshold = threshold.to(tl.uint32)
    # 128 random bits a byte: 16 for each of its bits.
    a, b, c, d = tl.philox(tl.load(seed_ptr), low, (index >> 32).to(tl.uint32), zero, zero, ROUNDS)
    bits = pair_of_bits(a, threshold, 0) | pair_of_bits(b, threshold, 2)
    bits |= pair_of_bits(c, threshold, 4) | pair_of_bits(d, threshold, 6)
    tl.store(bits_ptr + index, bits.to(tl.uint8), mask=index < size)


@triton.jit
def load_kept(bits_ptr, row, col, inside, row_bytes):
    """Return which elements of the tile (row, col) a mask keeps."""
    byte = (col // TILE) * RUN + col % RUN
    bits = tl.load(bits_ptr + row[:, None] * row_bytes + byte[None, :], mask=inside, other=0)
    return ((bits.to(tl.int32) >> ((col % TILE) // RUN)[None, :]) & 1) != 0


@triton.jit
def load_dropped(x_ptr, bits_ptr, row, col, rows, columns, x_stride, row_bytes):
    """Return the tile (row, col) of x * mask."""
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0)
    return tl.where(load_kept(bits_ptr, row, col, inside, row_bytes), x, tl.zeros_like(x))


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def dropout_project_kernel(
    x_ptr,
    bits_ptr,
    a_ptr,
    h_ptr,
    scale,
    x_stride,
    h_stride,
    rows,
    columns,
    row_bytes,
    members,
    rank,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    STAGES: tl.constexpr,
):
    member = tl.program_id(0) % members
    row = (tl.program_id(0) // members).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    bits_ptr += member.to(tl.int64) * rows * row_bytes
    a_ptr += member.to(tl.int64) * rank * columns
    h = tl.zeros((BLOCK, RANK), tl.float32)
    for start in tl.range(0, columns, TILE, num_stages=STAGES):
        col = start + tl.arange(0, TILE)
        x = load_dropped(x_ptr, bits_ptr, row, col, rows, columns, x_stride, row_bytes)
        inside = (col < columns)[:, None] & (r < rank)[None, :]
        a = tl.load(a_ptr + r[None, :] * columns + col[:, None], mask=inside, other=0.0)
        h = tl.dot(x, a, h)
    out = h_ptr + row[:, None] * h_stride + (member * rank + r)[None, :]
    tl.store(out, (scale * h).to(h_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (r < rank)[None, :])


@cached_launch
@triton.jit(do_not_specialize=["rows", "piece"])
def dropout_weight_kernel(
    x_ptr,
    bits_ptr,
    d_h_ptr,
    pieces_ptr,
    x_stride,
    d_h_stride,
    rows,
    columns,
    row_bytes,
    members,
    rank,
    piece,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    STAGES: tl.constexpr,
):
    member = tl.program_id(0) % members
    tiles = tl.cdiv(columns, TILE)
    col = tl.program_id(0) // members % tiles * TILE + tl.arange(0, TILE)
    number = tl.program_id(0) // members // tiles
    r = tl.arange(0, RANK)
    bits_ptr += member.to(tl.int64) * rows * row_bytes
    first = number * piece
    total = tl.zeros((RANK, TILE), tl.float32)
    for start in tl.range(first, tl.minimum(first + piece, rows), BLOCK, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK)).to(tl.int64)
        x = load_dropped(x_ptr, bits_ptr, row, col, rows, columns, x_stride, row_bytes)
        inside = (row < rows)[None, :] & (r < rank)[:, None]
        d_h = tl.load(
            d_h_ptr + row[None, :] * d_h_stride + (member * rank + r)[:, None], mask=inside, other=0.0
        )
        total = tl.dot(d_h, x, total)
    out = pieces_ptr + ((number * members + member) * rank + r).to(tl.int64)[:, None] * columns + col[None, :]
    tl.store(out, total, mask=(r < rank)[:, None] & (col < columns)[None, :])


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def dropout_input_kernel(
    d_x_ptr,
    bits_ptr,
    d_h_ptr,
    a_ptr,
    d_h_stride,
    rows,
    columns,
    row_bytes,
    members,
    rank,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
):
    tiles = tl.cdiv(columns, TILE)
    col = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    d_x_ptrs = d_x_ptr + row[:, None] * columns + col[None, :]
    total = tl.load(d_x_ptrs, mask=inside, other=0.0).to(tl.float32)
    for member in tl.range(0, members, num_stages=1):
        d_h = tl.load(
            d_h_ptr + row[:, None] * d_h_stride + (member * rank + r)[None, :],
            mask=(row < rows)[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + (member * rank + r).to(tl.int64)[:, None] * columns + col[None, :],
            mask=(r < rank)[:, None] & (col < columns)[None, :],
            other=0.0,
        )
        bits = bits_ptr + tl.cast(member, tl.int64) * rows * row_bytes
        total += tl.where(load_kept(bits, row, col, inside, row_bytes), tl.dot(d_h, a), 0.0)
    tl.store(d_x_ptrs, total.to(d_x_ptr.dtype.element_ty), mask=inside)


def draw_bits(x: Tensor, p: float, count: int) -> Tensor:
    """Return the bits of `count` masks of x (N, K): (count, N, bytes of a row).

    The seed is drawn on the device by torch's generator, which `torch.manual_seed` and the recomputation of
    activation checkpointing set. p is rounded to a multiple of 2^-16.
    """
    rows, columns = x.shape
    bits = x.new_empty(count, rows, cdiv(columns, TILE.value) * RUN.value, dtype=torch.uint8)
    seed = x.new_empty((), dtype=torch.int64).random_()
    threshold = min(round(p * 2**16), 2**16 - 1)
    grid = (cdiv(bits.numel(), BYTES),)
    draw_bits_kernel[grid](bits, seed, bits.numel(), threshold, BYTES=BYTES, num_warps=4)
    return bits


def project(x: Tensor, bits: Tensor, a: Tensor, scale: float, out: Tensor) -> None:
    x, x_stride = as_rows(x)
    (count, rows, row_bytes), (height, columns) = bits.shape, a.shape
    padded = _padded(height // count)
    dropout_project_kernel[(cdiv(rows, BLOCK) * count,)](
        x,
        bits,
        a,
        out,
        float(scale),
        x_stride,
        out.stride(0),
        rows,
        columns,
        row_bytes,
        count,
        height // count,
        BLOCK=BLOCK,
        RANK=padded,
        STAGES=STAGES[padded],
        num_warps=4,
    )


def weight_gradient(d_h: Tensor, x: Tensor, bits: Tensor) -> Tensor:
    """Return the gradients in fp32: the sum over pieces of the rows."""
    x, x_stride = as_rows(x)
    (count, rows, row_bytes), columns, height = bits.shape, x.shape[-1], d_h.shape[1]
    padded = _padded(height // count)
    tiles = cdiv(columns, TILE.value) * count
    pieces = max(1, 4 * multiprocessors(x.device) // tiles)
    piece = cdiv(cdiv(rows, pieces), BLOCK) * BLOCK
    pieces = cdiv(rows, piece)
    sums = x.new_empty(pieces, height, columns, dtype=torch.float32)
    dropout_weight_kernel[(pieces * tiles,)](
        x,
        bits,
        d_h,
        sums,
        x_stride,
        d_h.stride(0),
        rows,
        columns,
        row_bytes,
        count,
        height // count,
        piece,
        BLOCK=BLOCK,
        RANK=padded,
        STAGES=STAGES[padded],
        num_warps=4 if padded <= 64 else 8,
    )
    return sums[0] if pieces == 1 else sums.sum(0)


def add_input_gradient(d_x: Tensor, d_h: Tensor, bits: Tensor, a: Tensor) -> None:
    (count, rows, row_bytes), (height, columns) = bits.shape, a.shape
    dropout_input_kernel[(cdiv(rows, BLOCK) * cdiv(columns, TILE.value),)](
        d_x,
        bits,
        d_h,
        a,
        d_h.stride(0),
        rows,
        columns,
        row_bytes,
        count,
        height // count,
        BLOCK=BLOCK,
        RANK=_padded(height // count),
        num_warps=4,
    )


@functools.cache
def _padded(rank: int) -> int:
    """Return the rank of the tiles: a power of 2, and at least 16 for a product of tiles."""
    return max(16, triton.next_power_of_2(rank))
