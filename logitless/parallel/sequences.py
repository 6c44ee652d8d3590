"""Whole sequences on each rank, or slices of them (context parallelism, `cp_group`)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.parallel.collectives import GroupShared, GroupSum, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class WholeSequences:
    """No context parallelism: every sequence is on one rank, and nothing is exchanged."""

    sliced = False

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, differentiable."""
        return x

    def sum_unless_whole(self, x: Tensor, unit: object) -> Tensor:
        """`sum`, except that values per sequence or pair, which are equal on all ranks, are unchanged."""
        return x

    def shared(self, x: Tensor) -> Tensor:
        """Identity for values of whole sequences that this rank uses for its tokens.

        The gradient is summed over the ranks.
        """
        return x

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """All-gather (n,) values of tokens. The order of the result is arbitrary."""
        return x

    def everywhere(self, conditions: tuple[bool, ...], device: torch.device) -> tuple[bool, ...]:
        """Return which conditions hold on all ranks. With `cp_group`, this is a host sync."""
        return conditions

    def counts(self, device: torch.device, *tokens: int | Tensor) -> tuple[int | Tensor, ...]:
        """Sum counts of this rank's tokens over the ranks."""
        return tokens


@dataclass(frozen=True)
class SlicedSequences(WholeSequences):
    """Context parallelism: each rank has a slice of every sequence, and computes the loss of the whole
    sequences.

    A slice may contain any tokens of the sequence. Every rank differentiates the same loss with respect to
    its tokens.
    """

    group: "ProcessGroup"

    sliced = True

    def sum(self, x: Tensor) -> Tensor:
        return GroupSum.apply(x, self.group)

    def sum_unless_whole(self, x: Tensor, unit: object) -> Tensor:
        return x if unit in ("sequences", "pairs") else self.sum(x)

    def shared(self, x: Tensor) -> Tensor:
        return GroupShared.apply(x, self.group) if x.requires_grad else x

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        # The host must read the lengths of the slices, which may differ. This is a host sync.
        sizes = gather(torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device), self.group)[
            :, 0
        ].tolist()
        parts = gather(torch.nn.functional.pad(x, (0, max(sizes) - x.shape[0])), self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def everywhere(self, conditions: tuple[bool, ...], device: torch.device) -> tuple[bool, ...]:
        failures = torch.tensor([not x for x in conditions], dtype=torch.int64, device=device)
        return tuple(count == 0 for count in self.sum(failures).tolist())

    def counts(self, device: torch.device, *tokens: int | Tensor) -> tuple[int | Tensor, ...]:
        return self.sum(
            torch.stack([torch.as_tensor(x, dtype=torch.int64, device=device) for x in tokens])
        ).unbind()


WHOLE_SEQUENCES = WholeSequences()
