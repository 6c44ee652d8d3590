"""What a launcher makes sure of before it hands a tensor to a Triton kernel, which sees an address and no
strides.

A vector, of tokens `[C]` or of token ids `[V]`, is indexed as if its numbers lay side by side; `dense` makes
that so. A matrix comes with the stride of its rows, and each of its rows must be in one piece; `check_rows`
makes sure, as a copy would be as large as the chunk.
"""

import torch
from torch import Tensor


def dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` itself where its numbers lie side by side in `dtype` (its own without one), else a copy for which
    that holds.

    `.float()` alone is not enough: of a tensor in fp32 already it keeps the strides.
    """
    return (x if dtype is None else x.to(dtype)).contiguous()


def check_rows(**matrices: Tensor) -> None:
    """Refuse a matrix `[C, V]` whose rows are not in one piece."""
    for name, x in matrices.items():
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise ValueError(
                f"{name}: expected rows in one piece (a last stride of 1), got strides {x.stride()}; call "
                f".contiguous() first."
            )


def check_written(**vectors: Tensor) -> None:
    """Refuse a tensor with gaps that a kernel is to write: a copy would keep what belongs into it."""
    for name, x in vectors.items():
        if not x.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor to write to, got strides {x.stride()}; allocate one."
            )
