"""The ranks that a call meets in collectives: what is wrong on one of them must end the call on all."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.parallel.collectives import gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Peers:
    """The members of `tp_group` and `cp_group`, if any: every rank of a grid of both."""

    groups: tuple["ProcessGroup", ...] = ()

    @property
    def size(self) -> int:
        return math.prod(group.size() for group in self.groups)

    def table(self, counts: Tensor) -> Tensor:
        """(n,) integers of this rank -> (ranks, 1 + n): each rank's number, and its integers."""
        rank = torch.full((1,), dist.get_rank(), dtype=counts.dtype, device=counts.device)
        found = torch.cat((rank, counts))
        for group in self.groups:
            found = gather(found, group)
        return found.view(-1, 1 + counts.shape[0])


ALONE = Peers()
