"""The normalizer of a mean whose tokens are spread over several processes."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


def global_num_items(
    items: float | Tensor, group: "ProcessGroup | DeviceMesh | None" = None, *, ignore_index: int = -100
) -> Tensor:
    """The `num_items` of a mean over a group's tokens (pairs, sequences): their number / the group's size.

    Each rank's gradient is then its part of the whole mean's, times the group's size, and what DDP and FSDP
    make of it, the average over the ranks, is the gradient of the whole mean; so is the average of the ranks'
    losses the whole loss. It does not matter how the tokens are spread: a rank may have none, other samples
    (data parallel) or another part of the same ones (sequence or context parallel).

    Args:
        items: this rank's targets, of which those count that are not `ignore_index` (of unshifted labels,
            pass `count_targets(labels, shift=True)`); or a number or 0-d tensor, in the loss's own unit.
        group: the processes over which gradients are averaged, also a one-dimensional DeviceMesh; default
            all. All must call.
        ignore_index: of the targets.

    Returns:
        0-d tensor; without torch.distributed, the number itself.
    """
    distributed = dist.is_available() and dist.is_initialized()
    if not isinstance(items, Tensor):
        dtype = torch.float32 if isinstance(items, float) else torch.int64
        items = torch.tensor(items, dtype=dtype, device=_device(group) if distributed else None)
    elif items.dim():
        items = (items != ignore_index).sum()
    if not distributed:
        return items
    group = group.get_group() if hasattr(group, "get_group") else group
    total = items.detach().clone()
    dist.all_reduce(total, group=group)
    # A quotient of integers has the default dtype, which may be bf16.
    return total.to(torch.promote_types(total.dtype, torch.float32)) / dist.get_world_size(group)


def _device(group: "ProcessGroup | DeviceMesh | None") -> torch.device | str:
    """Where the group takes tensors."""
    if hasattr(group, "device_type"):
        return group.device_type
    return "cpu" if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator() or "cpu"
