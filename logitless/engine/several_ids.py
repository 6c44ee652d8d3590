"""`Reader`: compute the statistics of several ids per token from a chunk of logits."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import LogitTransform
from logitless.kernels.ids import slots
from logitless.parallel.vocabulary import WholeVocabulary


class Reader(NamedTuple):
    """The arguments of the kernels that compute statistics of several ids per token from a chunk.

    Logits have this rank's columns; ids (n, k) are those of the whole vocabulary, negative for an empty slot.
    """

    head: LogitTransform
    bias: Tensor | None  # (columns,)
    vocabulary: WholeVocabulary
    V: int
    targets: Tensor  # (n,) `ignored` for ignored rows, else a column that does not exist
    ignore_index: int
    dtype: torch.dtype  # dtype of the statistics

    @property
    def options(self) -> dict:
        """Keyword arguments of the kernels that read a chunk."""
        return {"head": self.head, "bias": self.bias, "ignore_index": self.ignore_index}

    @property
    def kept(self) -> dict:
        """Keyword arguments of `slots.sparse_grad`: ignored rows, and the head for its derivative."""
        return {"head": self.head, "targets": self.targets, "ignore_index": self.ignore_index}

    def statistics(
        self, logits: Tensor, names: tuple[str, ...], maxima: Tensor | None = None
    ) -> TokenBuffers:
        """Log-sum-exp and the named statistics of each row over this rank's columns; 0 where ignored."""
        stats = kernels.allocate_stats(names, len(self.targets), self.dtype, logits.device)
        kernels.token_statistics(logits, self.targets, stats, **self.options, maxima=maxima)
        return stats

    def pop_logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """(n, k) logits of the ids, from the ranks that have them; -inf in empty slots.

        Overwrites these logits in the chunk by a value whose exponential is 0.
        """
        columns = self.vocabulary.to_local_ids(ids)
        z = slots.pop_logits(logits, columns, head=self.head, bias=self.bias)
        return self.vocabulary.logits_of(ids, z, columns)

    def ids_statistics(
        self, logits: Tensor, ids: Tensor, out: Mapping[str, Tensor], gradient: Tensor | None = None
    ) -> Tensor | None:
        """Fill `out` with statistics of the ids (see `slots.statistics`); take their logits out of the chunk.

        With `gradient`, also fill it with p_r d z_r / d x_r for all other ids r, up to a factor per row, and
        return that factor (n,).
        """
        z = self.pop_logits(logits, ids)
        stats = kernels.allocate_stats(
            ("entropy",) if "entropy" in out else (), len(self.targets), self.dtype, logits.device
        )
        if gradient is None:
            kernels.token_statistics(logits, self.targets, stats, **self.options)
        else:
            options = {"gradient": gradient, **self.options}
            scale = kernels.logprob_gradient(logits, self.targets, stats, **options)
        options = {"logits": logits, "targets": self.targets, **self.options}
        options["columns"] = self.vocabulary.to_local_ids(ids)
        options["exchange"] = self.vocabulary.gathered if self.vocabulary.sharded else None
        slots.statistics(z, ids, stats, out, **options)
        if gradient is None:
            return None
        # `gradient` is the softmax over the ids left in the chunk; `part` is the log of their share of the
        # whole softmax. Entries of the ids that were taken out are 0: their probability is 0, or with a
        # softcap its derivative is. If no id is left in the chunk, lse is -inf and the factor is 0.
        part = (stats.lse - out["lse"]) + (stats.lse_residual - out["lse_residual"])
        return torch.where(stats.lse == -torch.inf, 0.0, -scale * part.exp())
