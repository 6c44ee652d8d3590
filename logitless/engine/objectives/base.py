"""`Objective`: the protocol between the chunk loop and a kind of loss."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.call import HeadCall
from logitless.engine.plan import Pass, Plan, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.rows import Rows
from logitless.engine.spec import PER_TOKEN, LossSpec, Role
from logitless.engine.terms import Factors, Sums, UnitFactors, means
from logitless.kernels.matmul import piece_bytes


class Report(NamedTuple):
    """The reduced loss of a slice, up to the deferred factor, and the sums of its metrics."""

    total: Tensor  # 0-d
    metrics: Sums


class Costs(NamedTuple):
    """The memory of an objective in a pass, and the properties that determine the strategy."""

    row_bytes: int  # bytes per row of logits and temporaries
    fixed_bytes: int  # bytes of temporaries that do not depend on the number of rows
    linear_in_logps: bool  # whether the loss depends on the logits only through log p(target) and lse
    # Whether Pass.GRADIENTS must read a chunk again to compute its gradient.
    rereads: bool
    columns: int = 0  # number of logits that the loss needs per row; 0: all
    teacher_bytes: int = 0  # bytes per row of a teacher in `teacher_hidden` (`LossSpec.teacher_rows`)


class Objective(Protocol):
    """The loss of a call, with the methods that the chunk loop calls."""

    # Names of the per-token statistics that a loss may observe, and that it may differentiate.
    statistics: ClassVar[tuple[str, ...]]
    differentiable: ClassVar[tuple[str, ...]]

    rows: Rows
    reports: list[Report]
    fused_epilogue: bool  # whether one kernel projects a chunk and reads it, without storing its logits

    @staticmethod
    def takes_fp32_logits(loss: LossSpec, dtype: torch.dtype) -> bool:
        """Whether the loss uses fp32 logits for products in `dtype`, if one kernel projects and reads."""

    def fill(self, chunk: Chunk, head: Projection) -> None:
        """Project the chunk (product 1: logits = features @ weight.T).

        Also computes the reference's log-probabilities or the teacher's logits if the loss needs them, the
        per-token statistics if `chunk.reads` is set, and `chunk.gradient` if one kernel computes
        statistics and gradient.
        """

    def evaluate(self, span: Span) -> None:
        """Compute the loss of a span of rows, and its gradient with respect to the statistics."""

    def write(self, chunk: Chunk, head: Projection) -> None:
        """Overwrite the chunk's logits with their gradient."""

    def row_factors(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """The row factors (C,), at most two, by which the chunk's gradient must still be multiplied."""

    def named_statistics(self) -> dict[str, Tensor]:
        """Return the statistics in `statistic_names` by name: (rows, ...) per token, or 0-d."""

    def scale_cached_grad(
        self, dlogp_dhidden: Tensor, at: slice | Tensor, rows: slice, head: Projection
    ) -> Tensor:
        """(n, H) d loss / d hidden of some rows, given d logp / d hidden (strategy cached_grad)."""

    def cached_grad_factor(self) -> Tensor | None:
        """(rows,) factors from d logp / d hidden to d loss / d hidden; None: use `scale_cached_grad`."""

    @classmethod
    def for_loss(cls, call: HeadCall, rows: Rows, plan: Plan, factors: UnitFactors) -> Self:
        """Return the objective of `Pass.SOLVE`, which computes loss and gradients."""

    @classmethod
    def for_stats(cls, call: HeadCall, rows: Rows, plan: Plan) -> Self:
        """Return the objective of `Pass.STATISTICS`, which computes statistics."""

    @classmethod
    def for_backward(
        cls, call: HeadCall, rows: Rows, statistics: Mapping[str, Tensor], upstream: Mapping[str, Tensor]
    ) -> Self:
        """Return the objective of `Pass.GRADIENTS`, given statistics (rows,) and their gradients."""

    @staticmethod
    def statistic_names(loss: LossSpec) -> tuple[str, ...]:
        """Names of the statistics that `Pass.STATISTICS` returns, in order."""

    @staticmethod
    def differentiable_names(loss: LossSpec) -> tuple[str, ...]:
        """Names of the statistics that carry a gradient."""

    @classmethod
    def statistic_shapes(
        cls, loss: LossSpec, rows: int, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Shape (rows, ...) or () and dtype of each statistic; None for `HeadCall.stat_dtype`."""

    @staticmethod
    def linear_in_logps(loss: LossSpec) -> bool:
        """Whether the loss depends on the logits only through log p(target) and lse."""

    @staticmethod
    def costs(call: HeadCall, budget: int, purpose: Pass) -> Costs:
        """The memory of the objective in a pass with `budget` bytes, and its properties."""


def logits_bytes(call: HeadCall) -> tuple[int, int]:
    """(bytes per row, bytes that do not depend on the number of rows) of a chunk's logits and product."""
    shape = call.logits_dtype, call.width, call.hidden.shape[1]
    return call.width * call.logits_dtype.itemsize, piece_bytes(call.weight.device, call.dtype, *shape)


def batch_of(call: HeadCall, rows: Rows, span: Span) -> Batch:
    """The targets and inputs of a loss, cut to a span of rows."""
    at = rows.at(span.start, span.stop)
    loss = call.loss
    inputs = {}
    sequences = None
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


def settled(call: HeadCall, reports: Sequence[Report], factors: Factors) -> tuple[Tensor, list[Tensor]]:
    """Combine all slices: (loss up to the deferred factor, metrics in the order of `metric_names`)."""
    first, *remaining = [report.total for report in reports]
    total = sum(remaining, first)  # starting from 0 would cost one more kernel
    if call.loss.scope == "token" and call.sequences.sliced:
        # With cp_group, this is the only all-reduce for a loss of single tokens. There is none per chunk,
        # because ranks may have different numbers of chunks.
        total = call.sequences.sum(total)
    metrics = means([report.metrics for report in reports], factors, call.sequences)
    total = total.to(call.stat_dtype)  # the total of a `LogitsLoss` is wider if `logits_dtype` is
    return total, [metrics[name].to(call.stat_dtype) for name in call.loss.metric_names]
