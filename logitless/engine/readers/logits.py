"""The reader of a `LogitsLoss`: a differentiable function of a chunk of logits, or a kernel for it.

The loss is a sum over tokens. Therefore the loss of a chunk and its gradient are computed directly after
product 1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.budget import measured_row_bytes
from logitless.engine.call import HeadCall
from logitless.engine.compiled import compiled_chunk_function
from logitless.engine.evaluation import ChunkInputs, inputs_of_terms
from logitless.engine.hooks import no_hooks
from logitless.engine.plan import Pass, Plan, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.base import METRICS, Costs, Reader, batch_of, logits_bytes
from logitless.engine.reduction import Factors, Report, metric_factors, report, settled
from logitless.engine.rows import Rows
from logitless.engine.spec import LossSpec
from logitless.engine.terms import unreduced
from logitless.kernels.matmul import project


class LogitsReader(Reader):
    """The reader of a `LogitsLoss`.

    Attributes:
        values: (rows,) per-token losses, with reduction="none".
        upstream: (rows,) gradients of the values, in `Pass.GRADIENTS`.
    """

    values: Tensor | None = None
    upstream: Tensor | None = None
    _teacher_buffer: Tensor | None = None
    _gradient: Tensor | None = None  # gradient of the last chunk that was evaluated

    def resume(self, known: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> None:
        self.factors = _unreduced_factors(self.call, self.rows)
        self.upstream = upstream["values"].contiguous()

    def start(self, plan: Plan) -> None:
        if self.purpose is Pass.STATISTICS:
            call = self.call
            self.factors = _unreduced_factors(call, self.rows)
            self.values = torch.zeros(self.rows.count, dtype=call.stat_dtype, device=call.targets.device)

    @staticmethod
    def statistic_names(loss: LossSpec) -> tuple[str, ...]:
        return ("values", METRICS) if loss.metric_names else ("values",)

    @staticmethod
    def differentiable_names(loss: LossSpec) -> tuple[str, ...]:
        return ("values",)

    @classmethod
    def statistic_shapes(cls, loss: LossSpec, rows: int, inputs: Mapping) -> dict[str, tuple]:
        shapes = {"values": (rows,), METRICS: (len(loss.metric_names),)}
        return {name: (shapes[name], None) for name in cls.statistic_names(loss)}

    @staticmethod
    def costs(call: HeadCall, budget: int, purpose: Pass) -> Costs:
        row, fixed = logits_bytes(call)
        return Costs(row + measured_row_bytes(call), fixed, allows_cached_grad=False, rereads=True)

    def named_statistics(self) -> dict[str, Tensor]:
        names = self.call.loss.metric_names
        if not names:
            return {"values": self.values}
        if not self.reports:
            if not self.call.loss.sequences.sliced:
                return {"values": self.values, METRICS: self.values.new_zeros(len(names))}
            self.evaluate(Span(0, 0))  # the other ranks all-reduce, so this rank must too
        # A copy, because the outputs of an operator must not be views of each other.
        return {
            "values": self.values,
            METRICS: settled(self.call.loss, self.reports, self.call.stat_dtype)[1:].clone(),
        }

    def read(self, chunk: Chunk, projection: Projection) -> None:
        projection.project(chunk)
        if chunk.reads:
            written = chunk if chunk.writes else None
            self._evaluate_logits(Span(chunk.start, chunk.stop), chunk.logits, written)

    def evaluate(self, span: Span) -> None:
        if span.stop == span.start:
            weight = self.call.weight
            self._evaluate_logits(span, weight.new_empty((0, weight.shape[0]), dtype=self.call.logits_dtype))

    def _evaluate_logits(self, span: Span, logits: Tensor, written: Chunk | None = None) -> None:
        """Compute the loss of a span from its logits and, if `written` is its chunk, their gradient."""
        call = self.call
        batch = batch_of(call, self.rows, span)
        if call.loss.teacher:
            taught = call.inputs["teacher_hidden"] is not None
            batch.teacher_logits = self._teacher_logits(span, logits) if taught else None
        upstream = None if self.upstream is None else self.upstream[span.start : span.stop]
        if call.loss.has_kernel(logits.device, logits.dtype, call.inputs):
            self._by_kernel(span, logits, batch, upstream, written)
        else:
            inputs = {name: detached(getattr(batch, name)) for name in inputs_of_terms(call.loss)}
            chunk_inputs = ChunkInputs(
                bias=detached(call.bias),
                targets=batch.given_targets.detach(),
                inputs=inputs,
                factors=self.factors.vector(logits),
                units=self.factors.units,
                upstream=detached(upstream),
            )
            evaluate = compiled_chunk_function(call.loss, written is not None, call.vocabulary)
            with no_hooks():
                self._gradient, table, values = evaluate(logits.detach(), chunk_inputs)
            self._keep(span, Report(table), values)

    def _teacher_logits(self, span: Span, logits: Tensor) -> Tensor:
        hidden, weight = self.call.inputs["teacher_hidden"], self.call.inputs["teacher_weight"]
        rows = logits.shape[0]
        if self._teacher_buffer is None or self._teacher_buffer.shape[0] < rows:
            self._teacher_buffer = logits.new_empty(rows, weight.shape[0])
        features = hidden[self.rows.at(span.start, span.stop)].to(weight.dtype)
        return project(features, weight, self._teacher_buffer[:rows])

    def _by_kernel(
        self, span: Span, logits: Tensor, batch: Batch, upstream: Tensor | None, written: Chunk | None
    ) -> None:
        factors = gradient = None
        if written is not None:
            factor = self.factors.loss["tokens"] if upstream is None else upstream
            if isinstance(factor, Tensor):
                factors = factor.to(torch.float32).expand(batch.given_targets.shape)
            else:
                options = {"dtype": torch.float32, "device": logits.device}
                factors = torch.full(batch.given_targets.shape, factor, **options)
            if batch.ignored is not None:
                factors = factors.masked_fill(batch.ignored, 0.0)
            gradient = written.grad_buffer
        terms, metrics = self.call.loss.kernel(logits, self.call.bias, batch, factors, gradient)
        self._gradient = gradient
        result = batch.masked(terms), batch.masked(metrics)
        values = None if self.values is None else unreduced(result[0])
        self._keep(span, report(self.call.loss, result, self.factors), values)

    def _keep(self, span: Span, report: Report, values: Tensor | None) -> None:
        self.reports.append(report)
        if self.values is not None:
            self.values[span.start : span.stop] = values

    def write(self, chunk: Chunk, projection: Projection) -> None:
        chunk.gradient = self._gradient.to(self.call.dtype)
        self._gradient = None


def _unreduced_factors(call: HeadCall, rows: Rows) -> Factors:
    return metric_factors(rows.tokens, rows.chosen_tokens, call.sequence_count, call.stat_dtype)


def detached(x: Tensor | None) -> Tensor | None:
    """`x`, not as a view: for a view, Dynamo also compares the dimensions of its base with those that it
    compiled."""
    return None if x is None else x.detach()
