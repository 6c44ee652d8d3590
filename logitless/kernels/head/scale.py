"""Multiply matrices by one factor or by a factor per row, in fp32, in one pass with one rounding.

A factor of inf or NaN would turn 0 into NaN. Gradients therefore come with `supervised`: the rows of ignored
tokens stay 0 for every factor.

PyTorch's mixed-dtype multiplication reaches a quarter of an H200's memory bandwidth: it takes 2.5 ms for an
fp32 d_weight (128,256, 4,096) that is cast to bf16, compared with 0.8 ms here. Two matrices share one launch:
the two gradients of a call, or the two (C, H) matrices of a chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.kernels import uses_triton

# (matrix, result). Both may be the same tensor.
Pair = tuple[Tensor, Tensor]


def scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """`out[n, m] = x[n, m] * factor`, with `factor` 0-d or `[n]`; `out` may be `x`."""
    scale_all(((x, out),), (factor,))
    return out


def scale_all(
    pairs: Sequence[Pair], factors: Sequence[Tensor], supervised: Sequence[Tensor | None] = ()
) -> None:
    """Multiply each matrix by all factors.

    Args:
        pairs: pairs (x, out) of matrices (n, m) with contiguous rows. `out` may be `x`.
        factors: one or two factors: 0-d, or (n,) if all matrices have n rows.
        supervised: with a single 0-d factor, one entry for each matrix. (n,) bool: the other rows, which are
            0 in x, are 0 in `out` for every factor. 0-d int64, the number of supervised tokens: if it is 0,
            all rows are 0 in `out`. None: no row is forced to 0.
    """
    if not pairs:
        return
    if _kernels_take(pairs, contiguous=any([kept is not None for kept in supervised])):
        from logitless.kernels.head import scale_triton

        scale_triton.scale_all(pairs, factors, supervised or [None] * len(pairs))
        return
    factor = factors[0] if len(factors) == 1 else factors[0] * factors[1]
    for (x, out), kept in zip(pairs, supervised or [None] * len(pairs), strict=True):
        # The factor needs at least one dimension: a 0-d factor would first be rounded to the dtype of x.
        torch.mul(x, guarded(factor, kept).reshape(-1, 1), out=out)


def guarded(factor: Tensor, supervised: Tensor | None) -> Tensor:
    """The factor, 0 where `supervised` is 0: () or (n,)."""
    return factor if supervised is None else torch.where(supervised != 0, factor, 0.0)


def _kernels_take(pairs: Sequence[Pair], *, contiguous: bool) -> bool:
    for x, out in pairs:
        if not (uses_triton(x.device, x.dtype) and x.stride(-1) == out.stride(-1) == 1):
            return False
        if contiguous and not (x.is_contiguous() and out.is_contiguous()):
            return False
    return True
