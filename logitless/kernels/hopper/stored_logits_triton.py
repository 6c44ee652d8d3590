"""The product with the head that stores the logits and computes the normalizers of their softmaxes, so that
the divergence kernel need not read the logits for these. See `fused_projection.store`.

Normalizers are computed from the logits as they are stored, in bf16, because the divergence is computed from
those. The epilogue stores the largest logit and the sum of exponentials per row and tile, 8 bytes for each
softmax; `normalizers_kernel` merges them. Exponentials are powers of two relative to a shift, the largest
scaled logit of the tile rounded down to an integer: then the sums of two tiles differ by a power of two
exactly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.divergence_triton import LOG2E, bias_vector, head_at_one
from logitless.kernels.head.exponentials_triton import exp2
from logitless.kernels.head.softmaxes import Normalizers, Softmaxes
from logitless.kernels.hopper.product_tiles_triton import (
    BLOCK_N,
    LAUNCH,
    TILE,
    aligned,
    described,
    group_of,
    halves_of_product,
    place_of_tile,
    programs_of,
)
from logitless.kernels.launch import OF_CHUNKS, cached_launch

ROWS, TILES = 4, 128  # per program and turn of `normalizers_kernel`
PARTIALS = 2  # partial results per row, tile and softmax
NORMALIZERS = 3  # shift, log2 sum and tile of a softmax


@triton.jit
def exact_power(shift, to):
    """2^(shift - to) of integers; 0 for a shift of -inf, that of a sum without a finite logit."""
    return tl.where(shift == -float("inf"), 0.0, tl.exp2(shift - to))


@triton.jit
def partial_softmax(z, rate):
    """(largest logit, sum of 2^(rate z - shift)) of each row, with shift = floor(rate * the largest)."""
    top = tl.max(z, 1)
    shift = tl.floor(rate * top)
    finite = tl.where(shift == -float("inf"), 0.0, shift)  # -inf minus -inf would be NaN
    return top, tl.sum(exp2(tl.fma(z, rate, -finite[:, None])), 1)


@triton.jit
def merged_halves(top, total, top_r, total_r, rate):
    """`partial_softmax` of a tile from those of its halves."""
    shift, shift_r = tl.floor(rate * top), tl.floor(rate * top_r)
    highest = tl.maximum(shift, shift_r)
    total = total * exact_power(shift, highest) + total_r * exact_power(shift_r, highest)
    return tl.maximum(top, top_r), total


@triton.jit
def store_half(acc, n0, operands, BN: tl.constexpr, PLAIN: tl.constexpr, SECOND: tl.constexpr):
    """Store the logits of the columns from n0 on; `partial_softmax` of the first softmax, and with SECOND of
    the second one."""
    logits, bias_ptr, m0, V, common, scale, softcap, rate, rate_1 = operands
    cols = (n0 + tl.arange(0, BN))[None, :]
    x = acc.to(logits.dtype)
    logits.store([m0, n0], x)
    if PLAIN:
        z = x.to(tl.float32)
    else:
        here = cols < (V if SECOND else common)
        z, slope = head_at_one(x, bias_ptr, cols, here, scale, softcap, False)
    z_1 = z
    if n0 + BN > common:
        z = tl.where(cols < common, z, -float("inf"))
    top, total = partial_softmax(z, rate)
    top_1, total_1 = top, total
    if SECOND:
        if n0 + BN > V:
            z_1 = tl.where(cols < V, z_1, -float("inf"))
        top_1, total_1 = partial_softmax(z_1, rate_1)
    return top, total, top_1, total_1


@cached_launch
@triton.jit(**OF_CHUNKS)
def logits_kernel(
    x,
    w,
    logits,
    bias_ptr,
    partials_ptr,
    partial_stride,
    C,
    V,
    H,
    common,
    scale,
    softcap,
    cold,
    PLAIN: tl.constexpr,
    SECOND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Store the logits and the partial results of every tile: those of the softmax at the temperature over
    the first `common` columns, and with SECOND those of the softmax at temperature 1 over all columns."""
    row_tiles, col_tiles = tl.cdiv(C, BM), tl.cdiv(V, BN)
    # As in `divergence_kernel`, whose exponentials must have the same factors.
    rate_1 = (scale if PLAIN else 1.0) * LOG2E
    rate = rate_1 * cold
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, flatten=True):
        row, column = place_of_tile(tile, row_tiles, col_tiles, GROUP)
        m0, n0 = row * BM, column * BN
        rows = m0 + tl.arange(0, BM)
        left, right = halves_of_product(x, w, m0, n0, H, BM, BN, BK)
        operands = (logits, bias_ptr, m0, V, common, scale, softcap, rate, rate_1)
        top, total, top_1, total_1 = store_half(left, n0, operands, BN // 2, PLAIN, SECOND)
        top_r, total_r, top_1r, total_1r = store_half(right, n0 + BN // 2, operands, BN // 2, PLAIN, SECOND)
        at = partials_ptr + column.to(tl.int64) * C + rows
        top, total = merged_halves(top, total, top_r, total_r, rate)
        tl.store(at, top, mask=rows < C)
        tl.store(at + partial_stride, total, mask=rows < C)
        if SECOND:
            top_1, total_1 = merged_halves(top_1, total_1, top_1r, total_1r, rate_1)
            tl.store(at + 2 * partial_stride, top_1, mask=rows < C)
            tl.store(at + 3 * partial_stride, total_1, mask=rows < C)


@cached_launch
@triton.jit(**OF_CHUNKS)
def normalizers_kernel(
    partials_ptr,
    normalizers_ptr,
    partial_stride,
    C,
    tiles,
    scale,
    cold,
    PLAIN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Merge the partial results of each row: the shift, log2 of the sum of 2^(rate z - shift), and the first
    tile with the largest logit. The second axis of the grid is the softmax."""
    second = tl.program_id(1)
    rate_1 = (scale if PLAIN else 1.0) * LOG2E
    rate = tl.where(second == 0, rate_1 * cold, rate_1)
    partials_ptr += second.to(tl.int64) * 2 * partial_stride
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < C
    best = tl.full([TILES, ROWS], -float("inf"), tl.float32)
    first = tl.zeros([TILES, ROWS], tl.int32)
    lane = tl.arange(0, TILES)
    for start in range(0, tiles, TILES):
        tile = start + lane
        at = partials_ptr + tile[:, None].to(tl.int64) * C + rows[None, :]
        tops = tl.load(at, mask=(tile < tiles)[:, None] & here[None, :], other=-float("inf"))
        better = tops > best
        best = tl.where(better, tops, best)
        first = tl.where(better, tile[:, None], first)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top[None, :], first, 2147483647), 0)
    shift = tl.floor(rate * top)
    total = tl.zeros([TILES, ROWS], tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + lane
        at = partials_ptr + tile[:, None].to(tl.int64) * C + rows[None, :]
        mask = (tile < tiles)[:, None] & here[None, :]
        tops = tl.load(at, mask=mask, other=-float("inf"))
        sums = tl.load(at + partial_stride, mask=mask, other=0.0)
        total += sums * exact_power(tl.floor(rate * tops), shift[None, :])
    at = normalizers_ptr + second * 3 * C + rows
    tl.store(at, shift, mask=here)
    tl.store(at + C, tl.log2(tl.sum(total, 0)), mask=here)
    tl.store(at + 2 * C, first.to(tl.float32), mask=here)


def normalizer_bytes(V: int, softmaxes: int) -> int:
    return 4 * softmaxes * (PARTIALS * -(-V // BLOCK_N) + NORMALIZERS)


def store(features: Tensor, weight: Tensor, logits: Tensor, softmaxes: Softmaxes) -> Normalizers:
    C, H = features.shape
    V = weight.shape[0]
    head = softmaxes.head
    count = softmaxes.count
    partials = features.new_empty((PARTIALS * count, -(-V // BLOCK_N), C), dtype=torch.float32)
    normalizers = features.new_empty((count, NORMALIZERS, C), dtype=torch.float32)
    cold = 1.0 / head.temperature
    programs = programs_of(features)
    logits_kernel[(programs,)](
        *described(aligned(features), weight, logits),
        bias_vector(softmaxes.bias, V, features.device, plain=softmaxes.plain),
        partials,
        partials.stride(0),
        *(C, V, H, softmaxes.common),
        *(head.logit_scale, head.softcap or 0.0, cold),
        PLAIN=softmaxes.plain,
        SECOND=count > 1,
        **TILE,
        **LAUNCH,
        GROUP=group_of(features),
        PROGRAMS=programs,
    )
    normalizers_kernel[(-(-C // ROWS), count)](
        partials,
        normalizers,
        partials.stride(0),
        C,
        partials.shape[1],
        *(head.logit_scale, cold),
        PLAIN=softmaxes.plain,
        ROWS=ROWS,
        TILES=TILES,
        num_warps=4,
    )
    return Normalizers(normalizers, BLOCK_N)
