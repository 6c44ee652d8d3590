"""`Reader`: what it takes to read the numbers of several ids per token from a chunk of logits."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import Head
from logitless.kernels.ids import slots
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

    @property
    def options(self) -> dict:
        """Of the kernels that read a chunk."""
        return {"head": self.head, "bias": self.bias, "ignore_index": self.ignored}

    @property
    def kept(self) -> dict:
        """What `slots.entries` takes to know ignored rows, and the head's slope."""
        return {"head": self.head, "targets": self.targets, "ignore_index": self.ignored}

    def statistics(
        self, logits: Tensor, names: tuple[str, ...], maxima: Tensor | None = None
    ) -> TokenBuffers:
        """Log-sum-exp and the named numbers of each row of this rank's columns; 0 where ignored."""
        stats = kernels.allocate_stats(names, len(self.targets), self.dtype, logits.device)
        kernels.token_statistics(logits, self.targets, stats, **self.options, maxima=maxima)
        return stats

    def take_out(self, logits: Tensor, ids: Tensor) -> Tensor:
        """(n, k) logits of the ids on all ranks, -inf in empty slots; they are then gone from the chunk."""
        columns = self.vocabulary.columns_of(ids)
        z = slots.take_out(logits, columns, head=self.head, bias=self.bias)
        return self.vocabulary.logits_of(ids, z, columns)

    def numbers(
        self, logits: Tensor, ids: Tensor, out: Mapping[str, Tensor], gradient: Tensor | None = None
    ) -> Tensor | None:
        """Fill `out`, see `slots.numbers`. The ids' logits are taken out of the chunk.

        With `gradient` fill that too: with p_r d z_r / d x_r of all other ids r, up to the factor (n,) that
        comes back.
        """
        z = self.take_out(logits, ids)
        stats = kernels.allocate_stats(
            ("entropy",) if "entropy" in out else (), len(self.targets), self.dtype, logits.device
        )
        if gradient is None:
            kernels.token_statistics(logits, self.targets, stats, **self.options)
        else:
            options = {"gradient": gradient, **self.options}
            scale = kernels.logprob_gradient(logits, self.targets, stats, **options)
        options = {"logits": logits, "targets": self.targets, **self.options}
        options["columns"] = self.vocabulary.columns_of(ids)
        options["exchange"] = self.vocabulary.gathered if self.vocabulary.sharded else None
        slots.numbers(z, ids, stats, out, **options)
        if gradient is None:
            return None
        # The chunk's own softmax is a part of the whole one. Of what was taken out it has nothing: its
        # probability is 0, or with a soft cap the slope. With nothing else in the chunk there is no softmax.
        part = (stats.lse - out["lse"]) + (stats.lse_residual - out["lse_residual"])
        return torch.where(stats.lse == -torch.inf, 0.0, -scale * part.exp())
