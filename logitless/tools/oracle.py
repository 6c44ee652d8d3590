"""A call by its definition: ordinary autograd over full logits, without plan or kernels.

`logitless.check` runs it in the place of the passes: in fp64 its results are the truth, and in the operands'
own dtype they show the error to expect of any computation in that dtype.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.call import HeadCall
from logitless.engine.function import CallResult, Mode
from logitless.engine.objectives.base import batch_of
from logitless.engine.objectives.ids import IdsObjective
from logitless.engine.objectives.logits import LogitsObjective
from logitless.engine.packing import pack, unpack
from logitless.engine.plan import Span
from logitless.engine.reduction import metric_factors, unit_counts, unit_factors
from logitless.engine.rows import Rows
from logitless.engine.spec import LossSpec
from logitless.engine.terms import Factors, Terms, evaluate_terms, means, metric_sums, reduced, unreduced
from logitless.kernels.ids.slots import dedupe

# Statistics that the engine never differentiates.
CONSTANT = ("lse_residual", "is_top1", "log_sum_sq_probs", "predictions")


@dataclass
class Oracle:
    """Replaces the passes: see `function.replaced`."""

    # Tensors that the losses of the calls are functions of: per-token statistics, or logits.
    starts: list[Tensor] = field(default_factory=list)

    def __call__(self, heads: Sequence[HeadCall], mode: Mode) -> CallResult:
        calls = unpack(*pack(heads))
        if mode is Mode.PER_TOKEN:
            return CallResult(None, None, self._named_statistics(calls[0]), None)
        losses, metrics = zip(*map(self._solve, calls), strict=True)
        return CallResult(sum(losses), torch.stack(metrics), {}, None)

    def _solve(self, call: HeadCall) -> tuple[Tensor, Tensor]:
        """The loss of a head, and (1 + metrics,): the loss without its coefficient, then the metrics."""
        rows = rows_in_order(call)
        factors, _ = unit_factors(call, rows, 1.0)
        terms, metrics = self._terms(call, rows)
        loss = reduced(terms, factors)
        settled = _settled(call, metrics, factors.metrics)
        return loss, torch.stack([loss.detach() / call.coefficient, *settled])

    def _named_statistics(self, call: HeadCall) -> dict[str, Tensor]:
        """The result of an unreduced call: per-token statistics, or the values of a loss of logits."""
        rows = rows_in_order(call)
        N = call.targets.shape[0]
        if not issubclass(call.loss.objective, LogitsObjective):
            statistics, _ = self._statistics(call, rows)
            return {name: rows.scattered(x, N) for name, x in statistics.items()}
        terms, metrics = self._terms(call, rows)
        counts = unit_counts(rows.tokens, rows.chosen_tokens, call.sequence_count)
        settled = _settled(call, metrics, metric_factors(counts, call.stat_dtype))
        named = dict(zip(call.loss.metric_names, settled, strict=True))
        return {"values": rows.scattered(unreduced(terms), N), **named}

    def _terms(self, call: HeadCall, rows: Rows) -> Terms:
        """The loss's own terms on the whole call."""
        if not issubclass(call.loss.objective, LogitsObjective):
            statistics, batch = self._statistics(call, rows)
            return evaluate_terms(call.loss, statistics, batch)
        z = self._noted(logits(call, rows))
        batch = _whole_batch(call, rows)
        if call.inputs.get("teacher_hidden") is not None:
            batch.teacher_logits = other_logits(call, rows, "teacher").detach()
        return evaluate_terms(call.loss, z, batch)

    def _statistics(self, call: HeadCall, rows: Rows) -> tuple[dict[str, Tensor], Batch]:
        """(the statistics (rows,) that the engine computes for this loss, the batch of all rows)."""
        loss = call.loss
        batch = _whole_batch(call, rows)
        z = logits(call, rows)
        weights = None if loss.sum_logits_weights is None else call.inputs[loss.sum_logits_weights]
        if issubclass(loss.objective, IdsObjective):
            given = call.inputs.get("teacher_hidden") is not None
            teacher = other_logits(call, rows, "teacher").detach() if given else None
            row_stats = ids_statistics(z, teacher, batch, loss)
        else:
            row_stats = token_statistics(z, batch, weights)
        statistics = {}
        for name in loss.objective.statistic_names(loss):
            constant = name in CONSTANT and name not in loss.differentiates
            statistics[name] = self._noted(row_stats[name].detach() if constant else row_stats[name])
        if call.inputs.get("ref_hidden") is not None:
            reference = token_statistics(other_logits(call, rows, "ref"), batch, None)
            batch.ref_logps = reference["logps"].detach()
        return statistics, batch

    def _noted(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            self.starts.append(x)
        return x


def logits_bytes(heads: Sequence[HeadCall]) -> int:
    """Bytes of all logits of a public call in fp64, those of a teacher or a reference included."""
    widths = [given.weight.shape[0] for given in heads]
    others = [given.inputs.get(f"{name}_weight") for given in heads for name in ("teacher", "ref")]
    columns = sum(widths) + sum(x.shape[0] for x in others if x is not None)
    return heads[0].targets.shape[0] * columns * torch.float64.itemsize


def rows_in_order(call: HeadCall) -> Rows:
    """The rows of a call in its own order: the supervised ones, or all with `compact=False`."""
    loss = call.loss
    N = call.targets.shape[0]
    S = call.sequence_count
    supervised = call.targets != loss.ignore_index
    index = (supervised if loss.compact else torch.ones_like(supervised)).nonzero()[:, 0]
    count = index.shape[0]
    tokens = int(supervised.sum())
    if loss.scope == "token":
        return Rows(count, tokens, 0, index, None, None)
    positions = torch.arange(N, device=index.device)
    if call.cu_seqlens is None:
        number = positions // max(1, N // max(1, S))
    else:
        number = torch.searchsorted(call.cu_seqlens[1:], positions, right=True)
    sizes = torch.bincount(number[index], minlength=S)
    chosen = int((supervised & (number < S // 2)).sum())
    return Rows(count, tokens, chosen, index, None, sizes, S)


def _whole_batch(call: HeadCall, rows: Rows) -> Batch:
    """The batch of all rows, as one group, which keeps the sequences in the order of the call."""
    return batch_of(call, rows, Span(0, rows.count, 0, 1))


def _settled(call: HeadCall, metrics: Mapping, factors: Factors) -> list[Tensor]:
    metric_means = means([metric_sums(metrics)], factors)
    return [metric_means[name].to(call.stat_dtype) for name in call.loss.metric_names]


def logits(call: HeadCall, rows: Rows) -> Tensor:
    """(rows, V) logits after the head transform, from a product in the dtype of the call."""
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
    return _over_sets(call, rows, call.loss.head.logits(x @ weight.t(), call.bias)[0])


def _over_sets(call: HeadCall, rows: Rows, z: Tensor) -> Tensor:
    """The logits (rows, V), with -inf for ids that the call's sampling mask leaves out."""
    if call.sets is None:
        return z
    ids, starts, lengths, _ = call.sets
    out = torch.ones_like(z, dtype=torch.bool)
    for row, n in enumerate(rows.index.tolist()):
        if lengths[n]:
            out[row] = False
            out[row, ids[starts[n] : starts[n] + lengths[n]].long()] = True
            out[row, call.targets[n]] |= call.add_targets
    return z.masked_fill(~out, -torch.inf)


def other_logits(call: HeadCall, rows: Rows, name: str) -> Tensor:
    """(rows, V') logits of the teacher or the reference model."""
    hidden, weight, bias = (call.inputs[f"{name}_{part}"] for part in ("hidden", "weight", "bias"))
    weight = weight if name == "teacher" else weight.to(call.dtype)
    index = rows.index
    looked_up = call.loss.teacher_rows
    if name == "teacher" and looked_up is not None:
        index = call.inputs[looked_up][index]
    head = getattr(call.loss, f"{name}_head")
    z = head.logits(hidden[index].to(weight.dtype) @ weight.t(), bias)[0]
    return _over_sets(call, rows, z) if name == "ref" else z


def token_statistics(z: Tensor, batch: Batch, weights: Tensor | None) -> dict[str, Tensor]:
    """Every statistic of `TokenStats` from logits (n, V), by its definition; 0 where a token is ignored."""
    target = batch.targets.masked_fill(~batch.supervised, 0)[:, None]
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    # p = 0 contributes nothing, though its log is -inf.
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    statistics = {
        "logps": log_p.gather(1, target)[:, 0],
        "lse": lse,
        "lse_residual": torch.zeros_like(lse),
        "entropy": -(log_p.exp() * finite).sum(-1),
        "is_top1": (z.argmax(-1) == batch.targets).to(z.dtype),
        "sum_logits": z.sum(-1) if weights is None else z @ weights.to(z.dtype),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "predictions": z.argmax(-1),
    }
    return {name: x.masked_fill(~batch.supervised, 0.0) for name, x in statistics.items()}


def ids_statistics(z: Tensor, teacher: Tensor | None, batch: Batch, loss: LossSpec) -> dict[str, Tensor]:
    """Every statistic of several ids per token, from logits (n, V) and a teacher's (n, V')."""
    log_p = z.log_softmax(-1)
    zero = torch.zeros_like(z[:, 0])
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    common = z.shape[1] if teacher is None else min(z.shape[1], teacher.shape[1])
    ids = getattr(batch, "ids", None)
    best = {"student": _best(z, z.shape[1])}
    if teacher is not None:
        best["teacher"] = _best(teacher, common)
        k = loss.k
        shared = {"student": _best(z, common), "teacher": best["teacher"]}
        names = ("teacher", "student") if loss.support == "union" else (loss.support,)
        ids = torch.cat([shared[name][:, :k] for name in names], 1)
    elif ids is None:
        ids = best["student"][:, : loss.k]
    given = getattr(batch, "teacher_logps", None)
    if given is not None:
        ids = torch.where(given == -torch.inf, -1, ids)
    if loss.teacher:
        ids = dedupe(ids)
    logps, rest = _of_ids(log_p, ids)
    statistics = {"ids": ids, "logps": logps, "lse": z.logsumexp(-1), "lse_residual": zero, "rest": rest}
    statistics["entropy"] = -(log_p.exp() * finite).sum(-1)
    if not loss.teacher:
        return statistics
    if teacher is None:
        known = torch.where(ids >= 0, given.to(z.dtype), -torch.inf)
        statistics |= {"teacher_logps": known, "teacher_rest": zero}
        argmax_id = ids.gather(1, statistics["teacher_logps"].argmax(1, keepdim=True))[:, 0]
    else:
        argmax_id = best["teacher"][:, 0]
        there = _of_ids(teacher.log_softmax(-1), ids)
        statistics |= dict(zip(("teacher_logps", "teacher_rest"), there, strict=True))
    statistics |= {"agreement": (best["student"][:, 0] == argmax_id).to(z.dtype), "hard": zero}
    statistics |= {"hard_lse": zero, "hard_lse_residual": zero, "token_accuracy": zero}
    if batch.labels is not None:
        known = (batch.labels >= 0) & (batch.labels < z.shape[1])
        warm = z * loss.temperature
        labels = torch.where(known, batch.labels, 0)[:, None]
        statistics["hard"] = torch.where(known, warm.log_softmax(-1).gather(1, labels)[:, 0], 0.0)
        statistics["token_accuracy"] = (best["student"][:, 0] == batch.labels).to(z.dtype)
    return statistics


def _best(z: Tensor, common: int) -> Tensor:
    """Ids in descending order of their logits; equal logits in ascending order of ids."""
    return z.detach()[:, :common].sort(dim=-1, descending=True, stable=True).indices


def _of_ids(log_p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ids (n, k), -inf in empty slots, and of all others together."""
    filled = ids >= 0
    columns = ids.clamp(min=0)
    covered = torch.zeros_like(log_p).scatter_add(1, columns, filled.to(log_p.dtype)) > 0
    rest = log_p.masked_fill(covered, -torch.inf)
    whole = covered.all(1)
    rest = torch.where(whole, -torch.inf, rest.masked_fill(whole[:, None], 0.0).logsumexp(-1))
    return log_p.gather(1, columns).masked_fill(~filled, -torch.inf), rest
