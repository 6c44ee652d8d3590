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

from logitless.kernels.cross_entropy_triton import _vocabulary_arguments, head_logits
from logitless.kernels.layout import check_rows

TILE, TILES_PER_BLOCK, WARPS = 128, 16, 4
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


@triton.jit
def tile_max_kernel(
    logits_ptr,
    bias_ptr,
    maxima_ptr,
    logits_stride,
    maxima_stride,
    V,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PER_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    maxima_ptr += row * maxima_stride
    tile = tl.arange(0, TILES_PER_BLOCK)
    for start in range(0, V, TILE * TILES_PER_BLOCK):
        cols = start + tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        mask = cols < V
        x = tl.load(logits_ptr + cols, mask=mask, other=0.0)
        z, slope = head_logits(x, bias_ptr, cols, mask, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
        z = tl.where(z == z, z, float("inf"))
        top = tl.max(tl.where(mask, z, -float("inf")), 1)
        number = start // TILE + tile
        tl.store(maxima_ptr + number, top, mask=number * TILE < V)


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
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
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
    z, slope = head_logits(x, bias_ptr, cols, mask, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
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


def select(logits: Tensor, k: int, *, head, bias: Tensor | None) -> Tensor:
    check_rows(logits=logits)
    C, V = logits.shape
    K = max(16, triton.next_power_of_2(k))
    tiles = triton.cdiv(V, TILE)
    maxima = torch.empty((C, tiles), dtype=torch.float32, device=logits.device)
    pointers, scalars, flags = _vocabulary_arguments(head, bias, None, maxima)
    del flags["HAS_WEIGHTS"]
    tile_max_kernel[(C,)](
        logits,
        pointers[0],
        maxima,
        logits.stride(0),
        tiles,
        V,
        *scalars,
        **flags,
        TILE=TILE,
        TILES_PER_BLOCK=TILES_PER_BLOCK,
        num_warps=WARPS,
    )
    scratch = torch.empty((C, K), dtype=torch.int64, device=logits.device)
    ids = torch.empty((C, k), dtype=torch.int64, device=logits.device)
    select_kernel[(C,)](
        logits,
        pointers[0],
        maxima,
        scratch,
        ids,
        logits.stride(0),
        tiles,
        V,
        k,
        *scalars,
        **flags,
        TILE=TILE,
        TILES=max(K, triton.next_power_of_2(tiles)),
        K=K,
        num_warps=WARPS,
    )
    return ids
