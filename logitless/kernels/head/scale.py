"""Multiply matrices by a factor per row or by one factor, in fp32, rounded once, in one pass.

PyTorch's own mixed-dtype multiplication reaches a quarter of an H200's memory bandwidth (2.5 ms for a
[128,256, 4,096] fp32 d_weight that is cast to bf16, 0.8 ms here). Two matrices share one launch: the two
gradients of a call, or the two [C, H] matrices of a chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.kernels import uses_triton

# (matrix, result), which may be the same tensor.
Pair = tuple[Tensor, Tensor]


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """`out[n, m] = x[n, m] * factor`, with `factor` 0-d or `[n]`; `out` may be `x`."""
    scale_all(((x, out),), (factor,))
    return out


def scale_all(pairs: Sequence[Pair], factors: Sequence[Tensor]) -> None:
    """Multiply each matrix by all factors.

    Args:
        pairs: (x, out) each, (n, m), with rows in one piece; `out` may be `x`.
        factors: one or two; 0-d, or (n,) with pairs of equally many rows.
    """
    if not pairs:
        return
    if _kernels_take(pairs):
        from logitless.kernels.head import scale_triton

        scale_triton.scale_all(pairs, factors)
        return
    factor = factors[0] if len(factors) == 1 else factors[0] * factors[1]
    for x, out in pairs:
        # At least one dimension: a 0-d factor would be rounded to the dtype of x first.
        torch.mul(x, factor.reshape(-1, 1), out=out)


def _kernels_take(pairs: Sequence[Pair]) -> bool:
    return all(uses_triton(x.device, x.dtype) and x.stride(-1) == out.stride(-1) == 1 for x, out in pairs)
