"""Triton kernels of `select.py`.

* `tile_max_kernel` reads each logit once and keeps the largest of every TILE columns.
* `select_kernel` takes the k tiles whose maxima are the largest, of equal maxima the first ones. They hold
  the k largest logits: one outside of them would have k others in front of it, a maximum of each of these
  tiles, that is larger, or equal with a lower id. So of 151,936 logits, k = 64 needs 8,192 a second time.

Both selections look for the k-th largest number, bit by bit, with numbers as integers of the same order: 32
counts in registers, no sort. Only the k that are left are put in order, each by counting those before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import held
from logitless.kernels.layout import check_rows, dense

# A row of tiles, and the candidates of k tiles, are in registers: up to 2,048 and 8,192 numbers for 64 ids
# and a vocabulary of 262,144.
TILE, SMALL_TILE, BLOCK, WARPS, SELECT_WARPS = 128, 64, 2048, 4, 8
# Below the integer of every number.
NOWHERE = tl.constexpr(-2147483648)


@triton.jit
def ordered(z):
    """fp32 -> int32 of the same order; -0 is 0, and a NaN is infinite."""
    z = tl.where(z == z, z, float("inf"))
    z = tl.where(z == 0.0, 0.0, z)
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 2147483647, bits)


@triton.jit
def compared(x, bias_ptr, cols, mask, sign, HAS_BIAS: tl.constexpr):
    x = x.to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0)
    return x * sign


@triton.jit
def first_largest(key, k):
    """Which of the lanes (n,) are the k largest, of equal ones the first."""
    least = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, NOWHERE)
    step = 1073741824
    for _ in range(31):
        higher = least + step
        least = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= k, higher, least)
        step = step // 2
    above, equal = (key > least).to(tl.int32), (key == least).to(tl.int32)
    missing = k - tl.sum(above, 0)
    return (above + equal * (tl.cumsum(equal, 0) <= missing).to(tl.int32)) > 0


@held
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
        z = tl.where(z == z, z, float("inf"))
        top = tl.max(tl.where(mask, z, -float("inf")), 1)
        number = start // TILE + tile
        tl.store(maxima_ptr + number, top, mask=number * TILE < V)


@held
@triton.jit
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
    """`scratch` (C, K) int64. TILES and K are powers of two, TILES at least K."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    maxima_ptr += row * maxima_stride
    scratch_ptr += row * K
    ids_ptr += row * k
    tile = tl.arange(0, TILES)
    exists = tile * TILE < V
    maxima = tl.load(maxima_ptr + tile, mask=exists, other=0.0)
    chosen = first_largest(tl.where(exists, ordered(maxima), NOWHERE), k)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(scratch_ptr + place, tile.to(tl.int64), mask=chosen)
    tl.debug_barrier()

    slot = tl.arange(0, K)
    tiles = tl.load(scratch_ptr + slot, mask=slot < k, other=TILES)
    cols = tl.reshape(tiles[:, None] * TILE + tl.arange(0, TILE)[None, :], [K * TILE])
    mask = cols < V
    x = tl.load(logits_ptr + cols, mask=mask, other=0.0)
    z = compared(x, bias_ptr, cols, mask, sign, HAS_BIAS)
    key = tl.where(mask, ordered(z), NOWHERE)
    chosen = first_largest(key, k)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    # Everybody has read the tiles.
    tl.debug_barrier()
    # Both numbers in one: the larger the logit, and among equal ones the lower the id, the larger.
    packed = (key.to(tl.int64) << 32) | (2147483647 - cols)
    tl.store(scratch_ptr + place, packed, mask=chosen)
    tl.debug_barrier()

    mine = tl.load(scratch_ptr + slot, mask=slot < k, other=0)
    before = (mine[None, :] > mine[:, None]) & (slot < k)[None, :]
    rank = tl.sum(before.to(tl.int32), 1)
    tl.store(ids_ptr + rank, 2147483647 - (mine & 2147483647), mask=slot < k)


def select(logits: Tensor, k: int, *, sign: float, bias: Tensor | None) -> Tensor:
    check_rows(logits=logits)
    C, V = logits.shape
    K = max(16, triton.next_power_of_2(k))
    tile = TILE if K <= 64 else SMALL_TILE
    tiles = triton.cdiv(V, tile)
    maxima = torch.empty((C, tiles), dtype=torch.float32, device=logits.device)
    scratch = torch.empty((C, K), dtype=torch.int64, device=logits.device)
    ids = torch.empty((C, k), dtype=torch.int64, device=logits.device)
    bias_or_nothing = maxima if bias is None else dense(bias, torch.float32)
    strides, flags = (logits.stride(0), tiles, V), {"HAS_BIAS": bias is not None, "TILE": tile}
    tile_max_kernel[(C,)](
        logits, bias_or_nothing, maxima, *strides, sign, **flags, BLOCK=BLOCK, num_warps=WARPS
    )
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
