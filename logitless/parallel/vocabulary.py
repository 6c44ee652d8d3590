"""Which rows of the LM head a rank has: the whole vocabulary, or a shard of it (vocabulary parallelism).

With shards every rank has the same hidden states and targets. A chunk's logits stay where they are: what
crosses the group is a few numbers per token, gathered once a chunk, and the sum of d_hidden. With lse_r and
p_r the log-sum-exp and the softmax within shard r, and w_r = exp(lse_r - lse) the probability of the whole
shard:

    lse = log sum_r exp(lse_r)
    log p(y) = log p_r(y) + log w_r, r the shard of y
    entropy = sum_r w_r (entropy_r - log w_r)

Every rank then has the same numbers of every token, computes the same loss, and gets all of d_hidden and its
own rows of d_weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.kernels.head import shards as kernels
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.targets import shard_columns
from logitless.kernels.head.transform import Head
from logitless.parallel.collectives import GroupShared, GroupSum, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# How an ignored target is written among a shard's columns; a loss's own `ignore_index` may be any id.
IGNORED = -100


@dataclass(frozen=True)
class WholeVocabulary:
    """Every rank has all rows of the head: there is nothing to exchange."""

    sharded = False

    def total(self, width: int) -> int:
        """Ids in the vocabulary, where this rank's head has `width` rows."""
        return width

    def widest(self, width: int) -> int:
        """Rows of the largest shard. All ranks plan for it, so that they walk the same chunks."""
        return width

    def span(self, V: int) -> tuple[int, int]:
        """The first id of this rank's rows of the head, and how many there are."""
        return 0, V

    def columns(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, int]:
        """Targets as columns of this rank's logits, and what stands for an ignored one among them."""
        return targets, ignore_index

    def local(self, x: Tensor | None) -> Tensor | None:
        """(V,) -> the entries of this rank's rows."""
        return x

    def combine(self, stats: TokenBuffers, columns: Tensor) -> None:
        """Turn a chunk's numbers within each shard into those of the whole vocabulary, in place."""

    def combine_gradient(
        self, gradient: Tensor, columns: Tensor, stats: TokenBuffers, factor: Tensor, head: Head
    ) -> Tensor:
        """The same after `logprob_gradient`; `gradient` and the factor per row become the vocabulary's."""
        return factor

    def start_sum(self, x: Tensor) -> "Work | None":
        """Start to sum `x` over the group, in place; None where it is complete."""
        return None

    def rows_of(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Rows of the head (n, H) for ids (n,) of the whole vocabulary."""
        return weight[ids]

    # For functions of the logits themselves, under plain autograd.

    def reduce(self, x: Tensor) -> Tensor:
        """A sum over this rank's columns -> over the vocabulary."""
        return x

    def log_softmax(self, z: Tensor) -> Tensor:
        """(n, columns) log-probabilities in the whole vocabulary."""
        return z.log_softmax(-1)

    def norm(self, z: Tensor) -> Tensor:
        """(n, 1) lengths of the rows."""
        return z.norm(dim=-1, keepdim=True)

    def argmax(self, z: Tensor) -> Tensor:
        """(n,) ids; the first of equal logits."""
        return z.argmax(-1)

    def find(self, ids: Tensor, V: int) -> tuple[Tensor, Tensor]:
        """(n,) ids -> their columns of this rank's logits (0 where they have none), and which have one."""
        here = (ids >= 0) & (ids < V)
        return torch.where(here, ids, 0), here

    def columns_of(self, ids: Tensor) -> Tensor:
        """(n, k) ids -> their columns of this rank's logits, negative for those without one."""
        return ids

    def logits_of(self, ids: Tensor, z: Tensor, columns: Tensor) -> Tensor:
        """(n, k) logits of this rank's columns -> those of the ids on all ranks, -inf in empty slots."""
        return z


WHOLE_VOCABULARY = WholeVocabulary()


class Shards(NamedTuple):
    """What the ranks of a sharded head tell each other of it, in a call's one sync."""

    sizes: tuple[int, ...]  # rows of each
    unrounded: bool  # whether a kernel of every rank can read unrounded logits

    @property
    def V(self) -> int:
        """Ids in the whole vocabulary."""
        return sum(self.sizes)

    @staticmethod
    def code(weight: Tensor, *, unrounded: bool) -> int:
        """What a rank tells of its shard (V_r, H): twice its rows, plus one if it reads unrounded ones."""
        return 2 * weight.shape[0] + unrounded

    @classmethod
    def read(cls, codes: Sequence[int]) -> Self:
        """From the codes of all ranks."""
        return cls(tuple(code // 2 for code in codes), all(code % 2 for code in codes))

    @classmethod
    def gathered(cls, code: int, group: "ProcessGroup", device: torch.device) -> Self:
        """From this rank's code, at the price of a host sync."""
        return cls.read(
            gather(torch.full((1,), code, dtype=torch.int64, device=device), group)[:, 0].tolist()
        )


@dataclass(frozen=True)
class ShardedVocabulary(WholeVocabulary):
    """Rank r of the group has the next `sizes[r]` rows of the head.

    The sizes are checked in every call, as a shard may be resized or replaced: they are read together with
    the number of supervised tokens.
    """

    group: "ProcessGroup"
    sizes: tuple[int, ...]

    sharded = True

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def width(self) -> int:
        """Rows of this rank's shard."""
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """The first id of this rank's shard."""
        return sum(self.sizes[: self.rank])

    def total(self, width: int) -> int:
        return sum(self.sizes)

    def widest(self, width: int) -> int:
        return max(self.sizes)

    def span(self, V: int) -> tuple[int, int]:
        return self.start, self.width

    def columns(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, int]:
        """Targets as this shard's columns: its width for another shard's, `IGNORED` if ignored."""
        return shard_columns(targets, self.start, self.width, ignore_index, IGNORED), IGNORED

    def local(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[self.start : self.start + self.width]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Summed over the group, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def start_sum(self, x: Tensor) -> "Work":
        return dist.all_reduce(x, group=self.group, async_op=True)

    def rows_of(self, weight: Tensor, ids: Tensor) -> Tensor:
        column, here = self.find(ids, self.total(self.width))
        return self.all_reduce(torch.where(here[:, None], weight[column], 0.0))

    def gathered(self, x: Tensor) -> Tensor:
        """(...) -> (ranks, ...)."""
        return gather(x, self.group)

    def combine(self, stats: TokenBuffers, columns: Tensor) -> None:
        kernels.combine(self._shards(stats), columns, stats, rank=self.rank, ignore_index=IGNORED)

    def combine_gradient(
        self, gradient: Tensor, columns: Tensor, stats: TokenBuffers, factor: Tensor, head: Head
    ) -> Tensor:
        options = {"rank": self.rank, "ignore_index": IGNORED, "head": head}
        options |= {"gradient": gradient, "factor": factor}
        return kernels.combine_gradient(self._shards(stats), columns, stats, **options)

    def _shards(self, stats: TokenBuffers) -> Tensor:
        """(ranks, numbers, C): those of each shard."""
        return self.gathered(torch.stack([x for _, x in stats.items()]))

    # Every rank computes the same loss, so a sum over the group passes its gradient on as it is, and the
    # gradient of what every rank uses on its own logits is the sum of all ranks'.

    def reduce(self, x: Tensor) -> Tensor:
        return GroupSum.apply(x, self.group)

    def shared(self, x: Tensor) -> Tensor:
        """A number that all ranks have, for use on this rank's logits."""
        return GroupShared.apply(x, self.group)

    def log_softmax(self, z: Tensor) -> Tensor:
        own = z.logsumexp(-1)
        top = self.gathered(own.detach()).amax(0)
        return z - self.shared(top + self.reduce((own - top).exp()).log())[:, None]

    def norm(self, z: Tensor) -> Tensor:
        return self.shared(self.reduce(z.square().sum(-1, keepdim=True))).clamp(min=1e-24).sqrt()

    def argmax(self, z: Tensor) -> Tensor:
        return self.best_id(*z.detach().max(-1))

    def best_id(self, values: Tensor, columns: Tensor) -> Tensor:
        """(n,) ids from each shard's largest logit and its column; the first of equal ones."""
        values, ids = self.gathered(values), self.gathered(columns + self.start)
        return ids.gather(0, values.argmax(0, keepdim=True))[0]

    def find(self, ids: Tensor, V: int) -> tuple[Tensor, Tensor]:
        return super().find(ids - self.start, self.width)

    def columns_of(self, ids: Tensor) -> Tensor:
        columns, here = self.find(ids, self.width)
        return torch.where(here, columns, -1)

    def logits_of(self, ids: Tensor, z: Tensor, columns: Tensor) -> Tensor:
        return torch.where(ids >= 0, self.reduce(torch.where(columns >= 0, z, 0.0)), -torch.inf)


@dataclass(frozen=True)
class LoneShard(ShardedVocabulary):
    """A shard without a process group, for measuring memory."""

    @property
    def rank(self) -> int:
        return 0

    def gathered(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce(self, x: Tensor) -> Tensor:
        return x.clone()

    def shared(self, x: Tensor) -> Tensor:
        return x
