"""The reader of a loss of per-token statistics (`TokenLoss`): log p(target), log-sum-exp, entropy, ...

If the gradient of a row is a multiple of d logp / d logits, one kernel computes the statistics and writes d
logp / d logits. The evaluation of the loss determines the multiple later. It is applied as a row factor to
the (C, H) matrices of the products, which are narrower than the (C, V) chunk.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.plan import Pass, Plan, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.base import Costs, Reader, evaluate_statistics
from logitless.engine.readers.ids import SlotReader, best
from logitless.engine.spec import LossSpec
from logitless.kernels import fused_projection as fused
from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head import select as selection
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.statistics import DIFFERENTIABLE, NAMES
from logitless.kernels.matmul import piece_bytes, project
from logitless.parallel.sequences import WHOLE_SEQUENCES


class TokenReader(Reader):
    """The reader of a loss of per-token statistics.

    Attributes:
        stats: (rows,) each: written by `read`, or the known statistics.
        grads: (rows,) each, d loss / d statistic: written by `evaluate`, or the upstream gradients.
        is_multiple: whether the gradient of a row is a multiple of d logp / d logits, so that one kernel
            reads and writes.
        ref_weight: (V, H') head of the reference model, in the dtype of the products; None without one.
        ref_logps: (rows,) log-probabilities under the reference model, written by `read`.
        predictions: (rows,) int64 ids of the largest logits, written by `read`; None if not asked for.
        head_sums: see `fused_projection.head_sums`.
    """

    statistics: ClassVar = NAMES
    differentiable: ClassVar = DIFFERENTIABLE

    is_multiple = False
    ref_weight: Tensor | None = None
    ref_logps: Tensor | None = None
    predictions: Tensor | None = None
    head_sums: Tensor | None = None

    def resume(self, known: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> None:
        self.stats = TokenBuffers(**{name: x for name, x in known.items() if name != "predictions"})
        self.grads = TokenBuffers(**upstream)
        self.fused_epilogue = self.call.fp32_logits and can_fuse_epilogue(self.call, self.purpose)

    def start(self, plan: Plan) -> None:
        call = self.call
        count = self.rows.count
        loss = call.loss
        device = call.weight.device
        dtype = call.stat_dtype
        differentiates = loss.differentiates
        self.stats = kernels.allocate_stats((*differentiates, *loss.observes), count, dtype, device)
        # Allocated here, because `evaluate` may run on a side stream.
        grads = {name: torch.empty(count, dtype=dtype, device=device) for name in differentiates}
        self.grads = TokenBuffers(**grads)
        self.keeps_dlogp_dhidden = plan.strategy == "cached_grad"
        of_logps = self.keeps_dlogp_dhidden or tuple(differentiates) == ("logps",)
        self.is_multiple = of_logps and kernels.single_pass(call.dtype)
        self.fused_epilogue = call.fp32_logits and can_fuse_epilogue(call, self.purpose)
        if loss.return_predictions:
            self.predictions = torch.empty(count, dtype=torch.int64, device=device)
        if call.inputs.get("ref_hidden") is not None:
            self.ref_weight = call.inputs["ref_weight"].to(call.dtype)
            self.ref_logps = torch.empty(count, dtype=dtype, device=device)

    @staticmethod
    def takes_fp32_logits(loss: LossSpec, stat_dtype: torch.dtype) -> bool:
        """Whether the loss uses logits that are not rounded where one kernel can project and read.

        True if `logits_dtype` is `stat_dtype` (fp32). If `logits_dtype` is None, True for unreduced losses,
        whose log-probabilities are compared with those of other calls, and for losses without the gradient of
        lse.
        """
        if loss.logits_dtype is not None:
            return loss.logits_dtype == stat_dtype
        return loss.reduction == "none" or "lse" not in loss.differentiates

    @staticmethod
    def statistic_names(loss: LossSpec) -> tuple[str, ...]:
        names = kernels.stat_names((*loss.differentiates, *loss.observes))
        return (*names, "predictions") if loss.return_predictions else names

    @staticmethod
    def differentiable_names(loss: LossSpec) -> tuple[str, ...]:
        return (*loss.differentiates, "lse")  # the gradient of lse has no extra cost

    @classmethod
    def statistic_shapes(cls, loss: LossSpec, rows: int, inputs: Mapping) -> dict[str, tuple]:
        kinds = {"predictions": torch.int64}
        return {name: ((rows,), kinds.get(name)) for name in cls.statistic_names(loss)}

    @staticmethod
    def allows_cached_grad(loss: LossSpec) -> bool:
        return set(loss.differentiates) <= {"logps", "lse"}

    @staticmethod
    def costs(call: HeadCall, budget: int, purpose: Pass) -> Costs:
        allows_cached_grad = TokenReader.allows_cached_grad(call.loss)
        if call.fp32_logits and can_fuse_epilogue(call, purpose):
            keeps_dlogp_dhidden = allows_cached_grad and not (call.needs.weight or call.needs.bias)
            stored = call.trainable and (purpose is not Pass.STATISTICS or keeps_dlogp_dhidden)
            row = fused.row_bytes(call.weight.device, call.width, stored=stored)
            return Costs(row, 0, allows_cached_grad, rereads=False)
        device = call.weight.device
        dtype = call.logits_dtype
        width = call.width
        fixed = kernels.twin_bytes(device, dtype, width, budget)
        fixed += piece_bytes(device, call.dtype, dtype, width, call.hidden.shape[1])
        row = width * dtype.itemsize
        if call.loss.return_predictions:
            row += selection.row_bytes(width, 1)
            fixed = max(fixed, selection.fixed_bytes(device, dtype, width, 1, budget))
        return Costs(row, fixed, allows_cached_grad, rereads=False)

    def named_statistics(self) -> dict[str, Tensor]:
        predicted = {} if self.predictions is None else {"predictions": self.predictions}
        return dict(self.stats.items()) | predicted

    def read(self, chunk: Chunk, projection: Projection) -> None:
        if not chunk.reads:
            if not self.fused_epilogue:
                projection.project(chunk)
            return
        loss = self.call.loss
        vocabulary = self.call.vocabulary
        if self.ref_logps is not None:
            self._read_reference(chunk)
        if not self.fused_epilogue:
            projection.project(chunk)
        stats = self.stats[chunk.rows]
        if self.predictions is not None:
            how = (
                loss.logit_transform,
                self.call.bias,
                vocabulary,
                self.call.V,
                chunk.targets,
                chunk.ignore_index,
            )
            ids = best(chunk.logits, 1, SlotReader(*how, self.call.stat_dtype))
            self.predictions[chunk.rows] = ids[:, 0]
        options = {
            "transform": loss.logit_transform,
            "bias": self.call.bias,
            "ignore_index": chunk.ignore_index,
        }
        if self.fused_epilogue:
            options["sums"] = self._head_sums(projection)
        if chunk.writes and self.is_multiple:
            chunk.gradient = options["gradient"] = chunk.grad_buffer
            if self.fused_epilogue:
                factor = fused.read(chunk.features, projection.weight, chunk.targets, stats, **options)
            else:
                weights = None if stats.sum_logits is None else self._sum_weights()
                factor = kernels.logprob_gradient(
                    chunk.logits, chunk.targets, stats, class_weights=weights, **options
                )
            chunk.factor = vocabulary.merge_gradient(
                chunk.grad_buffer, chunk.targets, stats, factor, loss.logit_transform
            )
            if self.keeps_dlogp_dhidden and target_apart(loss):
                _clear_target(chunk)
            return
        if self.fused_epilogue:
            fused.read(chunk.features, projection.weight, chunk.targets, stats, gradient=None, **options)
        else:
            weights = self._sum_weights()
            kernels.token_statistics(chunk.logits, chunk.targets, stats, class_weights=weights, **options)
        vocabulary.merge_stats(stats, chunk.targets)

    def _head_sums(self, projection: Projection) -> Tensor | None:
        """`fused_projection.head_sums`, computed for the first chunk if the loss observes `sum_logits`.

        None also for calls of few rows, whose logits the kernel sums.
        """
        wanted = self.stats.sum_logits is not None and self.rows.count >= fused.HEAD_SUM_ROWS
        if self.head_sums is None and wanted:
            self.head_sums = fused.head_sums(
                projection.weight, self.call.bias, self.call.loss.logit_transform
            )
        return self.head_sums

    def _read_reference(self, chunk: Chunk) -> None:
        """Compute the log-probabilities of the chunk's rows under the reference, using the chunk's buffer."""
        call = self.call
        inputs = call.inputs
        hidden = inputs["ref_hidden"][chunk.row_index].to(call.dtype)
        stats = kernels.allocate_stats((), len(chunk.targets), self.ref_logps.dtype, chunk.targets.device)
        options = {
            "transform": call.loss.ref_transform,
            "bias": inputs["ref_bias"],
            "ignore_index": chunk.ignore_index,
        }
        if self.fused_epilogue:
            fused.read(hidden, self.ref_weight, chunk.targets, stats, gradient=None, **options)
        else:
            logits = project(hidden, self.ref_weight, chunk.logits)
            kernels.token_statistics(logits, chunk.targets, stats, **options)
        call.vocabulary.merge_stats(stats, chunk.targets)
        self.ref_logps[chunk.rows] = stats.logps

    def _sum_weights(self) -> Tensor | None:
        """(columns,) the weights of this rank's logits in `sum_logits`."""
        name = self.call.loss.sum_logits_weights
        return None if name is None else self.call.vocabulary.local(self.call.inputs[name])

    def evaluate(self, span: Span) -> None:
        call = self.call
        stats = self.stats[span.start : span.stop]
        constants = {}
        if self.ref_logps is not None:
            constants["ref_logps"] = self.ref_logps[span.start : span.stop]
        # A loss of single tokens is summed over the ranks once, after the chunk loop (`reduction.settled`).
        sequences = WHOLE_SEQUENCES if call.loss.scope == "token" else call.sequences
        gradients = evaluate_statistics(self, span, dict(stats.items()), constants, sequences)
        for name, gradient in gradients.items():
            if gradient.shape[0] == self.rows.count:
                setattr(self.grads, name, gradient.contiguous())
            else:
                getattr(self.grads, name)[span.start : span.stop] = gradient

    def write(self, chunk: Chunk, projection: Projection) -> None:
        loss = self.call.loss
        stats = self.stats[chunk.rows]
        grads = self.grads[chunk.rows]
        if self.keeps_dlogp_dhidden:
            grads = TokenBuffers(logps=torch.ones_like(stats.lse))
        options = {
            "transform": loss.logit_transform,
            "bias": self.call.bias,
            "ignore_index": chunk.ignore_index,
        }
        options |= {"gradient": chunk.grad_buffer, "class_weights": self._sum_weights()}
        if self.fused_epilogue:
            fused.write(chunk.features, projection.weight, chunk.targets, stats, grads, **options)
        else:
            kernels.logits_gradient(chunk.logits, chunk.targets, stats, grads, **options)
        chunk.gradient = chunk.grad_buffer
        if self.keeps_dlogp_dhidden and target_apart(loss):
            _clear_target(chunk)

    def row_factors(self, chunk: Chunk) -> tuple[Tensor, ...]:
        if chunk.factor is None:
            return ()
        if self.keeps_dlogp_dhidden:
            return (chunk.factor,)
        return chunk.factor, self.grads.logps[chunk.rows]

    def cached_grad_factor(self) -> Tensor | None:
        if self.grads.lse is not None or target_apart(self.call.loss):
            return None
        return torch.zeros_like(self.stats.lse) if self.grads.logps is None else self.grads.logps

    def scale_cached_grad(
        self, dlogp_dhidden: Tensor, at: slice | Tensor, rows: slice, projection: Projection
    ) -> Tensor:
        """d loss / d hidden of some rows, from `dlogp_dhidden`.

        For a loss of logps, `dlogp_dhidden` holds d logp / d hidden = W[target] - sum_v p_v W[v]. For a loss
        that also differentiates lse, it holds this sum without the terms of the target, -sum_{v != target}
        p_v W[v] (`target_apart`), and the terms of the target in d logp and d lse are added here. Otherwise,
        d lse / d hidden = W[target] - d logp / d hidden would lose digits by cancellation if it is small.
        """
        call = self.call
        stats = self.stats[rows]
        grads = self.grads[rows]
        g_logp = torch.zeros_like(stats.lse) if grads.logps is None else grads.logps
        g_lse = torch.zeros_like(stats.lse) if grads.lse is None else grads.lse
        g_target = g_lse
        if target_apart(call.loss):
            g_target = g_lse * stats.logps.exp() - g_logp * torch.expm1(stats.logps)
        targets = call.targets[at]
        supervised = targets != call.loss.ignore_index  # with compact=False a row may have no target
        g_target = torch.where(
            supervised, g_target * call.loss.logit_transform.derivative_at(stats.logps + stats.lse), 0.0
        )
        head_rows = call.vocabulary.rows_of(projection.weight, torch.where(supervised, targets, 0))
        # Type promotion computes this in the dtype of the statistics, which is wider, without copies in this
        # dtype.
        return (dlogp_dhidden * (g_logp - g_lse)[:, None]).addcmul_(g_target[:, None], head_rows)


def can_fuse_epilogue(call: HeadCall, purpose: Pass) -> bool:
    """Whether one kernel projects and reads in a pass with fp32 logits.

    This is not possible if a pass that solves the call needs the evaluation for more than a factor per row of
    d logp / d logits, if the loss needs a weighted sum of logits, or for predictions. The pass then stores
    logits in fp32.
    """
    loss = call.loss
    between = purpose is Pass.SOLVE and call.trainable and tuple(loss.differentiates) != ("logps",)
    weights = loss.sum_logits_weights
    has_sum = "sum_logits" in loss.differentiates or "sum_logits" in loss.observes
    summed = has_sum and weights is not None and call.inputs[weights] is not None
    return not (between or summed or loss.return_predictions)


def target_apart(loss: LossSpec) -> bool:
    """Whether the kept d logp / d hidden excludes the terms of the target; see `scale_cached_grad`."""
    return "lse" in loss.differentiates


def _clear_target(chunk: Chunk) -> None:
    """Zero the target's entry in each row of a chunk's gradient, if the target is on this rank."""
    columns = chunk.targets
    gradient = chunk.gradient
    has_target = (columns >= 0) & (columns < gradient.shape[1]) & (columns != chunk.ignore_index)
    at = torch.where(has_target, columns, 0)[:, None]
    gradient.scatter_(1, at, torch.where(has_target[:, None], 0.0, gradient.gather(1, at)))
