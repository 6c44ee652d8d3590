"""Losses that depend only on the logits of k ids per token, which are the only logits that are computed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from logitless.engine.plan import Plan, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.base import batch_of
from logitless.engine.readers.ids import IdsReader
from logitless.engine.reduction import report
from logitless.kernels.ids.gathered import add_rows, first_slots, gathered_logits, weighted_rows


class GatheredProjection(Projection):
    """A projection in which `logits` (n, k) of a chunk are the products of k ids per row; 0 for ids of other
    ranks.

    Attributes:
        columns: (n, k) ids of the current chunk as rows of this rank's head, without duplicates; negative for
            empty slots, ids of other ranks and ignored tokens.
        teacher: (n, k) log-probabilities of the teacher for the current chunk, -inf in empty slots.
    """

    columns: Tensor
    teacher: Tensor

    def new_buffer(self, plan: Plan, *, fused_epilogue: bool) -> tuple[Tensor, Tensor]:
        k = self.call.inputs["ids"].shape[1]
        products = self.weight.new_empty((plan.token_chunk, k), dtype=self.call.stat_dtype)
        return products, products

    def take(self, chunk: Chunk) -> None:
        super().take(chunk)
        call = self.call
        inputs = call.inputs
        ids, values = inputs["ids"][chunk.row_index], inputs["teacher_logps"][chunk.row_index]
        row_range = call.vocabulary.row_range(call.V)
        self.columns, self.teacher = first_slots(ids, values, *row_range, call.stat_dtype)
        chunk.features = chunk.features.contiguous()
        if not call.loss.compact:
            self.columns.masked_fill_((chunk.targets == chunk.ignore_index)[:, None], -1)

    def project(self, chunk: Chunk) -> None:
        gathered_logits(chunk.features, self.weight, self.columns, chunk.logits)

    def backproject(self, chunk: Chunk) -> None:
        if self.needs.hidden or self.needs.layers:
            out = self.d_features(chunk)
            chunk.d_features = weighted_rows(self.weight, self.columns, chunk.gradient, out)

    def accumulate(self, total: Tensor, gradient: Tensor, features: Tensor, *, first: bool) -> None:
        add_rows(total, self.columns, gradient, features, first=first)


class GatheredReader(IdsReader):
    """The reader of a loss that depends only on the logits of the ids, because the log-sum-exp cancels.

    The statistic "logps" contains these logits.
    """

    def allocate(self, plan: Plan) -> dict[str, Tensor]:
        shape = (self.rows.count, plan.columns)
        device = self.call.targets.device
        names = ("logps", "teacher_logps")
        return {name: torch.empty(shape, dtype=self.call.stat_dtype, device=device) for name in names}

    def named_statistics(self) -> dict[str, Tensor]:
        """Return the statistics; statistics that the loss does not use are 0."""
        call = self.call
        count = self.rows.count
        shapes = call.loss.reader.statistic_shapes(call.loss, count, call.inputs)
        missing = {name: shape for name, shape in shapes.items() if name not in self.stats}
        zeros = {
            name: torch.zeros(shape, dtype=dtype or call.stat_dtype, device=call.targets.device)
            for name, (shape, dtype) in missing.items()
        }
        return zeros | self.stats

    def read(self, chunk: Chunk, projection: GatheredProjection) -> None:
        projection.project(chunk)
        if not chunk.reads:
            return
        call = self.call
        columns = projection.columns
        bias = None if call.bias is None else call.bias[columns.clamp(min=0).long()]
        z, _ = call.loss.logit_transform.logits(chunk.logits, bias)
        if call.vocabulary.sharded:
            z = call.vocabulary.reduce(torch.where(columns >= 0, z, 0.0))
        z = z.masked_fill_(projection.teacher == -torch.inf, -torch.inf)
        self._keep(chunk, {"logps": z, "teacher_logps": projection.teacher})

    def _keep(self, chunk: Chunk, statistics: Mapping[str, Tensor]) -> None:
        if chunk.count == self.rows.count:
            self.stats = dict(statistics)
        else:
            super()._keep(chunk, statistics)

    def evaluate(self, span: Span) -> None:
        call = self.call
        logits = self.stats["logps"]
        if not call.loss.has_gathered_kernel(logits.device, logits.dtype):
            super().evaluate(span)
            return
        rows = slice(span.start, span.stop)
        factors = self.factors.loss["tokens"]
        gradient = None
        if not isinstance(factors, Tensor):
            factors = torch.full((), factors, dtype=logits.dtype, device=logits.device)
        factors = factors.expand(span.stop - span.start)
        if call.trainable:
            if "logps" not in self.grads:
                self.grads["logps"] = torch.empty_like(logits)
            gradient = self.grads["logps"][rows]
        numbers = logits[rows], self.stats["teacher_logps"][rows]
        result = call.loss.gathered_kernel(*numbers, factors, gradient)
        terms, metrics = map(batch_of(call, self.rows, span).masked, result)
        self.reports.append(report(call.loss, (terms, metrics), self.factors))

    def write(self, chunk: Chunk, projection: Projection) -> None:
        rows = chunk.rows
        slope = self.call.loss.logit_transform.derivative_at(self.stats["logps"][rows])
        # Values in empty slots are arbitrary, and are not read.
        gradient = self.grads["logps"][rows]
        chunk.gradient = gradient if isinstance(slope, float) and slope == 1.0 else gradient * slope
