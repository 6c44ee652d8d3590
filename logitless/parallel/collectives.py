"""What the ranks of a call exchange.

Sums that autograd differentiates, where every rank computes the same loss; and integers, as what is wrong on
one rank must end the call on all.
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
    """Each rank's part -> the sum of all.

    Every rank computes the same loss from it, so the gradient passes unchanged.
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
    """A number that all ranks have and each uses on its own data: its gradient is summed over them."""

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
    """(...) on each rank -> (ranks, ...)."""
    if x.device.type == "cuda":
        found = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(found.view(-1), x.reshape(-1), group=group)
        return found
    # A sum of rows that are zero elsewhere: gloo copies tensors in all_gather, and in torch 2.11 that fails
    # under a dispatch mode, as its own thread has none.
    found = x.new_zeros(group.size(), *x.shape)
    found[group.rank()] = x
    dist.all_reduce(found, group=group)
    return found


@dataclass(frozen=True)
class Peers:
    """The members of `tp_group` and `cp_group`, if any: every rank of a grid of both."""

    groups: tuple["ProcessGroup", ...] = ()

    @property
    def size(self) -> int:
        return math.prod(group.size() for group in self.groups)

    @property
    def place(self) -> int:
        """Of this rank in a `table`."""
        place, before = 0, 1
        for group in self.groups:
            place, before = place + before * group.rank(), before * group.size()
        return place

    def table(self, numbers: Tensor) -> Tensor:
        """(n,) integers of this rank -> (ranks, n): those of each."""
        count = numbers.shape[0]
        for group in self.groups:
            numbers = gather(numbers, group)
        return numbers.view(-1, count)


ALONE = Peers()
