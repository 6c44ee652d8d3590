"""Computes a call by its definition: ordinary autograd over full logits, without plan or kernels.

`logitless.check` runs it instead of the engine's passes: in fp64 its results are the truth, and in the
operands' dtype they show the error to expect of any computation in that dtype.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from logitless.engine.base import CallResult, Mode
from logitless.engine.batch import Batch
from logitless.engine.call import HeadCall, pack, unpack
from logitless.engine.plan import Span
from logitless.engine.readers.base import METRICS, batch_of
from logitless.engine.readers.ids import IdsReader
from logitless.engine.readers.logits import LogitsReader
from logitless.engine.reduction import Factors, metric_factors, reduced, report, settled, unit_factors
from logitless.engine.rows import Rows
from logitless.engine.spec import LossSpec
from logitless.engine.terms import Terms, evaluate_terms, unreduced
from logitless.kernels.head.statistics import STATISTICS
from logitless.kernels.ids.slots import dedupe

# Statistics that the engine never differentiates.
CONSTANT = ("predictions", *(each.name for each in STATISTICS if not each.derivative))


@dataclass
class Oracle:
    """Replaces the passes, see `base.replaced`: computes their results from full logits."""

    # The tensors of which the loss is a function: per-token statistics, or logits.
    intermediates: list[Tensor] = field(default_factory=list)

    def __call__(self, heads: Sequence[HeadCall], mode: Mode) -> CallResult:
        calls = unpack(*pack(heads))
        if mode is Mode.PER_TOKEN:
            return CallResult(None, None, self._unreduced_values(calls[0]), None)
        losses, metrics = zip(*map(self._solve, calls), strict=True)
        return CallResult(sum(losses), torch.stack(metrics), {}, None)

    def _solve(self, call: HeadCall) -> tuple[Tensor, Tensor]:
        """Return a head's loss, and (1 + metrics,): the loss without its coefficient, then the metrics."""
        rows = rows_in_order(call)
        factors = unit_factors(call, rows)
        terms = self._terms(call, rows)
        loss = reduced(terms[0], factors)
        metrics = _compute_metrics(call, terms, factors)
        return loss, torch.cat(((loss.detach() / call.coefficient).view(1), metrics))

    def _unreduced_values(self, call: HeadCall) -> dict[str, Tensor]:
        """Return the result of an unreduced call: per-token statistics, or the values of a loss of logits."""
        rows = rows_in_order(call)
        N = call.targets.shape[0]
        if not issubclass(call.loss.reader, LogitsReader):
            statistics, _ = self._statistics(call, rows)
            return {name: rows.scattered(x, N) for name, x in statistics.items()}
        terms = self._terms(call, rows)
        found = {"values": rows.scattered(unreduced(terms[0]), N)}
        metrics = _compute_metrics(
            call, terms, metric_factors(rows.tokens, rows.chosen_tokens, call.sequence_count, call.stat_dtype)
        )
        return found | ({METRICS: metrics} if len(metrics) else {})

    def _terms(self, call: HeadCall, rows: Rows) -> Terms:
        """Evaluate the loss's `terms` on the whole call."""
        if not issubclass(call.loss.reader, LogitsReader):
            statistics, batch = self._statistics(call, rows)
            return evaluate_terms(call.loss, statistics, batch)
        z = self._record(full_logits(call, rows))
        batch = _whole_batch(call, rows)
        if call.inputs.get("teacher_hidden") is not None:
            batch.teacher_logits = compute_other_logits(call, rows, "teacher").detach()
        return evaluate_terms(call.loss, z, batch)

    def _statistics(self, call: HeadCall, rows: Rows) -> tuple[dict[str, Tensor], Batch]:
        """Return (the statistics by name, (rows,) or (rows, k); the batch of all rows)."""
        loss = call.loss
        batch = _whole_batch(call, rows)
        z = full_logits(call, rows)
        weights = None if loss.sum_logits_weights is None else call.inputs[loss.sum_logits_weights]
        if issubclass(loss.reader, IdsReader):
            has_teacher = call.inputs.get("teacher_hidden") is not None
            teacher = compute_other_logits(call, rows, "teacher").detach() if has_teacher else None
            row_stats = ids_statistics(z, teacher, batch, loss)
        else:
            row_stats = statistics_by_definition(z, batch, weights)
        statistics = {}
        for name in loss.reader.statistic_names(loss):
            is_constant = name in CONSTANT and name not in loss.differentiates
            statistics[name] = self._record(row_stats[name].detach() if is_constant else row_stats[name])
        if call.inputs.get("ref_hidden") is not None:
            reference = statistics_by_definition(compute_other_logits(call, rows, "ref"), batch, None)
            batch.ref_logps = reference["logps"].detach()
        return statistics, batch

    def _record(self, x: Tensor) -> Tensor:
        """Add x to `intermediates` if it requires a gradient; return it."""
        if x.requires_grad:
            self.intermediates.append(x)
        return x


def full_logits_bytes(heads: Sequence[HeadCall]) -> int:
    """Return the bytes of all logits of a public call in fp64, including those of a teacher or reference."""
    vocab_sizes = [head.weight.shape[0] for head in heads]
    others = [head.inputs.get(f"{name}_weight") for head in heads for name in ("teacher", "ref")]
    columns = sum(vocab_sizes) + sum(x.shape[0] for x in others if x is not None)
    return heads[0].targets.shape[0] * columns * torch.float64.itemsize


def rows_in_order(call: HeadCall) -> Rows:
    """Return the rows of a call in their order: the supervised ones, or all with `compact=False`."""
    loss = call.loss
    N = call.targets.shape[0]
    S = call.sequence_count
    is_supervised = call.targets != loss.ignore_index
    index = (is_supervised if loss.compact else torch.ones_like(is_supervised)).nonzero()[:, 0]
    count = index.shape[0]
    tokens = int(is_supervised.sum())
    if loss.scope == "token":
        return Rows(count, tokens, 0, index, None, None)
    positions = torch.arange(N, device=index.device)
    if call.cu_seqlens is None:
        sequence = positions // max(1, N // max(1, S))
    else:
        sequence = torch.searchsorted(call.cu_seqlens[1:], positions, right=True)
    sizes = torch.bincount(sequence[index], minlength=S)
    chosen = int((is_supervised & (sequence < S // 2)).sum())
    return Rows(count, tokens, chosen, index, None, sizes, S)


def _whole_batch(call: HeadCall, rows: Rows) -> Batch:
    """Return the batch of all rows as one group, with the sequences in the order of the call."""
    return batch_of(call, rows, Span(0, rows.count, 0, 1))


def _compute_metrics(call: HeadCall, terms: Terms, factors: Factors) -> Tensor:
    """Return the metrics (metrics,) of a call."""
    return settled(call.loss, [report(call.loss, terms, factors)], call.stat_dtype)[1:]


def full_logits(call: HeadCall, rows: Rows) -> Tensor:
    """Return the logits (rows, V) after the head transform, from a product in the dtype of the call."""
    x = call.hidden[rows.index].to(call.dtype)
    weight = call.weight.to(call.dtype)
    layers = call.layers
    if call.frozen is not None:
        weight = torch.cat((call.frozen.to(call.dtype), weight), dim=1)
    if layers is not None:
        autocast = nullcontext()
        if layers.autocast is not None:
            autocast = torch.autocast(x.device.type, dtype=layers.autocast)
        with autocast:
            blocks = layers.module.blocks(layers.head)
            x = torch.func.functional_call(blocks, dict(layers.tensors), (x,)).to(call.dtype)
    return _mask_excluded_ids(call, rows, call.loss.logit_transform.logits(x @ weight.t(), call.bias)[0])


def _mask_excluded_ids(call: HeadCall, rows: Rows, z: Tensor) -> Tensor:
    """Return the logits (rows, V), with -inf for ids that the call's sampling mask excludes."""
    if call.sets is None:
        return z
    ids, starts, lengths, _ = call.sets
    is_kept = torch.ones_like(z, dtype=torch.bool)
    for row, n in enumerate(rows.index.tolist()):
        if lengths[n]:
            is_kept[row] = False
            is_kept[row, ids[starts[n] : starts[n] + lengths[n]].long()] = True
            is_kept[row, call.targets[n]] |= call.add_targets
    return z.masked_fill(~is_kept, -torch.inf)


def compute_other_logits(call: HeadCall, rows: Rows, name: str) -> Tensor:
    """Return the logits (rows, V') of the teacher (`name` "teacher") or the reference model ("ref")."""
    hidden, weight, bias = (call.inputs[f"{name}_{part}"] for part in ("hidden", "weight", "bias"))
    weight = weight if name == "teacher" else weight.to(call.dtype)
    index = rows.index
    row_input = call.loss.teacher_rows
    if name == "teacher" and row_input is not None:
        index = call.inputs[row_input][index]
    transform = getattr(call.loss, f"{name}_transform")
    z = transform.logits(hidden[index].to(weight.dtype) @ weight.t(), bias)[0]
    return _mask_excluded_ids(call, rows, z) if name == "ref" else z


def statistics_by_definition(z: Tensor, batch: Batch, weights: Tensor | None) -> dict[str, Tensor]:
    """Compute every statistic of `TokenStats` from logits (n, V) by its definition; 0 for ignored tokens."""
    log_p = z.log_softmax(-1)
    statistics = {each.name: each.compute(z, log_p, batch.targets, weights) for each in STATISTICS}
    statistics["predictions"] = z.argmax(-1)
    return {name: x.masked_fill(~batch.supervised, 0.0) for name, x in statistics.items()}


def ids_statistics(z: Tensor, teacher: Tensor | None, batch: Batch, loss: LossSpec) -> dict[str, Tensor]:
    """Compute every statistic of several ids per token, from logits (n, V) and a teacher's (n, V')."""
    log_p = z.log_softmax(-1)
    zero = torch.zeros_like(z[:, 0])
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    shared_size = z.shape[1] if teacher is None else min(z.shape[1], teacher.shape[1])
    ids = getattr(batch, "ids", None)
    sorted_ids = {"student": _sort_ids(z, z.shape[1])}
    if teacher is not None:
        sorted_ids["teacher"] = _sort_ids(teacher, shared_size)
        k = loss.k
        sorted_shared_ids = {"student": _sort_ids(z, shared_size), "teacher": sorted_ids["teacher"]}
        names = ("teacher", "student") if loss.support == "union" else (loss.support,)
        ids = torch.cat([sorted_shared_ids[name][:, :k] for name in names], 1)
    elif ids is None:
        ids = sorted_ids["student"][:, : loss.k]
    teacher_logps = getattr(batch, "teacher_logps", None)
    if teacher_logps is not None:
        ids = torch.where(teacher_logps == -torch.inf, -1, ids)
    if loss.teacher:
        ids = dedupe(ids)
    logps, rest = _gather_logps(log_p, ids)
    statistics = {"ids": ids, "logps": logps, "lse": z.logsumexp(-1), "lse_residual": zero, "rest": rest}
    statistics["entropy"] = -(log_p.exp() * finite).sum(-1)
    if not loss.teacher:
        return statistics
    if teacher is None:
        known = torch.where(ids >= 0, teacher_logps.to(z.dtype), -torch.inf)
        statistics |= {"teacher_logps": known, "teacher_rest": zero}
        argmax_id = ids.gather(1, statistics["teacher_logps"].argmax(1, keepdim=True))[:, 0]
    else:
        argmax_id = sorted_ids["teacher"][:, 0]
        teacher_logps_and_rest = _gather_logps(teacher.log_softmax(-1), ids)
        statistics |= dict(zip(("teacher_logps", "teacher_rest"), teacher_logps_and_rest, strict=True))
    statistics |= {"agreement": (sorted_ids["student"][:, 0] == argmax_id).to(z.dtype), "hard": zero}
    statistics |= {"hard_lse": zero, "hard_lse_residual": zero, "token_accuracy": zero}
    if batch.labels is not None:
        known = (batch.labels >= 0) & (batch.labels < z.shape[1])
        untempered = z * loss.temperature
        labels = torch.where(known, batch.labels, 0)[:, None]
        statistics["hard"] = torch.where(known, untempered.log_softmax(-1).gather(1, labels)[:, 0], 0.0)
        statistics["token_accuracy"] = (sorted_ids["student"][:, 0] == batch.labels).to(z.dtype)
    return statistics


def _sort_ids(z: Tensor, num_ids: int) -> Tensor:
    """Return the first `num_ids` ids in descending order of their logits, equal logits in order of ids."""
    return z.detach()[:, :num_ids].sort(dim=-1, descending=True, stable=True).indices


def _gather_logps(log_p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of `ids` (n, k), -inf in empty slots; log of the total probability of all
    other ids (n,)).
    """
    is_filled = ids >= 0
    columns = ids.clamp(min=0)
    is_listed = torch.zeros_like(log_p).scatter_add(1, columns, is_filled.to(log_p.dtype)) > 0
    rest = log_p.masked_fill(is_listed, -torch.inf)
    lists_all = is_listed.all(1)
    rest = torch.where(lists_all, -torch.inf, rest.masked_fill(lists_all[:, None], 0.0).logsumexp(-1))
    return log_p.gather(1, columns).masked_fill(~is_filled, -torch.inf), rest
