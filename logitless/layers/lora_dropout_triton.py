"""Triton kernels of `lora_dropout.py`: one for the forward pass, one for the backward pass.

The kernel of the forward pass draws the masks. One of its programs computes a block of rows of one
projection; programs with consecutive numbers compute the same rows of all projections of one input, so that
x is read once from memory, and from the cache for the other projections. The kernel of the backward pass
reads x and the masks and writes d_x once, for all projections of one input: a program has a tile of columns
and loops over a piece of the rows.

Byte k of a row of bits has those of the columns 8 k to 8 k + 7, which are registers of one thread.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import BoundLaunch, cached_launch
from logitless.kernels.operands import as_rows, cdiv, multiprocessors

TILE = tl.constexpr(128)  # columns
TILE_BYTES = tl.constexpr(16)
BLOCK = 32  # rows
# Offsets within a block of rows have 32 bits.
MAX_STRIDE = 2**24
# Philox4x32 with 7 rounds passes all tests of BigCrush: Salmon et al., Parallel Random Numbers: As Easy as
# 1, 2, 3, 2011, https://doi.org/10.1145/2063384.2063405.
ROUNDS = tl.constexpr(7)
# Padded rank -> stages of the loads of the forward pass, so that their tiles fit into shared memory.
STAGES = {16: 3, 32: 3, 64: 2, 128: 1}
# Most rows of A, padded, of several projections in a program of the backward pass, which keeps their
# gradients in registers; one projection may have more.
MAX_HEIGHT = 96
# For more than 32 rows of A. On AMD GPUs, warps have 64 threads.
WARPS = 4 if torch.version.hip else 8


@triton.jit
def draw_bits(row, byte, low, high, k0, k1, threshold):
    """Return eight bits for each row and byte: whether random numbers of 16 bits are at least the threshold.

    The key of Philox is (k0, k1), the halves of the seed. Its counter is (row, byte, low, high), the last two
    being the offset of the mask. The numbers are compared bit by bit, all eight at once: bit 4 m + j of the
    numbers is byte m of the random word j.
    """
    c0 = row.to(tl.uint32)[:, None] + tl.zeros_like(byte).to(tl.uint32)[None, :]
    zero = c0 * 0
    c1 = zero + byte.to(tl.uint32)[None, :]
    words = tl.philox_impl(c0, c1, zero + low, zero + high, k0, k1, ROUNDS)
    # Whether the four bits of each m are at least those of the threshold, if the bits below them are smaller
    # than the threshold's, and if they are not.
    smaller = zero
    larger = zero | 0xFFFFFFFF
    for j in tl.static_range(4):
        bit = threshold >> j
        ones = (bit & 1) | (bit << 4 & 0x100) | (bit << 8 & 0x10000) | (bit << 12 & 0x1000000)
        # All ones in the bytes m of which bit 4 m + j of the threshold is 0.
        zeros = (ones * 255) ^ 0xFFFFFFFF
        smaller = (words[j] & smaller) | (zeros & (words[j] | smaller))
        larger = (words[j] & larger) | (zeros & (words[j] | larger))
    # The same for eight bits, in bytes 0 and 2.
    both_smaller = (smaller >> 8) | ((larger >> 8) & smaller)
    both_larger = (smaller >> 8) | ((larger >> 8) & larger)
    bits = (both_smaller >> 16) | ((both_larger >> 16) & both_larger)
    return (bits & 0xFF).to(tl.uint8)


@triton.jit
def kept(bits, ROWS: tl.constexpr):
    """Return which elements of a tile of 128 columns the bits keep."""
    each = (bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(each, (ROWS, TILE)) != 0


@cached_launch
@triton.jit(
    do_not_specialize=["rows", "seed_low", "seed_high", "offset_low", "offset_high", "threshold"],
)
def dropout_project_kernel(
    x_ptr,
    bits_ptr,
    a_ptr,
    h_ptr,
    seed_ptr,  # or None: then the next two numbers are the seed
    seed_low,
    seed_high,
    offset_low,
    offset_high,
    threshold,
    scale,
    x_stride,
    rows,
    columns,
    members,
    rank,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    STAGES: tl.constexpr,
):
    member = tl.program_id(0) % members
    first = tl.program_id(0) // members * BLOCK
    row = tl.arange(0, BLOCK)
    col = tl.arange(0, TILE)
    byte = tl.arange(0, TILE_BYTES)
    r = tl.arange(0, RANK)
    is_row = row < rows - first
    row_bytes = tl.cdiv(columns, TILE) * TILE_BYTES
    x_ptr += first.to(tl.int64) * x_stride
    bits_ptr += (member.to(tl.int64) * rows + first) * row_bytes
    a_ptr += member.to(tl.int64) * rank * columns
    h_ptr += (first.to(tl.int64) * members + member) * rank
    x_offset = row[:, None] * x_stride + col[None, :]
    # Without this, a thread would store several neighbouring bytes, and draw their bits once more for it.
    bits_offset = tl.multiple_of(row[:, None] * row_bytes + byte[None, :], (1, 1))
    a_offset = r[None, :] * columns + col[:, None]
    k0 = seed_low.to(tl.uint32)
    k1 = seed_high.to(tl.uint32)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
        k0 = seed.to(tl.uint32)
        k1 = (seed >> 32).to(tl.uint32)
    low = (offset_low + member).to(tl.uint32)
    high = offset_high.to(tl.uint32)
    h = tl.zeros((BLOCK, RANK), tl.float32)
    for start in tl.range(0, columns, TILE, num_stages=STAGES):
        is_col = col < columns - start
        x = tl.load(x_ptr + start + x_offset, mask=is_row[:, None] & is_col[None, :], other=0.0)
        first_byte = start // 8
        bits = draw_bits(first + row, first_byte + byte, low, high, k0, k1, threshold.to(tl.uint32))
        tl.store(bits_ptr + first_byte + bits_offset, bits, mask=is_row[:, None])
        a = tl.load(a_ptr + start + a_offset, mask=is_col[:, None] & (r < rank)[None, :], other=0.0)
        h = tl.dot(tl.where(kept(bits, BLOCK), x, tl.zeros_like(x)), a, h)
    out = (scale * h).to(h_ptr.dtype.element_ty)
    tl.store(
        h_ptr + row[:, None] * (members * rank) + r[None, :], out, mask=is_row[:, None] & (r < rank)[None, :]
    )


@cached_launch
@triton.jit(do_not_specialize=["rows", "piece", "before"])
def dropout_backward_kernel(
    x_ptr,  # or None
    d_x_ptr,  # or None
    bits_ptr,
    d_h_ptr,
    a_ptr,
    pieces_ptr,  # None if x is None
    x_stride,
    height,
    rows,
    columns,
    rank,
    piece,
    before,  # number of projections before the first of this launch
    MEMBERS: tl.constexpr,
    ADD: tl.constexpr,  # to d_x
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles = tl.cdiv(columns, TILE)
    number = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    col = tile * TILE + tl.arange(0, TILE)
    row = tl.arange(0, BLOCK)
    r = tl.arange(0, RANK)
    row_bytes = tiles * TILE_BYTES
    inside = (r < rank)[:, None] & (col < columns)[None, :]
    many_a = ()
    totals = ()
    for member in tl.static_range(MEMBERS):
        if d_x_ptr is not None:
            a_row = ((before + member) * rank + r).to(tl.int64)
            a = tl.load(a_ptr + a_row[:, None] * columns + col[None, :], mask=inside, other=0.0)
            many_a = many_a + (a,)
        totals = totals + (tl.zeros((RANK, TILE), tl.float32),)
    x_offset = row[:, None] * x_stride + col[None, :]
    d_x_offset = row[:, None] * columns + col[None, :]
    bits_offset = row[:, None] * row_bytes + tile * TILE_BYTES + tl.arange(0, TILE_BYTES)[None, :]
    d_h_offset = row[:, None] * height + r[None, :]
    transposed_offset = row[None, :] * height + r[:, None]
    first = number * piece
    for start in tl.range(first, tl.minimum(first + piece, rows), BLOCK, num_stages=STAGES):
        start_row = tl.cast(start, tl.int64)
        is_row = row < rows - start
        inside_x = is_row[:, None] & (col < columns)[None, :]
        if x_ptr is not None:
            x = tl.load(x_ptr + start_row * x_stride + x_offset, mask=inside_x, other=0.0)
        if d_x_ptr is not None:
            d_x_ptrs = d_x_ptr + start_row * columns + d_x_offset
            if ADD:
                d_x = tl.load(d_x_ptrs, mask=inside_x, other=0.0).to(tl.float32)
            else:
                d_x = tl.zeros((BLOCK, TILE), tl.float32)
        new_totals = ()
        for member in tl.static_range(MEMBERS):
            number_of_row = tl.cast(before + member, tl.int64) * rows + start
            bits = tl.load(bits_ptr + number_of_row * row_bytes + bits_offset, mask=is_row[:, None], other=0)
            keep = kept(bits, BLOCK)
            d_h_start = d_h_ptr + start_row * height + (before + member) * rank
            if x_ptr is not None:
                # d_h is loaded once for each product, so that both loads are prefetched.
                inside_d_h = is_row[None, :] & (r < rank)[:, None]
                transposed = tl.load(d_h_start + transposed_offset, mask=inside_d_h, other=0.0)
                dropped = tl.where(keep, x, tl.zeros_like(x))
                new_totals = new_totals + (tl.dot(transposed, dropped, totals[member]),)
            else:
                new_totals = new_totals + (totals[member],)
            if d_x_ptr is not None:
                inside_d_h = is_row[:, None] & (r < rank)[None, :]
                d_h = tl.load(d_h_start + d_h_offset, mask=inside_d_h, other=0.0)
                d_x += tl.where(keep, tl.dot(d_h, many_a[member]), 0.0)
        totals = new_totals
        if d_x_ptr is not None:
            tl.store(d_x_ptrs, d_x.to(d_x_ptr.dtype.element_ty), mask=inside_x)
    if x_ptr is not None:
        for member in tl.static_range(MEMBERS):
            a_row = (tl.cast(number, tl.int64) * height + (before + member) * rank + r)[:, None]
            tl.store(pieces_ptr + a_row * columns + col[None, :], totals[member], mask=inside)


def project(x: Tensor, p: float, count: int, a: Tensor, scale: float, out: Tensor) -> Tensor:
    """Draw `count` masks of x (N, K), write scale * (x * m_i) @ A_i' to `out`, and return the masks.

    p is rounded to a multiple of 2^-16.

    Returns:
        the bits of the masks (count, N, bytes of a row).
    """
    x, x_stride = _strided(x)
    (rows, columns), height = x.shape, a.shape[0]
    bits = x.new_empty(count, rows, cdiv(columns, TILE.value) * TILE_BYTES.value, dtype=torch.uint8)
    seed, *state = _random_state(x, count)
    aligned = x.data_ptr() & 15, a.data_ptr() & 15
    _project_launch(x.dtype, x_stride, columns, height, count, aligned, seed is None)(
        (cdiv(rows, BLOCK) * count,),
        x,
        bits,
        a,
        out,
        seed,
        *state,
        min(round(p * 2**16), 2**16 - 1),
        float(scale),
        x_stride,
        rows,
        columns,
        count,
        height // count,
    )
    return bits


@functools.lru_cache(maxsize=1024)
def _project_launch(
    dtype: torch.dtype,
    x_stride: int,
    columns: int,
    height: int,
    count: int,
    aligned: tuple[int, ...],
    seed_is_on_host: bool,
) -> BoundLaunch:
    """Return the launch for operands with these properties, which include all that Triton specializes on."""
    padded = _padded(height // count)
    return BoundLaunch(dropout_project_kernel, BLOCK=BLOCK, RANK=padded, STAGES=STAGES[padded], num_warps=4)


def backward(
    d_h: Tensor, x: Tensor | None, d_x: Tensor | None, bits: Tensor, a: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Write d_x; return the gradients of all A in `dtype`: the sum over pieces of the rows, in fp32."""
    (count, rows, _), (height, columns) = bits.shape, a.shape
    padded = _padded(height // count)
    step = max(1, MAX_HEIGHT // padded)
    tiles = cdiv(columns, TILE.value)
    # As many programs as a multiprocessor has registers for, or an integer multiple of them.
    programs = 3 if padded * min(count, step) <= 16 else 2
    pieces = max(1, programs * multiprocessors(d_h.device) // tiles)
    piece = cdiv(cdiv(rows, pieces), BLOCK) * BLOCK
    pieces = cdiv(rows, piece)
    sums = None
    x_stride = 0
    if x is not None:
        x, x_stride = _strided(x)
        sums = d_h.new_empty(pieces, height, columns, dtype=torch.float32)
    aligned = 0 if x is None else x.data_ptr() & 15, a.data_ptr() & 15
    d_x_dtype = None if d_x is None else d_x.dtype
    for before in range(0, count, step):
        members = min(step, count - before)
        key = d_h.dtype, d_x_dtype, x is None, x_stride, columns, height, height // count, members, aligned
        _backward_launch(*key, before > 0)(
            (pieces * tiles,),
            x,
            d_x,
            bits,
            d_h,
            a,
            sums,
            x_stride,
            height,
            rows,
            columns,
            height // count,
            piece,
            before,
        )
    if sums is None:
        return None
    return (sums[0] if pieces == 1 else sums.sum(0)).to(dtype)


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    dtype: torch.dtype,
    d_x_dtype: torch.dtype | None,
    without_x: bool,
    x_stride: int,
    columns: int,
    height: int,
    rank: int,
    members: int,
    aligned: tuple[int, ...],
    adds: bool,
) -> BoundLaunch:
    """Return the launch for operands with these properties, which include all that Triton specializes on."""
    padded = _padded(rank)
    rows_of_a = padded * members
    return BoundLaunch(
        dropout_backward_kernel,
        MEMBERS=members,
        ADD=adds,
        BLOCK=BLOCK,
        RANK=padded,
        STAGES=3 if rows_of_a <= 48 else 2 if rows_of_a <= 64 else 1,
        num_warps=4 if rows_of_a <= 32 else WARPS,
    )


def _strided(x: Tensor) -> tuple[Tensor, int]:
    """Return x (N, K), copied if necessary, and the stride of its rows."""
    x, x_stride = as_rows(x)
    return (x, x_stride) if x_stride <= MAX_STRIDE else (x.contiguous(), x.shape[1])


def _random_state(x: Tensor, count: int) -> tuple[Tensor | None, int, int, int, int]:
    """Return numbers of torch's generator for `count` masks, and move it on.

    `torch.manual_seed` and the recomputation of activation checkpointing set the generator. Its seed and its
    offset are read on the host, which takes no kernel. Where that is impossible, a seed is drawn on the
    device.

    Returns:
        (seed on the device or None, the halves of the seed, a quarter of the offset for the first mask, in 31
        bits and the rest).
    """
    if x.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return x.new_empty((), dtype=torch.int64).random_(), 0, 0, 0, 0
    generator = torch.cuda.default_generators[x.device.index]
    offset = generator.get_offset()  # a multiple of 4
    generator.set_offset(offset + 4 * count)
    offset >>= 2
    return None, *_halves(generator.initial_seed()), offset & 0x7FFFFFFF, offset >> 31


@functools.lru_cache
def _halves(seed: int) -> tuple[int, int]:
    """Return the lower and the upper 32 bits, each as a signed integer."""
    low = seed & 0xFFFFFFFF
    high = seed >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


@functools.cache
def _padded(rank: int) -> int:
    """Return the rank of the tiles: a power of 2, and at least 16 for a product of tiles."""
    return max(16, triton.next_power_of_2(rank))
