"""`Objective`: what happens to a chunk of logits.

A loss names the kind that evaluates it: of per-token numbers, or of logits.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.call import Call
from logitless.engine.chunk import Chunk
from logitless.engine.plan import Pass, Plan, Span
from logitless.engine.projection import Projection
from logitless.engine.rows import Rows
from logitless.engine.spec import PER_TOKEN, LossSpec, Role
from logitless.engine.terms import Factors, Sums, UnitFactors, means
from logitless.kernels.matmul import piece_bytes


class Report(NamedTuple):
    """A slice's share of the loss, up to the deferred factor, and of the metrics."""

    total: Tensor  # 0-d
    metrics: Sums


class Costs(NamedTuple):
    """What an objective needs, and what a plan must know of it."""

    row_bytes: int  # memory a row, of its logits and beside them
    fixed_bytes: int  # memory that does not grow with the rows
    linear_in_logps: bool  # whether the loss reaches the logits through log p(target) and lse alone
    # Whether the gradient of a chunk comes from reading it again, for numbers handed out before.
    rereads: bool
    columns: int = 0  # of the head that are multiplied with for each row, where those are all that it takes


class Objective(Protocol):
    """The loss of one call, as the loop uses it."""

    # Names of the per-token numbers that a loss may observe, and of those that it may differentiate.
    statistics: ClassVar[tuple[str, ...]]
    differentiable: ClassVar[tuple[str, ...]]

    rows: Rows
    reports: list[Report]
    in_product: bool  # whether one kernel projects a chunk and reads it, so that its logits are nowhere

    @staticmethod
    def takes_unrounded(loss: LossSpec, dtype: torch.dtype) -> bool:
        """Whether it is to see logits in `dtype` that were never rounded, where a kernel reads them in the
        product."""

    def fill(self, chunk: Chunk, head: Projection) -> None:
        """Reference or teacher, product 1, and numbers if the step reads.

        The gradient too, where one kernel computes both.
        """

    def evaluate(self, span: Span) -> None:
        """The loss of a span of rows, and its gradient by what was read."""

    def write(self, chunk: Chunk, head: Projection) -> None:
        """Turn the logits into their gradient."""

    def row_factors(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """(C,) each, two at most: what the rows of the chunk's gradient still lack."""

    def numbers(self) -> dict[str, Tensor]:
        """What was read, by the names of `number_names`: (rows, ...) per token, or 0-d."""

    def scaled(self, vectors: Tensor, at: slice | Tensor, rows: slice, head: Projection) -> Tensor:
        """(n, H) d loss / d hidden of some rows, from what the strategy row_scaled kept of them."""

    def vector_factor(self) -> Tensor | None:
        """(rows,) what is left to multiply those vectors by; None where that is not all they lack."""

    @classmethod
    def solving(cls, call: Call, rows: Rows, plan: Plan, factors: UnitFactors) -> Self:
        """For the loss and its gradients."""

    @classmethod
    def reading(cls, call: Call, rows: Rows, plan: Plan) -> Self:
        """For numbers that are handed out."""

    @classmethod
    def writing(
        cls, call: Call, rows: Rows, numbers: Mapping[str, Tensor], upstream: Mapping[str, Tensor]
    ) -> Self:
        """For the gradients that belong to numbers (rows,) handed out before."""

    @staticmethod
    def number_names(loss: LossSpec) -> tuple[str, ...]:
        """Names of the numbers that are handed out, in order."""

    @staticmethod
    def differentiable_names(loss: LossSpec) -> tuple[str, ...]:
        """Those of them that carry a gradient."""

    @classmethod
    def number_shapes(
        cls, loss: LossSpec, rows: int, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Shape of each number, (rows, ...) or 0-d, and its dtype; None for that of statistics."""

    @staticmethod
    def linear_in_logps(loss: LossSpec) -> bool:
        """Whether the loss reaches the logits through log p(target) and lse alone."""

    @staticmethod
    def costs(call: Call, budget: int, purpose: Pass) -> Costs:
        """What the objective needs in a pass, within a budget of bytes."""


def logits_bytes(call: Call) -> tuple[int, int]:
    """What the products of a chunk take: memory a row, and memory that does not grow with the rows."""
    shape = call.logits_dtype, call.width, call.hidden.shape[1]
    return call.width * call.logits_dtype.itemsize, piece_bytes(call.weight.device, call.dtype, *shape)


def batch_of(call: Call, rows: Rows, span: Span) -> Batch:
    """The loss's inputs, cut to a span."""
    at, loss = rows.at(span.start, span.stop), call.loss
    inputs, sequences = {}, None
    for name, role in loss.roles.items():
        x = call.inputs[name]
        if role is Role.FEATURES:
            continue  # the objective projects them
        if x is not None and role in PER_TOKEN:
            x = x[at]
        elif x is not None and role is Role.SEQUENCE:
            sequences = rows.sequences(span.first, span.last) if sequences is None else sequences
            x = x[sequences]
        inputs[name] = x
    segments = None
    if rows.sequence_sizes is not None:
        segments = rows.segments(span.stop - span.start, span.first, span.last)
    ignore_index = None if loss.compact else loss.ignore_index
    shared = {"vocabulary": call.vocabulary, "sequences": call.sequences}
    return Batch(call.targets[at], call.V, inputs, segments, ignore_index=ignore_index, **shared)


def settled(call: Call, reports: Sequence[Report], factors: Factors) -> tuple[Tensor, list[Tensor]]:
    """The loss up to the deferred factor, and the metrics by `metric_names`: of all slices."""
    first, *others = [report.total for report in reports]
    total = sum(others, first)  # without a first one `sum` would begin with 0, one kernel more
    if call.loss.scope == "token" and call.sequences.sliced:
        # Ranks with slices of sequences whose tokens stand alone meet here and nowhere else: how many chunks
        # a rank walks is its own affair.
        total = call.sequences.sum(total)
    found = means([report.metrics for report in reports], factors, call.sequences)
    total = total.to(call.stat_dtype)  # a loss of logits in a wider dtype than the operands' is wider
    return total, [found[name].to(call.stat_dtype) for name in call.loss.metric_names]
