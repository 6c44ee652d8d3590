"""The ids of the k largest logits of each row, in descending order; among equal logits, the lowest ids first.

`torch.topk` does not guarantee the order of equal values, and rounded logits are often equal. The softcap is
monotonic. Therefore products are compared before the softcap, because tanh may round different values to
equal values. The Triton kernels (`select_triton.py`) read a row once. The twin processes a few rows at a
time.
"""

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import twin_bytes, twin_rows
from logitless.kernels.head.transform import LogitTransform

# Largest k for which `select_kernel` can be used: it holds the logits of k tiles in registers. For larger k
# the PyTorch implementation runs.
MOST_IDS = 128
# Largest vocabulary for which `select_kernel` can be used: it holds the maximum of every tile of a row in
# registers, and packs two tile counts into one int32. For larger vocabularies the PyTorch implementation
# runs.
MOST_COLUMNS = 2**20


def _runs(device: torch.device, dtype: torch.dtype, V: int, k: int) -> bool:
    return k <= MOST_IDS and V <= MOST_COLUMNS and uses_triton(device, dtype)


def new_maxima(logits: Tensor, k: int) -> Tensor | None:
    """Allocate a buffer for tile maxima, which `token_statistics` stores for `select`; None for the twin."""
    if not _runs(logits.device, logits.dtype, logits.shape[1], k):
        return None
    from logitless.kernels.head import select_triton

    return select_triton.new_maxima(logits)


def select(
    logits: Tensor,  # (C, V) products with the head
    k: int,  # at most V
    *,
    transform: LogitTransform,
    bias: Tensor | None = None,  # (V,)
    maxima: Tensor | None = None,  # from `new_maxima`, written by `token_statistics`
) -> Tensor:
    """(C, k) int64 ids of the largest logits after the head's transform. A NaN counts as infinite."""
    if _runs(logits.device, logits.dtype, logits.shape[1], k) and logits.numel():
        from logitless.kernels.head import select_triton

        return select_triton.select(logits, k, sign=_sign(transform), bias=bias, maxima=maxima)
    ids = torch.empty((logits.shape[0], k), dtype=torch.int64, device=logits.device)
    step = twin_rows(logits)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        ids[rows] = _select_twin(compared(logits[rows], transform, bias), k)
    return ids


def _sign(transform: LogitTransform) -> float:
    return 1.0 if transform.logit_scale > 0 else -1.0


def compared(x: Tensor, transform: LogitTransform, bias: Tensor | None) -> Tensor:
    """Sort keys of the products x, in the order of the logits."""
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    z = z if bias is None else z + bias.to(z.dtype)
    z = z * _sign(transform)
    return torch.where(z.isnan(), torch.inf, z)


def row_bytes(V: int, k: int) -> int:
    """Bytes per row in addition to its logits: the kernel's tile maxima and the ids."""
    return 4 * (V // 64 + 1) + 24 * k


def fixed_bytes(device: torch.device, dtype: torch.dtype, V: int, k: int, budget: int) -> int:
    """Bytes of the twin's temporaries for a chunk within the budget."""
    if _runs(device, dtype, V, k):
        return 0
    # Twice as many bytes as the other twins, on every device.
    return 2 * twin_bytes(torch.device("meta"), dtype, V, budget)


def _select_twin(z: Tensor, k: int) -> Tensor:
    least = z.topk(k, -1).values[:, -1:]
    above = z > least
    equal = z == least
    missing = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= missing))
    ids = torch.nonzero_static(chosen, size=z.shape[0] * k)[:, 1].view(-1, k)
    order = z.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)
