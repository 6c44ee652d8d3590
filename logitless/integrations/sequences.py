"""Autograd functions for hidden states in a tensor-parallel group.

A loss with `tp_group` sums d_hidden over the group, so each rank gets the gradient of the whole loss. The
fused kernels of frameworks return on each rank only its summand, and a later backward pass of the framework
sums over the ranks.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.parallel.collectives import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0: (n, ...) on each rank -> (ranks * n, ...).

    The gradient is expected to be equal on all ranks: the backward pass returns this rank's slice of it.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: "ProcessGroup") -> Tensor:
        ctx.rows = slice(group.rank() * len(x), (group.rank() + 1) * len(x))
        return gather(x, group).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.rows], None


class DivideGradient(torch.autograd.Function):
    """Identity whose gradient is divided by the number of ranks, for a later sum over the ranks.

    The gradient is expected to be equal on all ranks, so the sum is equal to the gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: "ProcessGroup | None") -> Tensor:
        ctx.ranks = 1 if group is None else group.size()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad / ctx.ranks, None
