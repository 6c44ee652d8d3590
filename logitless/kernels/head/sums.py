"""Sums of vectors of one length, in one launch: what a loss and its metrics are made of."""

from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.kernels import uses_triton


def sums(vectors: Sequence[Tensor]) -> Tensor:
    """(m,) the sums of m vectors (n,) of one dtype, in that dtype; the same bits in every call.

    Not inside a compiled function or under `torch.func`, whose tensors no kernel can read.
    """
    if all(_kernel_takes(x) for x in vectors):
        from logitless.kernels.head import sums_triton

        return sums_triton.sums(vectors)
    return vectors[0].sum().view(1) if len(vectors) == 1 else torch.stack(list(vectors)).sum(1)


def _kernel_takes(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and uses_triton(x.device, x.dtype)
