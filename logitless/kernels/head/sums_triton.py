"""Triton kernel of `sums.py`, with one program per vector."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, cached_launch

BLOCK, WARPS = 2048, 8
# Maximum number of vectors per launch.
MOST = 8


@triton.jit
def sum_one(x_ptr, sums_ptr, number, rows, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < rows, other=0.0)
    tl.store(sums_ptr + number, tl.sum(total, 0))


@cached_launch
@triton.jit(**OF_CHUNKS)
def sums_kernel(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr, sums_ptr, rows, BLOCK: tl.constexpr
):
    number = tl.program_id(0)
    if number == 0:
        sum_one(x0_ptr, sums_ptr, 0, rows, BLOCK)
    elif number == 1:
        sum_one(x1_ptr, sums_ptr, 1, rows, BLOCK)
    elif number == 2:
        sum_one(x2_ptr, sums_ptr, 2, rows, BLOCK)
    elif number == 3:
        sum_one(x3_ptr, sums_ptr, 3, rows, BLOCK)
    elif number == 4:
        sum_one(x4_ptr, sums_ptr, 4, rows, BLOCK)
    elif number == 5:
        sum_one(x5_ptr, sums_ptr, 5, rows, BLOCK)
    elif number == 6:
        sum_one(x6_ptr, sums_ptr, 6, rows, BLOCK)
    else:
        sum_one(x7_ptr, sums_ptr, 7, rows, BLOCK)


def sums(vectors: Sequence[Tensor]) -> Tensor:
    totals = vectors[0].new_empty(len(vectors))
    for start in range(0, len(vectors), MOST):
        few = vectors[start : start + MOST]
        operands = *few, *[few[0]] * (MOST - len(few))
        sums_kernel[(len(few),)](*operands, totals[start:], few[0].shape[0], BLOCK=BLOCK, num_warps=WARPS)
    return totals
