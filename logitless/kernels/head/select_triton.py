"""Triton kernels of `select.py`.

* `tile_max_kernel` reads each logit once and stores the maximum of every TILE columns. If the pass also
  computes statistics, `row_kernel` stores these maxima instead.
* `select_kernel` selects the k tiles with the largest maxima, and the first tiles among equal maxima. These
  tiles contain the k largest logits: for any logit in another tile, the maxima of the k tiles are larger, or
  equal with a lower id. Therefore, for k = 64, only 4,096 of 151,936 logits are read a second time.

The tiles and then the logits are selected by a threshold that exactly k lanes reach. It is found by bisection
on order-preserving integers: each step counts lanes in registers, without sorting. Only the k results are
sorted, by counting for each of them the results that precede it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import TILE
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, dense

# The maxima of all tiles of a row, and the logits of k tiles, are held in registers: 4,096 numbers each for
# 64 ids and a vocabulary of 262,144.
BLOCK, WARPS, SELECT_WARPS = 2048, 4, 8
# Smaller than the integer of every logit.
OUT_OF_RANGE_COLUMN = tl.constexpr(-2147483648)


@triton.jit
def compared(x, bias_ptr, cols, mask, sign, HAS_BIAS: tl.constexpr):
    """Sort keys of products, in the order of the logits as in `select.py`. NaN is +inf."""
    x = x.to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0)
    return tl.where(x == x, x * sign, float("inf"))


@triton.jit
def ordered(z):
    """Order-preserving map from fp32 to int32. -0 equals 0, and NaN is +inf."""
    z = tl.where(z == z, z, float("inf"))
    z = tl.where(z == 0.0, 0.0, z)
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 2147483647, bits)


@triton.jit
def first_largest(key, k, low):
    """Select the k largest lanes, and the first lanes among equal ones. At least k lanes must be >= `low`.

    Returns (n,) the index of each selected lane in the selected lanes, in lane order; (n,) whether a lane is
    selected; and a threshold: the smallest selected value, or a value between it and all other values.
    """
    reached = tl.sum((key >= low).to(tl.int32), 0)
    high = tl.max(key, 0)
    while (reached != k) & (low < high):
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up; their sum could overflow
        count = tl.sum((key >= middle).to(tl.int32), 0)
        enough = count >= k
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle - 1)
    above = key > low
    equal = key == low
    missing = k - tl.sum(above.to(tl.int32), 0)
    counts = tl.cumsum(above.to(tl.int32) | (equal.to(tl.int32) << 16), 0)
    equals = counts >> 16
    chosen = above | (equal & (equals <= missing))
    return (counts & 65535) + tl.minimum(equals, missing) - 1, chosen, low


@cached_launch
@triton.jit
def tile_max_kernel(
    logits_ptr,
    bias_ptr,
    maxima_ptr,
    logits_stride,
    maxima_stride,
    V,
    sign,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    maxima_ptr += row * maxima_stride
    tile = tl.arange(0, BLOCK // TILE)
    for start in range(0, V, BLOCK):
        cols = start + tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        mask = cols < V
        x = tl.load(logits_ptr + cols, mask=mask, other=0.0)
        z = compared(x, bias_ptr, cols, mask, sign, HAS_BIAS)
        top = tl.max(tl.where(mask, z, -float("inf")), 1)
        number = start // TILE + tile
        tl.store(maxima_ptr + number, top, mask=number * TILE < V)


@cached_launch
@triton.jit(**OF_CHUNKS)
def select_kernel(
    logits_ptr,
    bias_ptr,
    maxima_ptr,
    scratch_ptr,
    ids_ptr,
    logits_stride,
    maxima_stride,
    V,
    k,
    sign,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    K: tl.constexpr,
):
    """`scratch` is (C, 2 K) int32. TILES and K are powers of two, with TILES >= K."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    maxima_ptr += row * maxima_stride
    scratch_ptr += row * 2 * K
    ids_ptr += row * k
    tile = tl.arange(0, TILES)
    exists = tile * TILE < V
    maxima = tl.load(maxima_ptr + tile, mask=exists, other=0.0)
    key = tl.where(exists, ordered(maxima), OUT_OF_RANGE_COLUMN)
    # If there are fewer than k tiles, the remaining lanes select tiles outside the vocabulary.
    low = tl.where(V > (k - 1) * TILE, tl.min(tl.where(exists, key, 2147483647), 0), OUT_OF_RANGE_COLUMN)
    place, chosen, low = first_largest(key, k, low)
    tl.store(scratch_ptr + place, tile, mask=chosen)
    tl.debug_barrier()

    slot = tl.arange(0, K)
    tiles = tl.load(scratch_ptr + slot, mask=slot < k, other=TILES)
    cols = tl.reshape(tiles[:, None] * TILE + tl.arange(0, TILE)[None, :], [K * TILE])
    mask = cols < V
    x = tl.load(logits_ptr + cols, mask=mask, other=0.0)
    z = compared(x, bias_ptr, cols, mask, sign, HAS_BIAS)
    key = tl.where(mask, ordered(z), OUT_OF_RANGE_COLUMN)
    place, chosen, low = first_largest(key, k, low)
    # All threads must have read the tiles.
    tl.debug_barrier()
    tl.store(scratch_ptr + place, key, mask=chosen)
    tl.store(scratch_ptr + K + place, cols, mask=chosen)
    tl.debug_barrier()

    mine = tl.load(scratch_ptr + slot, mask=slot < k, other=OUT_OF_RANGE_COLUMN)
    columns = tl.load(scratch_ptr + K + slot, mask=slot < k, other=0)
    # Slots are in ascending order of the ids.
    earlier = (mine[None, :] == mine[:, None]) & (slot[None, :] < slot[:, None])
    before = ((mine[None, :] > mine[:, None]) | earlier) & (slot < k)[None, :]
    tl.store(ids_ptr + tl.sum(before.to(tl.int32), 1), columns.to(tl.int64), mask=slot < k)


def new_maxima(logits: Tensor) -> Tensor:
    """Allocate a buffer (C, tiles) for the maximum of every TILE columns, for `row_kernel` or `select`."""
    return logits.new_empty((logits.shape[0], triton.cdiv(logits.shape[1], TILE)), dtype=torch.float32)


def select(
    logits: Tensor, k: int, *, sign: float, bias: Tensor | None, maxima: Tensor | None = None
) -> Tensor:
    check_rows(logits=logits)
    C, V = logits.shape
    K = max(16, triton.next_power_of_2(k))
    has_maxima = maxima is not None
    maxima = maxima if has_maxima else new_maxima(logits)
    tiles = maxima.shape[1]
    scratch = torch.empty((C, 2 * K), dtype=torch.int32, device=logits.device)
    ids = torch.empty((C, k), dtype=torch.int64, device=logits.device)
    bias_or_nothing = maxima if bias is None else dense(bias, torch.float32)
    strides = (logits.stride(0), tiles, V)
    flags = {"HAS_BIAS": bias is not None, "TILE": TILE}
    if not has_maxima:
        options = {"BLOCK": BLOCK, "num_warps": WARPS}
        tile_max_kernel[(C,)](logits, bias_or_nothing, maxima, *strides, sign, **flags, **options)
    select_kernel[(C,)](
        logits,
        bias_or_nothing,
        maxima,
        scratch,
        ids,
        *strides,
        k,
        sign,
        **flags,
        TILES=max(K, triton.next_power_of_2(tiles)),
        K=K,
        num_warps=SELECT_WARPS,
    )
    return ids
