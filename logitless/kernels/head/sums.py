"""Sums of several vectors of the same length in one launch, for a loss and its metrics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.kernels import uses_triton


def sums(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sums (m,) of m vectors (n,) of one dtype, in this dtype. Deterministic.

    Cannot be used inside a compiled function or under `torch.func`, whose tensors a kernel cannot read.
    """
    if all(_kernel_takes(x) for x in vectors):
        from logitless.kernels.head import sums_triton

        return sums_triton.sums(vectors)
    return vectors[0].sum().view(1) if len(vectors) == 1 else torch.stack(list(vectors)).sum(1)


def _kernel_takes(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and uses_triton(x.device, x.dtype)
