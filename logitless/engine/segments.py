"""`Segments`: the sequences in a slice of rows, with deterministic sums per sequence and their transpose."""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor


class cached_property:  # noqa: N801
    """`functools.cached_property` without the lock of Python 3.11, which torch.compile cannot trace."""

    def __init__(self, function):
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.function(instance)
        return value


@dataclass
class Segments:
    """The sequences of a slice of rows.

    There are two orders of sequences. "Row order" is group by group (for pairs: chosen 1, rejected 1, chosen
    2, ...). "Sequence order" is the order of the call, which losses use (for pairs: all chosen sequences,
    then all rejected ones).
    """

    lengths: Tensor  # (sequences,) int64, in row order
    rows: int
    groups: int
    roles: int

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.groups * self.roles

    @cached_property
    def ids(self) -> Tensor:
        """(rows,) the index of each row's sequence, in row order."""
        return torch.repeat_interleave(self.lengths, output_size=self.rows)

    @cached_property
    def starts(self) -> Tensor:
        """(sequences,) the first row of each sequence, in row order."""
        return self.lengths.cumsum(0) - self.lengths

    def to_sequence_order(self, x: Tensor) -> Tensor:
        """Reorder (sequences,) from row order to sequence order."""
        return x.view(self.groups, self.roles).t().reshape(-1)

    def to_row_order(self, x: Tensor) -> Tensor:
        """Reorder (sequences,) from sequence order to row order."""
        return x.view(self.roles, self.groups).t().reshape(-1)

    def sum(self, x: Tensor) -> Tensor:
        """(rows,) -> (sequences,) in sequence order."""
        return self.to_sequence_order(_sum(x, self.lengths, self.ids))

    def spread(self, x: Tensor) -> Tensor:
        """(sequences,) in sequence order -> (rows,), a new tensor: the transpose of `sum`."""
        return _spread(self.to_row_order(x), self.lengths, self.ids)


class EqualSegments(Segments):
    """Sequences with the same number of rows, whose sums are those of a matrix."""

    def __init__(self, length: int, groups: int, roles: int, device: torch.device):
        self.length = length
        self.rows = groups * roles * length
        self.groups = groups
        self.roles = roles
        self.device = device

    @cached_property
    def lengths(self) -> Tensor:
        return torch.full((self.count,), self.length, dtype=torch.int64, device=self.device)

    @cached_property
    def ids(self) -> Tensor:
        return torch.arange(self.rows, device=self.device) // self.length

    @cached_property
    def starts(self) -> Tensor:
        return torch.arange(self.count, device=self.device) * self.length

    def sum(self, x: Tensor) -> Tensor:
        return self.to_sequence_order(_wide(x).reshape(self.count, self.length).sum(1).to(x.dtype))

    def spread(self, x: Tensor) -> Tensor:
        rows = self.to_row_order(_wide(x))[:, None].repeat(1, self.length)
        return rows.view(-1).to(x.dtype)


def segments_of(
    sizes: Tensor | int, rows: int, groups: int, roles: int, device: torch.device
) -> Segments | EqualSegments:
    """The sequences of `sizes`, the rows of each one in row order or one number for all."""
    if isinstance(sizes, Tensor):
        return Segments(sizes, rows, groups, roles)
    return EqualSegments(sizes, groups, roles, device)


def _wide(x: Tensor) -> Tensor:
    """x, in fp64 on a CPU: see `sum_runs`."""
    return x.double() if x.device.type == "cpu" and x.is_floating_point() else x


def sum_runs(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum consecutive runs of x (rows,) without atomics.

    `segment_reduce` is a tree reduction on CUDA. On the CPU it adds sequentially, which is inaccurate in fp32
    for thousands of tokens; therefore the sum is computed in fp64 there. MPS does not have this operator, so
    the CPU computes the sum.
    """
    if x.device.type in ("cpu", "mps"):
        wide = (x.detach() if x.requires_grad else x).cpu().double().contiguous()
        return torch.segment_reduce(wide, "sum", lengths=lengths.cpu(), unsafe=True).to(x.dtype).to(x.device)
    return torch.segment_reduce(x.contiguous(), "sum", lengths=lengths, unsafe=True)


def _sum(x: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    return _Sum.apply(x, lengths, ids) if x.requires_grad else sum_runs(x, lengths)


def _spread(x: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    return _Spread.apply(x, lengths, ids) if x.requires_grad else x[ids]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
        return sum_runs(x, lengths)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, ctx.lengths, ctx.ids = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _spread(grad, ctx.lengths, ctx.ids), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
        return x[ids]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, ctx.lengths, ctx.ids = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sum(grad, ctx.lengths, ctx.ids), None, None


# Without a cache, PyTorch inspects the signature of `forward` in every call, which takes longer than the
# sums.
for _function in (_Sum, _Spread):
    _function.forward.__signature__ = inspect.signature(_function.forward)
