"""reduction="none": the values themselves, in ordinary autograd over per-token numbers."""

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.call import Call
from logitless.engine.function import Mode, run_calls
from logitless.engine.objective import empty_metrics
from logitless.engine.plan import Plan
from logitless.engine.reduction import metric_factors, unit_counts
from logitless.engine.segments import Segments
from logitless.engine.spec import Role
from logitless.engine.terms import evaluate_terms, metric_shares, settled, unreduced
from logitless.parallel.vocabulary import ShardedVocabulary


def unreduced_loss(call: Call, shape: torch.Size) -> tuple[Tensor, Tensor, dict[str, Tensor], Plan | None]:
    """(values in the loss's unit, metrics, per-token numbers for `return_logps`, plan)."""
    loss = call.loss
    outcome = run_calls([call], Mode.PER_TOKEN)
    numbers = dict(outcome.numbers)
    if "values" in numbers:
        # A loss of logits was evaluated chunk by chunk.
        values = numbers.pop("values").view(shape)
        metrics = torch.stack(list(numbers.values())) if numbers else empty_metrics(call)
        return values, metrics, {}, outcome.plan
    batch = _whole_batch(call)
    terms, metrics = evaluate_terms(loss, TokenStats(numbers), batch)
    values = unreduced(terms)
    counts = _counts(call, batch)
    shares = metric_shares(metrics, metric_factors(call, counts), call.sequences)
    found = [settled([shares[name]]).to(values.dtype) for name in loss.metric_names]
    stacked = torch.stack(found) if found else empty_metrics(call)
    values = values.view(shape) if values.shape == call.targets.shape else values
    tokens = {name: x.detach() for name, x in numbers.items()} if loss.return_logps else {}
    return values, stacked, tokens, outcome.plan


def _whole_batch(call: Call) -> Batch:
    """All tokens at once, in the order of the call."""
    loss, segments = call.loss, None
    if call.sequence_count:
        if call.cu_seqlens is None:
            lengths = call.targets.new_full((call.sequence_count,), call.N // call.sequence_count)
        else:
            lengths = call.cu_seqlens.diff()
        segments = Segments(lengths, call.N, call.sequence_count, 1)
    V = call.V if loss.tp_group is None else ShardedVocabulary.of(call.weight, loss.tp_group).total(call.weight.shape[0])
    inputs = {name: x for name, x in call.inputs.items() if loss.roles[name] is not Role.FEATURES}
    return Batch(call.targets, V, inputs, segments, ignore_index=loss.ignore_index, sequences=call.sequences)


def _counts(call: Call, batch: Batch) -> dict[str, int | Tensor]:
    supervised, chosen = batch.supervised.sum(), 0
    if call.sequence_count:
        chosen = (batch.supervised & batch.is_chosen).sum()
    tokens, chosen = call.sequences.counts(call.targets.device, supervised, chosen)
    return unit_counts(call, tokens, chosen)
