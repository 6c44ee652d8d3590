"""The whole LM head on each rank, or a shard of its rows (vocabulary parallelism, `tp_group`).

With shards, every rank has the same hidden states and targets. Logits are not exchanged. The ranks all-gather
a few statistics per token, once per chunk and once more for a reference model, and all-reduce d_hidden.
`kernels/head/statistics.py` has the formulas by which the statistics of the shards are merged. Therefore
every rank has the same statistics of all tokens, computes the same loss, and gets the full d_hidden and
d_weight of its rows.
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
from logitless.kernels.head.transform import LogitTransform
from logitless.parallel.collectives import GroupShared, GroupSum, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# The value of an ignored target in the columns of a shard. The `ignore_index` of a loss may be a valid
# column.
IGNORED = -100


@dataclass(frozen=True)
class WholeVocabulary:
    """No vocabulary parallelism: every rank has all rows of the head, and nothing is exchanged."""

    sharded = False

    def total(self, width: int) -> int:
        """The size of the vocabulary; `width` is the number of rows of this rank's head."""
        return width

    def max_shard_rows(self, width: int) -> int:
        """Number of rows of the largest shard. All ranks plan for it, so that they have the same chunks."""
        return width

    def row_range(self, V: int) -> tuple[int, int]:
        """(first id, number of rows) of this rank's part of the head."""
        return 0, V

    def columns(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, int]:
        """Return (targets as columns of this rank's logits, the value of an ignored target in them)."""
        return targets, ignore_index

    def local(self, x: Tensor | None) -> Tensor | None:
        """The entries of x (V,) for this rank's rows."""
        return x

    def merge_stats(self, stats: TokenBuffers, columns: Tensor) -> None:
        """Merge a chunk's statistics of all shards to those of the whole vocabulary, in place."""

    def merge_gradient(
        self,
        gradient: Tensor,
        columns: Tensor,
        stats: TokenBuffers,
        factor: Tensor,
        transform: LogitTransform,
    ) -> Tensor:
        """`merge_stats` for the results of `logprob_gradient`, which also computes a gradient and a row
        factor.

        Args:
            gradient: (C, columns) d logp / d logits within this shard, up to `factor`. Changed in place to
                the gradient in the whole vocabulary.
            columns: (C,) targets, from `columns`.
            stats: (C,) each, changed in place.
            factor: (C,) row factor of `gradient` within this shard.
            transform: transform of the logits.

        Returns:
            (C,) row factor of `gradient` in the whole vocabulary.
        """
        return factor

    def start_sum(self, x: Tensor) -> "Work | None":
        """Start an all-reduce of `x`, in place; None if there is nothing to wait for."""
        return None

    def rows_of(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Rows of the head (n, H) for ids (n,) of the whole vocabulary."""
        return weight[ids]

    # The following methods are for a `LogitsLoss`, and are differentiable by ordinary autograd.

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks: sums over this rank's columns -> sums over the whole vocabulary."""
        return x

    def log_softmax(self, z: Tensor) -> Tensor:
        """(n, columns) log-probabilities, normalized over the whole vocabulary."""
        return z.log_softmax(-1)

    def norm(self, z: Tensor) -> Tensor:
        """(n, 1) Euclidean norms of the rows, over the whole vocabulary."""
        return z.norm(dim=-1, keepdim=True)

    def argmax(self, z: Tensor) -> Tensor:
        """(n,) ids of the largest logits; among equal logits, the lowest id."""
        return z.argmax(-1)

    def locate(self, ids: Tensor, V: int) -> tuple[Tensor, Tensor]:
        """(n,) ids -> (their columns in this rank's logits, else 0; whether an id is on this rank)."""
        on_rank = (ids >= 0) & (ids < V)
        return torch.where(on_rank, ids, 0), on_rank

    def to_local_ids(self, ids: Tensor) -> Tensor:
        """(n, k) ids -> their columns in this rank's logits; negative for ids of other ranks."""
        return ids

    def logits_of(self, ids: Tensor, z: Tensor, columns: Tensor) -> Tensor:
        """(n, k) logits of the ids on this rank -> logits of all ids; -inf in empty slots."""
        return z


WHOLE_VOCABULARY = WholeVocabulary()


class Shards(NamedTuple):
    """The shards of a head on all ranks, exchanged in the call's one host sync.

    A `TokenLoss` with `reduction="none"` exchanges them once more, in a host sync of its own.
    """

    sizes: tuple[int, ...]  # rows of each shard
    fp32_logits: bool  # whether every rank has a kernel for fp32 logits (`HeadCall.fp32_logits`)

    @property
    def V(self) -> int:
        """Size of the whole vocabulary."""
        return sum(self.sizes)

    @staticmethod
    def code(weight: Tensor, *, fp32_logits: bool) -> int:
        """Encode this rank's shard (V_r, H) as an integer: 2 * V_r + fp32_logits."""
        return 2 * weight.shape[0] + fp32_logits

    @classmethod
    def read(cls, codes: Sequence[int]) -> Self:
        """Return the shards, given the codes of all ranks."""
        return cls(tuple(code // 2 for code in codes), all(code % 2 for code in codes))

    @classmethod
    def gathered(cls, code: int, group: "ProcessGroup", device: torch.device) -> Self:
        """Return the shards, given this rank's code, by an all-gather and a host sync."""
        return cls.read(
            gather(torch.full((1,), code, dtype=torch.int64, device=device), group)[:, 0].tolist()
        )


@dataclass(frozen=True)
class ShardedVocabulary(WholeVocabulary):
    """Vocabulary parallelism: rank r of the group has `sizes[r]` rows of the head, in the order of the ranks.

    The sizes are exchanged in every call, because a shard may be resized or replaced. The host reads them
    together with the number of supervised tokens.
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

    def max_shard_rows(self, width: int) -> int:
        return max(self.sizes)

    def row_range(self, V: int) -> tuple[int, int]:
        return self.start, self.width

    def columns(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, int]:
        """Targets as columns of this shard: its width for ids of other shards, `IGNORED` for ignored ones."""
        return shard_columns(targets, self.start, self.width, ignore_index, IGNORED), IGNORED

    def local(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x[self.start : self.start + self.width]

    def all_reduce(self, x: Tensor) -> Tensor:
        """All-reduce (sum) of x, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def start_sum(self, x: Tensor) -> "Work":
        return dist.all_reduce(x, group=self.group, async_op=True)

    def rows_of(self, weight: Tensor, ids: Tensor) -> Tensor:
        column, on_rank = self.locate(ids, self.total(self.width))
        return self.all_reduce(torch.where(on_rank[:, None], weight[column], 0.0))

    def gathered(self, x: Tensor) -> Tensor:
        """All-gather: (...) -> (ranks, ...)."""
        return gather(x, self.group)

    def merge_stats(self, stats: TokenBuffers, columns: Tensor) -> None:
        kernels.merge_stats(self._shards(stats), columns, stats, rank=self.rank, ignore_index=IGNORED)

    def merge_gradient(
        self,
        gradient: Tensor,
        columns: Tensor,
        stats: TokenBuffers,
        factor: Tensor,
        transform: LogitTransform,
    ) -> Tensor:
        options = {"rank": self.rank, "ignore_index": IGNORED, "transform": transform}
        options |= {"gradient": gradient, "factor": factor}
        return kernels.merge_gradient(self._shards(stats), columns, stats, **options)

    def _shards(self, stats: TokenBuffers) -> Tensor:
        """(ranks, statistics, C): the statistics of all shards."""
        return self.gathered(torch.stack([x for _, x in stats.items()]))

    # Every rank computes the same loss. Therefore the backward of an all-reduce (`GroupSum`) is the identity,
    # and the backward of a replicated value that each rank uses for its own logits (`GroupShared`) is an
    # all-reduce.

    def reduce(self, x: Tensor) -> Tensor:
        return GroupSum.apply(x, self.group)

    def shared(self, x: Tensor) -> Tensor:
        """Identity for a value that is equal on all ranks and used for this rank's logits."""
        return GroupShared.apply(x, self.group)

    def log_softmax(self, z: Tensor) -> Tensor:
        shard_lse = z.logsumexp(-1)
        top = self.gathered(shard_lse.detach()).amax(0)
        return z - self.shared(top + self.reduce((shard_lse - top).exp()).log())[:, None]

    def norm(self, z: Tensor) -> Tensor:
        return self.shared(self.reduce(z.square().sum(-1, keepdim=True))).clamp(min=1e-24).sqrt()

    def argmax(self, z: Tensor) -> Tensor:
        return self.best_id(*z.detach().max(-1))

    def best_id(self, values: Tensor, columns: Tensor) -> Tensor:
        """(n,) ids of the largest logits, from each shard's largest logits and their columns."""
        values = self.gathered(values)
        ids = self.gathered(columns + self.start)
        return ids.gather(0, values.argmax(0, keepdim=True))[0]

    def locate(self, ids: Tensor, V: int) -> tuple[Tensor, Tensor]:
        return super().locate(ids - self.start, self.width)

    def to_local_ids(self, ids: Tensor) -> Tensor:
        columns, on_rank = self.locate(ids, self.width)
        return torch.where(on_rank, columns, -1)

    def logits_of(self, ids: Tensor, z: Tensor, columns: Tensor) -> Tensor:
        return torch.where(ids >= 0, self.reduce(torch.where(columns >= 0, z, 0.0)), -torch.inf)


@dataclass(frozen=True)
class LoneShard(ShardedVocabulary):
    """A shard without a process group, with which the memory of a loss is measured."""

    @property
    def rank(self) -> int:
        return 0

    def gathered(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce(self, x: Tensor) -> Tensor:
        return x.clone()

    def shared(self, x: Tensor) -> Tensor:
        return x
