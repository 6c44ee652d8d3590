"""`Reader`: computes the statistics of a chunk of logits, and the gradient of the loss with respect to it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.call import HeadCall
from logitless.engine.compiled import evaluate
from logitless.engine.plan import Pass, Plan, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.reduction import Factors, Report
from logitless.engine.rows import Rows
from logitless.engine.spec import PER_TOKEN, LossSpec, Role
from logitless.kernels.head.scale import scale
from logitless.kernels.matmul import piece_bytes
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences

# Number of rows that `Reader.finish_cached_grad` scales at a time. Its temporaries (rows, H) are small
# compared with d_hidden.
SCALED_ROWS = 2048

# Name of the one statistic that is not per token: the metrics of a `LogitsLoss` (metrics,). They are one
# tensor, because the outputs of an operator must not be views of each other.
METRICS = "metrics"


class Costs(NamedTuple):
    """The memory of a reader in a pass, and the properties that determine the strategy."""

    row_bytes: int  # bytes per row of logits and temporaries
    fixed_bytes: int  # bytes of temporaries that do not depend on the number of rows
    allows_cached_grad: bool  # see `Reader.allows_cached_grad`
    # Whether Pass.GRADIENTS must read a chunk again to compute its gradient.
    rereads: bool
    columns: int = 0  # number of logits that the loss needs per row; 0: all
    teacher_bytes: int = 0  # bytes per row of a teacher in `teacher_hidden` (`LossSpec.teacher_rows`)


class Reader:
    """How a chunk of logits becomes statistics, and how gradients of statistics become gradients of logits.

    A loss class names its reader class. A reader is made for one pass over one head. The chunk loop
    (`engine.base.run_spans`) calls `read`, which also projects the chunk, `evaluate` and `write`; the methods
    of the class tell what a pass needs before it runs.

    Attributes:
        call: the call of the head.
        rows: the rows that the pass projects.
        purpose: the kind of the pass.
        factors: the factors of the loss's terms, in `Pass.SOLVE`; else None.
        reports: the loss and the metrics of each span that was evaluated.
        fused_epilogue: whether one kernel projects a chunk and reads it, without storing its logits.
        keeps_dlogp_dhidden: whether d logp / d hidden is written, and scaled later (strategy cached_grad).
    """

    # Names of the per-token statistics that a loss may observe, and that it may differentiate.
    statistics: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[tuple[str, ...]] = ()
    gathers: ClassVar[bool] = False  # whether `of` may return a class that gathers columns

    fused_epilogue = False
    keeps_dlogp_dhidden = False

    def __init__(
        self,
        call: HeadCall,
        rows: Rows,
        purpose: Pass,
        plan: Plan | None,
        factors: Factors | None = None,
        known: Mapping[str, Tensor] | None = None,
        upstream: Mapping[str, Tensor] | None = None,
    ):
        """
        Args:
            call: the call of the head.
            rows: the rows to project.
            purpose: the kind of the pass.
            plan: the plan of the pass; None if it projects nothing.
            factors: see the class.
            known: (rows, ...) the statistics by name, in `Pass.GRADIENTS`.
            upstream: (rows, ...) their gradients by name, in `Pass.GRADIENTS`.
        """
        self.call = call
        self.rows = rows
        self.purpose = purpose
        self.factors = factors
        self.reports: list[Report] = []
        if purpose is Pass.GRADIENTS:
            self.resume(known, upstream)
        else:
            self.start(plan)

    def start(self, plan: Plan) -> None:
        """Prepare a pass that computes statistics: allocate them."""
        raise NotImplementedError

    def resume(self, known: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> None:
        """Prepare `Pass.GRADIENTS`, from the statistics (rows, ...) and their gradients by name."""
        raise NotImplementedError

    # -- What a pass needs

    @classmethod
    def of(cls, call: HeadCall) -> "type[Reader]":
        """The reader class of a call of a loss that names this class."""
        return cls

    @staticmethod
    def takes_fp32_logits(loss: LossSpec, stat_dtype: torch.dtype) -> bool:
        """Whether the loss uses logits that are not rounded where one kernel can project and read.

        `stat_dtype` is the dtype of the statistics, in which that kernel has the logits.
        """
        return False

    @staticmethod
    def allows_cached_grad(loss: LossSpec) -> bool:
        """Whether d loss / d hidden follows from d logp / d hidden and the gradients of the statistics.

        If so, a pass with a frozen head keeps d logp / d hidden, and scales it when these gradients are known
        (strategy cached_grad). The loss then depends on the logits only through log-probabilities, lse and,
        for several ids per token, the probability of all other ids.
        """
        return False

    @staticmethod
    def costs(call: HeadCall, budget: int, purpose: Pass) -> Costs:
        """The memory of the reader in a pass with `budget` bytes, and its properties."""
        raise NotImplementedError

    @staticmethod
    def statistic_names(loss: LossSpec) -> tuple[str, ...]:
        """Names of the statistics that `Pass.STATISTICS` returns, in order."""
        raise NotImplementedError

    @staticmethod
    def differentiable_names(loss: LossSpec) -> tuple[str, ...]:
        """Names of the statistics that carry a gradient."""
        raise NotImplementedError

    @classmethod
    def statistic_shapes(
        cls, loss: LossSpec, rows: int, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Shape and dtype of each statistic; None for `HeadCall.stat_dtype`."""
        raise NotImplementedError

    # -- The chunk loop

    def read(self, chunk: Chunk, projection: Projection) -> None:
        """Project the chunk (product 1: logits = features @ weight.T) and, if `chunk.reads`, read it.

        With a fused epilogue, a chunk that is not read is projected by `write` instead.

        To read a chunk is to compute its per-token statistics, and the log-probabilities of the reference or
        the teacher's logits if the loss needs them. If `chunk.writes` is set, and one kernel computes
        statistics and gradient, `chunk.gradient` is also written.

        Args:
            chunk: the rows.
            projection: the projection of the pass, which has the product; `call.loss.logit_transform` is the
                transform of the logits.
        """
        raise NotImplementedError

    def evaluate(self, span: Span) -> None:
        """Compute the loss of a span of rows, and its gradient with respect to the statistics.

        A `LogitsReader` does so in `read`, chunk by chunk; its `evaluate` is for a call without rows.
        """
        raise NotImplementedError

    def write(self, chunk: Chunk, projection: Projection) -> None:
        """Set `chunk.gradient`, the gradient of the chunk's logits up to the row factors.

        It is written over the logits (`chunk.grad_buffer`), except by the readers of gathered logits, and of
        a `LogitsLoss` without a kernel, whose gradient is a new tensor.
        """
        raise NotImplementedError

    def row_factors(self, chunk: Chunk) -> tuple[Tensor, ...]:
        """The row factors (C,), at most two, by which the chunk's gradient must still be multiplied."""
        return ()

    # -- The results

    def named_statistics(self) -> dict[str, Tensor]:
        """Return the statistics in `statistic_names` by name: (rows, ...) per token, or `METRICS`."""
        raise NotImplementedError

    def finish_cached_grad(self, dlogp_dhidden: Tensor, out: Tensor, projection: Projection) -> None:
        """Compute d_hidden from d logp / d hidden and the gradients of the statistics (strategy cached_grad).

        Args:
            dlogp_dhidden: (N, H) d logp / d hidden.
            out: (N, H) d_hidden, written; may be `dlogp_dhidden`.
            projection: the projection of the pass.
        """
        rows = self.rows
        factor = self.cached_grad_factor()
        if factor is not None:
            # Rows that were not projected get a factor of 0.
            scale(dlogp_dhidden, rows.scattered(factor, dlogp_dhidden.shape[0]), out)
            return
        for start in range(0, rows.count, SCALED_ROWS):
            stop = min(start + SCALED_ROWS, rows.count)
            at = rows.at(start, stop)
            scaled = self.scale_cached_grad(dlogp_dhidden[at], at, slice(start, stop), projection).to(
                out.dtype
            )
            if isinstance(at, slice):
                out[at] = scaled
            else:
                out.index_copy_(0, at, scaled)

    def cached_grad_factor(self) -> Tensor | None:
        """(rows,) factors from d logp / d hidden to d loss / d hidden; None: use `scale_cached_grad`."""
        return None

    def scale_cached_grad(
        self, dlogp_dhidden: Tensor, at: slice | Tensor, rows: slice, projection: Projection
    ) -> Tensor:
        """(n, H) d loss / d hidden of the rows `rows` of the statistics, which are the rows `at` of the call.

        `dlogp_dhidden` (n, H) has the d logp / d hidden of these rows.
        """
        raise NotImplementedError


def evaluate_statistics(
    reader: Reader,
    span: Span,
    statistics: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] = MappingProxyType({}),
    sequences: WholeSequences = WHOLE_SEQUENCES,
) -> dict[str, Tensor]:
    """Evaluate a loss of statistics on a span, and append its report. Returns the gradients by name.

    Args:
        reader: the reader of the pass.
        span: the rows.
        statistics: (n, ...) the statistics of these rows by name.
        constants: additional values of these rows, attributes of the batch.
        sequences: over which ranks the terms are summed now.
    """
    call = reader.call
    batch = batch_of(call, reader.rows, span, constants)
    gradients, report = evaluate(
        call.loss, statistics, batch, reader.factors, sequences, differentiate=call.trainable
    )
    reader.reports.append(report)
    return gradients


def logits_bytes(call: HeadCall) -> tuple[int, int]:
    """(bytes per row, bytes that do not depend on the number of rows) of a chunk's logits and product."""
    shape = call.logits_dtype, call.width, call.hidden.shape[1]
    return call.width * call.logits_dtype.itemsize, piece_bytes(call.weight.device, call.dtype, *shape)


def batch_of(
    call: HeadCall, rows: Rows, span: Span, constants: Mapping[str, Tensor] = MappingProxyType({})
) -> Batch:
    """The targets and inputs of a loss, cut to a span of rows, and `constants` (n, ...) of these rows."""
    at = rows.at(span.start, span.stop)
    loss = call.loss
    inputs = {}
    sequences = None
    for name, role in loss.roles.items():
        x = call.inputs[name]
        if role is Role.FEATURES:
            continue  # the reader projects them
        if x is not None and role in PER_TOKEN:
            x = x[at]
        elif x is not None and role is Role.SEQUENCE:
            if sequences is None:
                sequences = rows.sequences(span.first, span.last, x.device)
            # New memory in both cases, which terms may change in place.
            x = x.clone() if isinstance(sequences, slice) else x[sequences]
        inputs[name] = x
    inputs |= constants
    segments = rows.segments(span.stop - span.start, span.first, span.last, call.targets.device)
    ignore_index = None if loss.compact else loss.ignore_index
    shared = {"vocabulary": call.vocabulary, "sequences": call.sequences}
    return Batch(call.targets[at], call.V, inputs, segments, ignore_index=ignore_index, **shared)
