"""What a call's targets say before anything is projected: which are supervised, and which are no ids."""

import torch
from torch import Tensor

from logitless.kernels.cross_entropy import uses_triton


def marked(
    targets: Tensor,  # (N,) integers
    V: int | Tensor,  # a () int64 tensor where the host does not know yet
    ignore_index: int,
    others: Tensor | None = None,  # (m, N) bool
) -> Tensor:
    """(2 + m, N) bool: supervised; supervised and outside [0, V); supervised and marked by the others."""
    if uses_triton(targets.device, torch.float32):
        from logitless.kernels import targets_triton

        return targets_triton.marked(targets, V, ignore_index, others)
    supervised = targets != ignore_index
    own = torch.stack((supervised, supervised & ((targets < 0) | (targets >= V))))
    return own if others is None else torch.cat((own, others & supervised))
