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

    sliced = False

    def sum(self, x: Tensor) -> Tensor:
        """This rank's part -> the sum over the ranks."""
        return x

    def sum_unless_whole(self, x: Tensor, unit: object) -> Tensor:
        """`sum`, but for sums over sequences and pairs, which every rank has in full."""
        return x

    def shared(self, x: Tensor) -> Tensor:
        """A number of whole sequences, for use on this rank's tokens."""
        return x

    def everyones(self, x: Tensor) -> Tensor:
        """(n,) of this rank's tokens -> of all ranks', in no order that means anything."""
        return x

    def everywhere(self, condition: bool, device: torch.device) -> bool:
        """Whether a condition that each rank's host knows for itself holds on all of them."""
        return condition

    def counts(self, device: torch.device, *tokens: int | Tensor) -> tuple[int | Tensor, ...]:
        """Numbers of this rank's tokens -> those of whole sequences."""
        return tokens


@dataclass(frozen=True)
class SlicedSequences(WholeSequences):
    """Each rank holds a slice of every sequence, any of its tokens, and computes whole ones' loss.

    Under autograd every rank differentiates the same loss with respect to its own tokens.
    """

    group: "ProcessGroup"

    sliced = True

    def sum(self, x: Tensor) -> Tensor:
        return GroupSum.apply(x, self.group)

    def sum_unless_whole(self, x: Tensor, unit: object) -> Tensor:
        return x if unit in ("sequences", "pairs") else self.sum(x)

    def shared(self, x: Tensor) -> Tensor:
        return GroupShared.apply(x, self.group) if x.requires_grad else x

    def everyones(self, x: Tensor) -> Tensor:
        # The slices differ in length, which the host must know: a sync.
        sizes = gather(torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device), self.group)[
            :, 0
        ].tolist()
        parts = gather(torch.nn.functional.pad(x, (0, max(sizes) - x.shape[0])), self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def everywhere(self, condition: bool, device: torch.device) -> bool:
        return not self.sum(torch.tensor(not condition, dtype=torch.int64, device=device)).item()

    def counts(self, device: torch.device, *tokens: int | Tensor) -> tuple[int | Tensor, ...]:
        return self.sum(
            torch.stack([torch.as_tensor(x, dtype=torch.int64, device=device) for x in tokens])
        ).unbind()


WHOLE_SEQUENCES = WholeSequences()
