"""reduction="none": the unreduced loss, differentiated by ordinary autograd over per-token statistics."""

import torch
from torch import Tensor

from logitless.engine.base import Mode, run_calls
from logitless.engine.batch import Batch
from logitless.engine.call import HeadCall, check_constant
from logitless.engine.plan import Plan
from logitless.engine.readers.base import METRICS
from logitless.engine.readers.logits import LogitsReader
from logitless.engine.reduction import metric_factors, report, settled
from logitless.engine.rows import equal_sizes
from logitless.engine.segments import segments_of
from logitless.engine.spec import Role, looks_at_sequences
from logitless.engine.terms import evaluate_terms, unreduced
from logitless.parallel.sequences import WHOLE_SEQUENCES
from logitless.parallel.vocabulary import Shards


def unreduced_loss(
    call: HeadCall, shape: torch.Size
) -> tuple[Tensor, Tensor, dict[str, Tensor], Plan | None]:
    """Return (values of the loss, one per unit; metrics; requested per-token statistics; plan)."""
    loss = call.loss
    if issubclass(loss.reader, LogitsReader):
        for name, x in call.inputs.items():
            check_constant(name, x)
    outcome = run_calls([call], Mode.PER_TOKEN)
    statistics = dict(outcome.statistics)
    if "values" in statistics:
        # The values of a `LogitsLoss` were computed chunk by chunk.
        values = statistics["values"].view(shape)
        return values, statistics.get(METRICS, values.new_zeros(0)), {}, outcome.plan
    batch = _whole_batch(call)
    result = evaluate_terms(loss, statistics, batch)
    values = unreduced(result[0])
    first = next(iter(result[0].values()))
    supervised = batch.supervised.sum()
    chosen = 0
    if batch.segments is not None:
        chosen = (batch.supervised & batch.is_chosen).sum()
    tokens = loss.sequences.counts(call.targets.device, supervised, chosen)
    dtype = statistics["lse"].dtype
    factors = metric_factors(*tokens, call.sequence_count, dtype)
    sequences = WHOLE_SEQUENCES if loss.scope == "token" else loss.sequences
    metrics = settled(loss, [report(loss, result, factors, sequences)], dtype)[1:]
    per_token = values.shape == call.targets.shape and not batch.is_of_groups(first)
    values = values.view(shape) if per_token else values
    names = ()
    if loss.return_logps:
        names = statistics
    elif loss.return_predictions:
        names = ("predictions",)
    return values, metrics, {name: statistics[name].detach() for name in names}, outcome.plan


def _whole_batch(call: HeadCall) -> Batch:
    """Return a batch of all tokens of the call, in call order.

    With `tp_group`, the sizes of the shards are exchanged once more, in a host sync, because only the pass
    has those of the call's host sync.
    """
    loss = call.loss
    targets = call.targets
    count = call.sequence_count
    segments = None
    if looks_at_sequences(loss):
        N = targets.shape[0]
        if call.cu_seqlens is None:
            sizes = equal_sizes(N, count, targets.device)
        else:
            sizes = call.cu_seqlens.diff()
        segments = segments_of(sizes, N, count, 1, targets.device)
    V = call.weight.shape[0]
    if loss.tp_group is not None:
        code = Shards.code(call.weight, fp32_logits=False)
        V = Shards.gathered(code, loss.tp_group, targets.device).V
    inputs = {name: x for name, x in call.inputs.items() if loss.roles[name] is not Role.FEATURES}
    return Batch(targets, V, inputs, segments, ignore_index=loss.ignore_index, sequences=loss.sequences)
