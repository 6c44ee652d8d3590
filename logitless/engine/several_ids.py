"""`Reader`: what it takes to read the numbers of several ids per token from a chunk of logits."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.kernels import cross_entropy as kernels
from logitless.kernels import slots
from logitless.kernels.cross_entropy import TokenBuffers
from logitless.kernels.head import Head
from logitless.parallel.vocabulary import WholeVocabulary


class Reader(NamedTuple):
    """The logits are those of this rank's columns, the ids (n, k) those of the whole vocabulary."""

    head: Head
    bias: Tensor | None  # (columns,)
    vocabulary: WholeVocabulary
    V: int
    targets: Tensor  # (n,) `ignored`, or a column that does not exist
    ignored: int
    dtype: torch.dtype  # of the numbers

    def statistics(
        self, logits: Tensor, names: tuple[str, ...], maxima: Tensor | None = None
    ) -> TokenBuffers:
        """Log-sum-exp and the named numbers of each row of this rank's columns; 0 where ignored."""
        stats = kernels.allocate_stats(names, len(self.targets), self.dtype, logits.device)
        options = {"head": self.head, "bias": self.bias, "ignore_index": self.ignored}
        kernels.token_statistics(logits, self.targets, stats, **options, maxima=maxima)
        return stats

    @property
    def kept(self) -> dict:
        """What `slots.entries` takes to know ignored rows, and the head's slope."""
        return {"head": self.head, "targets": self.targets, "ignore_index": self.ignored}

    def take_out(self, logits: Tensor, ids: Tensor) -> Tensor:
        """(n, k) logits of the ids on all ranks, -inf in empty slots; they are then gone from the chunk."""
        columns = self.vocabulary.columns_of(ids)
        z = slots.take_out(logits, columns, head=self.head, bias=self.bias)
        return self.vocabulary.logits_of(ids, z, columns)

    def numbers(self, logits: Tensor, ids: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill `out`, see `slots.numbers`. The ids' logits are taken out of the chunk."""
        z = self.take_out(logits, ids)
        stats = self.statistics(logits, ("entropy",) if "entropy" in out else ())
        options = {"bias": self.bias, "logits": logits, **self.kept}
        if self.vocabulary.sharded:
            options |= {"columns": self.vocabulary.columns_of(ids), "exchange": self.vocabulary.gathered}
        slots.numbers(z, ids, stats, out, **options)
