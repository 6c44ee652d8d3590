"""Which part of each sequence a rank has: the whole of it, or a slice (context parallelism)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.parallel.collectives import GroupShared, GroupSum, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class WholeSequences:
    """Every sequence lies on one rank: there is nothing to exchange."""

    def sum(self, x: Tensor) -> Tensor:
        """This rank's part -> the sum over the ranks."""
        return x

    def sum_unless_whole(self, x: Tensor, unit: object) -> Tensor:
        """`sum`, but for sums over sequences and pairs, which every rank has in full."""
        return x

    def shared(self, x: Tensor) -> Tensor:
        """A number of whole sequences, for use on this rank's tokens."""
        return x

    def before(self, x: Tensor) -> Tensor | None:
        """The sum over the ranks whose slices come earlier; None for nothing."""
        return None

    def counts(self, device: torch.device, *tokens: int | Tensor) -> tuple[int | Tensor, ...]:
        """Numbers of this rank's tokens -> those of whole sequences."""
        return tokens


@dataclass(frozen=True)
class SlicedSequences(WholeSequences):
    """Each rank holds a slice of every sequence, in the order of the ranks, and computes whole ones' loss.

    Under autograd every rank differentiates the same loss with respect to its own tokens.
    """

    group: "ProcessGroup"

    def sum(self, x: Tensor) -> Tensor:
        return GroupSum.apply(x, self.group)

    def sum_unless_whole(self, x: Tensor, unit: object) -> Tensor:
        return x if unit in ("sequences", "pairs") else self.sum(x)

    def shared(self, x: Tensor) -> Tensor:
        return GroupShared.apply(x, self.group) if x.requires_grad else x

    def before(self, x: Tensor) -> Tensor:
        return gather(x, self.group)[: self.group.rank()].sum(0)

    def counts(self, device: torch.device, *tokens: int | Tensor) -> tuple[int | Tensor, ...]:
        return self.sum(torch.stack([torch.as_tensor(x, device=device) for x in tokens])).unbind()


WHOLE_SEQUENCES = WholeSequences()
