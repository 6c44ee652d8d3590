"""Checks and conversions for the memory layouts that the Triton kernels require.

A kernel gets the address of a tensor. A vector, over tokens (C,) or token ids (V,), must be contiguous;
`dense` copies it if it is not. A matrix is passed with its row stride, and each row must be contiguous.
`check_rows` refuses other matrices, because a copy would be as large as the chunk.
"""

import torch
from torch import Tensor


def dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` if it is contiguous and in `dtype` (default: the dtype of `x`), else a contiguous copy in `dtype`.

    `.float()` is not sufficient: it returns an fp32 tensor unchanged, including its strides.
    """
    return (x if dtype is None else x.to(dtype)).contiguous()


def check_rows(**matrices: Tensor) -> None:
    """Raise ValueError for a matrix (C, V) whose rows are not contiguous."""
    for name, x in matrices.items():
        if x.stride(1) != 1 and x.shape[1] > 1:
            raise ValueError(
                f"{name}: expected contiguous rows (a last stride of 1), got strides {x.stride()}; call "
                f".contiguous() first."
            )


def check_written(**vectors: Tensor) -> None:
    """Raise ValueError for a non-contiguous output tensor: the result would be written to a copy and lost."""
    for name, x in vectors.items():
        if not x.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor to write to, got strides {x.stride()}; allocate one."
            )
