"""The normalizer of a mean over tokens that are distributed over several processes."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


def global_num_items(
    items: float | Tensor, group: "ProcessGroup | DeviceMesh | None" = None, *, ignore_index: int = -100
) -> Tensor:
    """Return `num_items` for a mean over the tokens (pairs, sequences) of all ranks: their number / number of
    ranks.

    With this `num_items`, the average of the losses of all ranks is the mean over all tokens, and the average
    of their gradients, which DDP and FSDP compute, is the gradient of this mean. The distribution of the
    tokens over the ranks is arbitrary: ranks may have different samples (data parallelism) or different
    tokens of the same samples (sequence or context parallelism), and a rank may have no tokens.

    Args:
        items: this rank's targets, which are counted except for `ignore_index` (for unshifted labels, pass
            `count_targets(labels, shift=True)`); or the number of items as a number or 0-d tensor.
        group: the ranks over which gradients are averaged: a process group or a one-dimensional DeviceMesh.
            Default: all ranks. Every rank of the group must call this function.
        ignore_index: targets with this id are not counted.

    Returns:
        0-d tensor. Without torch.distributed, it is the number of items.

    Examples:
        >>> global_num_items(torch.tensor([5, 6, -100, 8]))  # one process
        tensor(3)
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
    # An integer / integer would be in the default dtype, which may be bf16.
    return total.to(torch.promote_types(total.dtype, torch.float32)) / dist.get_world_size(group)


def _device(group: "ProcessGroup | DeviceMesh | None") -> torch.device | str:
    """The device on which the collectives of the group run."""
    if hasattr(group, "device_type"):
        return group.device_type
    return "cpu" if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator() or "cpu"
