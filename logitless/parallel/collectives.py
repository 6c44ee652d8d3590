"""The collectives of a call: differentiable sums, and tables of integers.

The sums assume that every rank computes the same loss from them. The tables allow all ranks to raise the
fault of one rank.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GroupSum(torch.autograd.Function):
    """All-reduce (sum). The backward pass is the identity.

    Every rank computes the same loss from the sum, so the gradient of each summand is the gradient of the
    sum.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class GroupShared(torch.autograd.Function):
    """Identity for a tensor that is equal on all ranks. The backward pass is an all-reduce (sum).

    Each rank uses the tensor only for its shard of the data, so each rank has a part of the gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def gather(x: Tensor, group) -> Tensor:
    """All-gather: (...) on each rank -> (ranks, ...)."""
    if x.device.type == "cuda":
        gathered = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(gathered.view(-1), x.reshape(-1), group=group)
        return gathered
    # On other devices, all-reduce a tensor that is 0 except in this rank's row. gloo's all_gather copies
    # tensors in a thread without the caller's dispatch mode, which fails in torch 2.11.
    gathered = x.new_zeros(group.size(), *x.shape)
    gathered[group.rank()] = x
    dist.all_reduce(gathered, group=group)
    return gathered


@dataclass(frozen=True)
class Peers:
    """The ranks that share a call: the members of `tp_group`, of `cp_group`, or of the grid of both."""

    groups: tuple["ProcessGroup", ...] = ()

    @property
    def size(self) -> int:
        return math.prod(group.size() for group in self.groups)

    @property
    def place(self) -> int:
        """The index of this rank's row in a `table`."""
        place, before = 0, 1
        for group in self.groups:
            place = place + before * group.rank()
            before = before * group.size()
        return place

    def table(self, statistics: Tensor) -> Tensor:
        """All-gather over all groups: (n,) integers of this rank -> (ranks, n)."""
        count = statistics.shape[0]
        for group in self.groups:
            statistics = gather(statistics, group)
        return statistics.view(-1, count)


ALONE = Peers()
