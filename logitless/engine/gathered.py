"""The projection of a call whose loss is a function of k given ids per token: those columns alone."""

import torch
from torch import Tensor

from logitless.engine.chunk import Chunk
from logitless.engine.plan import Plan
from logitless.engine.projection import Projection
from logitless.kernels.gathered import add_rows, gathered_logits, weighted_rows


class GatheredProjection(Projection):
    """A chunk's `logits` (n, k) are the products of its ids; 0 for those of other ranks."""

    _columns: Tensor | None = None  # (n, k) of the chunk at hand; negative for none

    def new_buffer(self, plan: Plan, *, in_product: bool) -> tuple[Tensor, Tensor]:
        k = self.call.inputs["ids"].shape[1]
        products = self.weight.new_empty((plan.token_chunk, k), dtype=self.call.stat_dtype)
        return products, products

    def take(self, chunk: Chunk) -> None:
        super().take(chunk)
        columns, here = self.call.vocabulary.find(self.call.inputs["ids"][chunk.at], self.call.V)
        self._columns = torch.where(here, columns, -1)

    def project(self, chunk: Chunk) -> None:
        gathered_logits(chunk.features, self.weight, self._columns, chunk.logits)

    def backproject(self, chunk: Chunk) -> None:
        if self.needs.hidden or self.needs.layers:
            out = torch.empty_like(chunk.features)
            if isinstance(chunk.at, slice) and self.d_hidden is not None and self.layers is None:
                out = self.d_hidden[chunk.at]
            chunk.d_features = weighted_rows(self.weight, self._columns, chunk.gradient, out)

    def accumulate(self, total: Tensor, gradient: Tensor, features: Tensor, *, first: bool) -> None:
        add_rows(total, self._columns, gradient, features, first=first)
