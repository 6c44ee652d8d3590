"""Sums over a group of processes that autograd differentiates, where every rank computes the same loss."""

import torch
import torch.distributed as dist
from torch import Tensor


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
