"""How hidden states cross a tensor-parallel group, where our gradient of them is whole on every rank.

`tp_group` sums d_hidden over the group, so each rank has the gradient of the whole loss. The fused kernels of
frameworks leave each rank a part of it, which the framework's own backward passes sum.
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


class PartOfGradient(torch.autograd.Function):
    """Identity whose gradient is divided by the number of ranks, for a later sum over the ranks.

    The gradient is expected to be equal on all ranks, so the sum is the gradient again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: "ProcessGroup | None") -> Tensor:
        ctx.ranks = 1 if group is None else group.size()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad / ctx.ranks, None
