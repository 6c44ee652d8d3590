"""Tiles of a product with the head, for kernels with an epilogue.

Operands are tensor descriptors, and each multiprocessor runs one persistent program.
"""

from dataclasses import MISSING, fields

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from logitless.kernels.hopper import BLOCK_N
from logitless.kernels.operands import multiprocessors

# With BLOCK_N, the fastest of a dozen configurations on an H200, for heads with H from 1,024 to 4,096. One of
# the others: tiles of 128 x 128 with two programs per multiprocessor, so that the epilogue of one program
# overlaps the products of the other.
BLOCK_M, BLOCK_K, WARPS, STAGES = 128, 64, 8, 3
# Bytes of x per group of row tiles. They remain in the L2 cache while the group is multiplied by the whole
# head. The rest of an H200's L2 cache of 60 MB is for the head and the gradient.
GROUP_BYTES = 2**24


@triton.jit
def place_of_tile(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Return the (row, column) of a tile, in units of tiles.

    The row index varies fastest, within groups of GROUP row tiles. A group is multiplied by all column tiles
    before the next group begins, so that its rows of x remain in the L2 cache.
    """
    first = tile // (GROUP * col_tiles) * GROUP
    rows = tl.minimum(row_tiles - first, GROUP)
    inside = tile - first * col_tiles
    return first + inside % rows, inside // rows


@triton.jit
def halves_of_product(x, w, m0, n0, H, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return the left and the right half of a tile (BM, BN) of the product, in fp32.

    The epilogue processes them sequentially, because the registers cannot hold two copies of a whole tile.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(H, BK)):
        acc = tl.dot(x.load([m0, step * BK]), w.load([n0, step * BK]).T, acc)
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


def programs_of(x: Tensor) -> int:
    """Number of programs of a launch: one per multiprocessor."""
    return multiprocessors(x.device)


def aligned(x: Tensor) -> Tensor:
    """Return `x`, copied unless its rows start at multiples of 16 bytes, as tensor descriptors require."""
    fits = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def described(features: Tensor, weight: Tensor, gradient: Tensor | None) -> list[TensorDescriptor]:
    """Create tensor descriptors of the operands on the host, so that kernels do not allocate."""
    pairs = [(features, [BLOCK_M, BLOCK_K]), (weight, [BLOCK_N, BLOCK_K])]
    # If no gradient is stored, the weight is a placeholder.
    pairs.append((weight if gradient is None else gradient, [BLOCK_M, BLOCK_N // 2]))
    return [_descriptor(x, block) for x, block in pairs]


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """`TensorDescriptor(x, x.shape, x.stride(), block)`, without its checks: callers pass aligned rows."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(DEFAULTS, base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=block)
    return made


def group_of(features: Tensor) -> int:
    """Row tiles per group."""
    return max(1, GROUP_BYTES // (BLOCK_M * features.shape[1] * features.itemsize))


# The fields of a descriptor that have defaults: Triton's versions have different ones.
DEFAULTS = {x.name: x.default for x in fields(TensorDescriptor) if x.default is not MISSING}
TILE = {"BM": BLOCK_M, "BN": BLOCK_N, "BK": BLOCK_K}
LAUNCH = {"num_warps": WARPS, "num_stages": STAGES}
