"""The reader of losses of draft models, which compare the rows of several steps with rows of a verifier.

Each row of a call is a pair of a draft row and a verifier row. The pairs are sorted by the verifier row
(`teacher_rows.py`). Therefore the pairs of a chunk are compared with consecutive rows of the verifier, and
each of these rows is projected once for all steps. Loss, acceptance rate and agreement of all pairs are kept,
because the metrics depend on whole chains of pairs and are computed at the end.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.plan import Pass, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.base import METRICS, Costs, logits_bytes
from logitless.engine.readers.logits import LogitsReader
from logitless.engine.reduction import Report
from logitless.engine.spec import LossSpec
from logitless.kernels.head import divergence, select
from logitless.kernels.head.cross_entropy import allocate_stats, token_statistics, twin_bytes
from logitless.kernels.matmul import piece_bytes, project

# Bytes of vectors (statistics, factors, labels, indices) for a pair or for a verifier row.
VECTOR_BYTES = 64
# Bytes of the statistics that the ranks of a sharded vocabulary exchange for a pair or a verifier row.
SHARD_BYTES = 256


class Verifier(NamedTuple):
    """The rows of the verifier with which a chunk is compared."""

    logits: Tensor  # (R, D) logits of the draft's ids
    # Log-sum-exp over all ids of the verifier, and its rounding error; None: the softmax is over the ids of
    # `logits`.
    lse: tuple[Tensor, Tensor] | None = None
    # (R,) the draft's column for the verifier's most probable id; -1 if the draft does not have the id.
    label: Tensor | None = None
    covered: Tensor | None = None  # (R,) bool, whether the draft has that id; None: always


class SpeculatorReader(LogitsReader):
    """The reader of `SpeculatorLoss`."""

    pair_stats: Tensor | None = None  # (rows, 4): 1, loss, acceptance rate and agreement of each pair
    _selected_buffer: Tensor | None = None

    @staticmethod
    def costs(call: HeadCall, budget: int, purpose: Pass) -> Costs:
        row, fixed = logits_bytes(call)
        dtype = call.logits_dtype
        device = call.weight.device
        D = call.width
        teacher = call.inputs["teacher_weight"]
        V = _verifier_width(call)
        teacher_bytes = V * dtype.itemsize
        fixed += piece_bytes(device, teacher.dtype, dtype, V, teacher.shape[1])
        temporaries = [divergence.fixed_bytes(device, dtype, D, budget)]
        if _reads_all_ids(call):
            teacher_bytes += D * dtype.itemsize
            temporaries.append(twin_bytes(device, dtype, V, budget))
        if call.vocabulary.sharded:
            row += select.row_bytes(D, 1) + SHARD_BYTES
            teacher_bytes += select.row_bytes(V, 1) + SHARD_BYTES
            temporaries.append(select.fixed_bytes(device, dtype, max(D, V), 1, budget))
        elif _reads_all_ids(call) or _labels_itself(call):
            teacher_bytes += select.row_bytes(V, 1)
            temporaries.append(select.fixed_bytes(device, dtype, V, 1, budget))
        return Costs(
            row + VECTOR_BYTES,
            fixed + max(temporaries),
            allows_cached_grad=False,
            rereads=True,
            teacher_bytes=teacher_bytes + VECTOR_BYTES,
        )

    def named_statistics(self) -> dict[str, Tensor]:
        return {"values": self.values, METRICS: self._metrics()}

    def read(self, chunk: Chunk, projection: Projection) -> None:
        projection.project(chunk)
        if chunk.reads:
            self._compare(chunk)

    def evaluate(self, span: Span) -> None:
        if not self.rows.count:
            self._report(torch.zeros((), dtype=self.call.stat_dtype, device=self.call.targets.device))

    def _compare(self, chunk: Chunk) -> None:
        """Compare a chunk of logits with the verifier's logits, and overwrite them with the gradient."""
        call = self.call
        loss = self.call.loss
        rows = chunk.rows
        inputs = call.inputs
        first, last = self.rows.teacher.between(chunk.start, chunk.stop)
        verifier = self._verifier(self.rows.teacher.index[first:last], chunk.logits)
        teacher_rows = self.rows.teacher.ranks[rows] - first
        labels = self._labels(chunk, verifier, teacher_rows) if loss.hard_loss_weight else None
        covered = None if verifier.covered is None else verifier.covered[teacher_rows]
        weights = inputs["pair_weights"][chunk.row_index]
        if loss.drop_outside and covered is not None:
            weights = torch.where(covered, weights, 0.0)
        factors = gradient = None
        if chunk.writes:
            factor = self.factors.loss["tokens"] if self.upstream is None else self.upstream[rows]
            factors = (weights * factor).to(torch.promote_types(chunk.logits.dtype, torch.float32))
            gradient = chunk.grad_buffer
        stats = self._divergence(chunk, verifier, labels, factors, gradient, teacher_rows)
        self._gradient = gradient
        pair_loss = stats.soft
        if loss.hard_loss_weight:
            pair_loss = loss.hard_loss_weight * stats.hard + (1 - loss.hard_loss_weight) * stats.soft
        if loss.drop_outside and covered is not None:
            pair_loss = torch.where(covered, pair_loss, 0.0)
        agreement = stats.agreement if covered is None else stats.agreement * covered
        if self.pair_stats is None:
            self.pair_stats = pair_loss.new_ones(self.rows.count, 4)
        self.pair_stats[rows, 1:] = torch.stack((pair_loss, stats.acceptance, agreement), 1)
        values = pair_loss * weights
        if self.values is not None:
            self.values[rows] = values
        if self.factors.loss is not None:
            self._report(values.sum() * self.factors.loss["tokens"], complete=chunk.stop == self.rows.count)

    def _divergence(
        self,
        chunk: Chunk,
        verifier: Verifier,
        labels: Tensor | None,
        factors: Tensor | None,
        gradient: Tensor | None,
        teacher_rows: Tensor,
    ) -> divergence.DivergenceStats:
        call = self.call
        loss = call.loss
        options = {
            "gradient": gradient,
            "divergence": loss.divergence,
            "beta": loss.beta,
            "hard_weight": loss.hard_loss_weight,
            "transform": loss.logit_transform,
            "teacher_transform": loss.teacher_transform,
            "bias": call.bias,
            "teacher_bias": self._teacher[2],
            "overlap": True,
            "teacher_rows": teacher_rows,
            "lk_eta": loss.lk_eta,
        }
        ranks = call.vocabulary
        if not ranks.sharded:
            return divergence.fused_divergence(
                chunk.logits, verifier.logits, labels, factors, teacher_lse=verifier.lse, **options
            )
        if labels is None:
            labels = torch.full_like(teacher_rows, -1)
        return divergence.sharded_divergence(
            chunk.logits, verifier.logits, labels, factors, ranks=ranks, **options
        )

    def _labels(self, chunk: Chunk, verifier: Verifier, teacher_rows: Tensor) -> Tensor:
        """(C,) columns of the labels in the draft's logits; negative if the draft does not have the label."""
        inputs = self.call.inputs
        if inputs["labels"] is None:
            columns = verifier.label[teacher_rows]
        else:
            columns = inputs["labels"][chunk.row_index]
            if inputs["draft_columns"] is not None:
                columns = inputs["draft_columns"][columns]
        return self.call.vocabulary.columns(columns, -1)[0]

    @cached_property
    def _teacher(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the verifier's head: (weight of the projected ids, their bias, bias of the draft's ids).

        With a draft vocabulary and `teacher_softmax="full"`, all ids are projected, and the divergence only
        uses the logits of the draft's ids.
        """
        inputs = self.call.inputs
        ids = inputs["draft_ids"]
        weight, bias = inputs["teacher_weight"], inputs["teacher_bias"]
        if ids is None:
            return weight, bias, bias
        chosen = None if bias is None else bias[ids]
        if self.call.loss.teacher_softmax == "draft":
            return weight[ids], chosen, chosen
        return weight, bias, chosen

    def _verifier(self, index: Tensor, like: Tensor) -> Verifier:
        """Project rows of the verifier."""
        call = self.call
        weight, bias, _ = self._teacher
        self._teacher_buffer = _roomy(self._teacher_buffer, len(index), weight.shape[0], like)
        logits = self._teacher_buffer[: len(index)]
        project(call.inputs["teacher_hidden"][index].to(weight.dtype), weight, logits)
        if not _reads_all_ids(call):
            label = self._best(logits, bias) if _labels_itself(call) else None
            return Verifier(logits, label=label)
        ids = call.inputs["draft_ids"]
        transform = call.loss.teacher_transform
        stats = allocate_stats((), len(index), torch.promote_types(like.dtype, torch.float32), like.device)
        token_statistics(
            logits, torch.zeros_like(index), stats, transform=transform, bias=bias, ignore_index=-1
        )
        label = call.inputs["draft_columns"][self._best(logits, bias)]
        self._selected_buffer = _roomy(self._selected_buffer, len(index), len(ids), like)
        selected = self._selected_buffer[: len(index)]
        torch.index_select(logits, 1, ids, out=selected)
        return Verifier(selected, (stats.lse, stats.lse_residual), label, label >= 0)

    def _best(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """(R,) the ids of the verifier's largest logits."""
        transform = self.call.loss.teacher_transform
        ranks = self.call.vocabulary
        if ranks.sharded:
            return divergence.sharded_best(logits, transform, bias, ranks)
        return select.select(logits, 1, transform=transform, bias=bias)[:, 0]

    def _report(self, total: Tensor, *, complete: bool = True) -> None:
        """Report the loss of a chunk and, after the last chunk, the metrics."""
        names = self.call.loss.metric_names
        metrics = self._metrics() if complete else total.new_zeros(len(names))
        self.reports.append(Report(torch.cat((total.detach().view(1), metrics))))

    def _metrics(self) -> Tensor:
        """(metrics,) in the order of `metric_names`."""
        N = self.call.targets.shape[0]
        pair_stats = self.call.targets.new_zeros(0, 4) if self.pair_stats is None else self.pair_stats
        counted, *statistics = self.rows.scattered(pair_stats.to(self.call.stat_dtype), N).unbind(1)
        return chain_metrics(self.call.loss, counted, *statistics)


def chain_metrics(
    loss: LossSpec, counted: Tensor, values: Tensor, acceptance: Tensor, agreement: Tensor
) -> Tensor:
    """Compute the metrics of all chains, (metrics,) in the order of `metric_names`.

    Args:
        loss: the loss, with one step per entry of `coefficients`. A step with coefficient 0 has no pairs.
        counted: (steps * chains,) 1 if the pair counts, else 0; step by step.
        values: losses of the pairs. Like `acceptance` and `agreement`, it has the shape of `counted`, with 0
            for pairs that do not count.
        acceptance: acceptance rates of the pairs.
        agreement: 1 if draft and verifier have the same most probable id, else 0.
    """
    steps = [k for k, coefficient in enumerate(loss.coefficients) if coefficient]
    counted, values, acceptance, agreement = (
        x.view(len(steps), -1) for x in (counted, values, acceptance, agreement)
    )
    # Whether a chain agreed in all steps up to each, and the probability that all its tokens were accepted.
    # A step without pairs ends every chain.
    rates = [counted.new_zeros(2, counted.shape[1])] * len(loss.coefficients)
    for place, k in enumerate(steps):
        rates[k] = torch.stack((agreement[place], acceptance[place]))
    agreed, accepted = torch.stack(rates, 1).cumprod(1)
    before = [torch.ones_like(agreed[0]), *agreed.unbind()]
    before = torch.stack([before[k] for k in steps])
    sums = torch.stack((values, acceptance, agreement, agreement * before)).sum(-1)
    counts = torch.stack((counted, counted, counted, counted * before)).sum(-1)
    lengths = torch.stack((agreed.sum(), accepted.sum()))
    some = (counted.sum(0) > 0).to(lengths.dtype).sum()
    means = sums / counts.clamp(min=1)
    return torch.cat((means.T.reshape(-1), 1 + lengths / some.clamp(min=1)))


def _verifier_width(call: HeadCall) -> int:
    """Number of the verifier's logits per row that are computed."""
    drawn = call.inputs["draft_ids"] is not None and call.loss.teacher_softmax == "draft"
    return call.width if drawn else call.vocabulary.max_shard_rows(call.inputs["teacher_weight"].shape[0])


def _reads_all_ids(call: HeadCall) -> bool:
    """Whether the verifier's softmax includes ids that the draft does not have."""
    return call.inputs["draft_ids"] is not None and call.loss.teacher_softmax == "full"


def _labels_itself(call: HeadCall) -> bool:
    """Whether the labels are the verifier's most probable ids."""
    return call.loss.hard_loss_weight > 0 and call.inputs["labels"] is None


def _roomy(buffer: Tensor | None, rows: int, columns: int, like: Tensor) -> Tensor:
    """Return `buffer`, or a new buffer if it has fewer than `rows` rows."""
    if buffer is not None and buffer.shape[0] >= rows:
        return buffer
    del buffer
    return like.new_empty(rows, columns)
