"""Choose the rows of a call to project, and check targets and inputs, in one host sync.

With a sharded head, the same host sync reads the sizes of all shards. In the first call, and if the
vocabulary size differs from that of the last call, there is a second one. With `compact=False`, the exchange
of the sizes is the only host sync. A `TokenLoss` with reduction="none" exchanges them once more
(`unreduced`), and a call that is projected early is checked by another (`early_projection`).
"""

from functools import partial

import torch
from torch import Tensor

from logitless.engine.budget import default_budget
from logitless.engine.call import HeadCall
from logitless.engine.operands import mask_error
from logitless.engine.plan import GOOD_CHUNKS, TILE, Pass
from logitless.engine.remembered import Remembered
from logitless.engine.replay import kinds_of, replay_of
from logitless.engine.rows import Grouping, Rows, Shard, VocabSizeChanged, all_rows, compact_rows
from logitless.engine.spec import Fault, LossSpec
from logitless.engine.teacher_rows import Ordered
from logitless.kernels.head.targets import marked
from logitless.parallel.collectives import ALONE, Peers
from logitless.parallel.vocabulary import Shards

# Vocabulary size in the last call, by the name of the process group and this rank's code (see `Shards.code`).
_SIZES = Remembered()


def resolve_rows(call: HeadCall, shard: Shard | None = None) -> tuple[HeadCall, Rows]:
    """Choose the rows to project and their order, and raise the faults of the call (see `spec.Fault`).

    Args:
        call: the call.
        shard: this rank's shard of the head, with the vocabulary size against which targets are checked.
            None: the function determines the shard.

    Returns:
        (the call, with the shard sizes of all ranks if the head is sharded; the rows).
    """
    if call.vocabulary.sharded and shard is None:
        return _of_shards(call)
    if call.loss.unmasked and shard is None:
        N = call.targets.shape[0]
        return call, Rows(N, N, 0, None, None, None)
    loss = call.loss
    targets = call.targets
    V = call.V if shard is None else shard.V
    input_faults = [] if loss.faults is None else list(loss.faults(targets, call.inputs, V))
    kinds = None
    if call.sets is not None:
        kinds = kinds_of(call.sets, targets, call.inputs, V, loss, add_targets=call.add_targets)
        input_faults += kinds.faults
    marking = [fault for fault in input_faults if fault.count.dim()]
    marked_tokens = torch.stack([fault.count for fault in marking]) if marking else None
    marks = marked(targets, V, loss.ignore_index, marked_tokens)
    expected = f"ids in [0, {V}) or ignore_index"
    remedy = "fix the labels or set ignore_index"
    if not loss.compact:
        expected += " (and a mask of 0 and 1, not an additive one)"
    details = partial(_seen_outside, targets, marks, loss, remedy)
    faults = [Fault(marks[1], "targets", expected, "{count} outside", remedy, details), *marking]
    if call.num_items is not None and loss.reduction == "mean":
        too_small = (~(call.num_items > 0) & marks[0].any()).long()
        got = "0 or less, but the call has supervised tokens"
        faults.append(Fault(too_small, "num_items", "a number above 0", got, "pass their number"))
    faults += [fault for fault in input_faults if not fault.count.dim()]
    peers = ALONE
    if loss.tp_group is not None or loss.cp_group is not None:
        peers = Peers(tuple(group for group in (loss.tp_group, loss.cp_group) if group is not None))
    options = {"compact": loss.compact, "peers": peers, "shard": shard}
    options |= {"boundaries": loss.boundaries_argument}
    if kinds is not None:
        options["others"] = kinds.distinct.numbers
    ordered = None
    if loss.teacher_rows is not None:
        ordered = _by_teacher_rows(call, marks[0])
        options["others"] = ordered.numbers
    grouping = grouping_of(call)
    rows = compact_rows(marks, faults, grouping, call.cu_seqlens, **options)
    tokens, chosen = call.sequences.counts(targets.device, rows.tokens, rows.chosen_tokens)
    call = call if shard is None else call.with_shards(rows.shards)
    rows = rows._replace(tokens=tokens, chosen_tokens=chosen)
    if kinds is not None:
        rows = replay_of(kinds, rows, V, compact=loss.compact, grouped=grouping.grouped)
    if ordered is not None:
        teacher = ordered.read(rows.count, rows.counted)
        rows = rows._replace(index=ordered.order[: rows.count], teacher=teacher)
    return call, rows


def _by_teacher_rows(call: HeadCall, supervised: Tensor) -> Ordered:
    """Sort the rows by the teacher's row with which they are compared.

    Chunks begin at multiples of a tile if a tile of rows fits into the budget. If it does not, or if the
    width of the logits is unknown before the host sync, the host reads the teacher's row of every row.
    """
    loss = call.loss
    piece = 1
    if not call.vocabulary.sharded:
        budget = loss.logits_budget or default_budget(call.weight.device)
        costs = loss.reader.costs(call, budget, Pass.SOLVE)
        needed = (costs.row_bytes + costs.teacher_bytes) * GOOD_CHUNKS[-1]
        piece = TILE if needed <= budget - costs.fixed_bytes else 1
    rows = call.inputs[loss.teacher_rows]
    count = call.inputs["teacher_hidden"].shape[0]
    return Ordered.of(supervised, rows, count, piece)


def every_row(call: HeadCall) -> Rows:
    """All rows, for a call in which every token is supervised, without a host sync."""
    return all_rows(call.targets.shape[0], grouping_of(call), call.targets.device)


def grouping_of(call: HeadCall) -> Grouping:
    loss = call.loss
    grouped = loss.scope != "token"
    packed = call.cu_seqlens is not None
    # With cp_group, ranks may have different numbers of chunks. Therefore all sequences form one group, so
    # that every rank evaluates the loss, with its collectives, exactly once.
    together = loss.scope == "batch" or loss.cp_group is not None or (grouped and not loss.compact and packed)
    sequences = call.sequence_count if grouped else 0
    return Grouping(sequences, max(1, sequences) if together else loss.sequences_per_group, grouped)


def _of_shards(call: HeadCall) -> tuple[HeadCall, Rows]:
    """`resolve_rows` for a sharded head.

    The targets are checked before the ranks have exchanged the vocabulary size. The check assumes the size of
    the last call. If a rank assumed a wrong size (`VocabSizeChanged`), all ranks repeat the check.
    """
    group = call.loss.tp_group
    code = Shards.code(call.weight, fp32_logits=call.fp32_logits)
    if not call.loss.compact:
        shards = Shards.gathered(code, group, call.targets.device)
        call, rows = resolve_rows(call, Shard(group, code, shards.V, sure=True))
        return call.with_shards(shards), rows._replace(shards=shards)
    key = group.group_name, code
    shard = Shard(group, code, _SIZES.get(key, 0), sure=False)
    try:
        return resolve_rows(call, shard)
    except VocabSizeChanged as changed:
        V = changed.V
    _SIZES[key] = V
    return resolve_rows(call, shard._replace(V=V, sure=True))


def _seen_outside(targets: Tensor, marks: Tensor, loss: LossSpec, remedy: str) -> tuple[str, str]:
    """Return details and remedy of the error about targets outside the vocabulary. Called only on failure.

    If all invalid targets have one value that may mark padding, the remedy is to set `ignore_index` to this
    value.
    """
    outside = marks[1]
    ids = targets[outside]
    if not ids.numel():  # the invalid targets are on other ranks
        return "", f"{remedy}, and pass a mask of 0 and 1 if the call has one"
    weights = ""
    if "token_weights" in loss.keywords:
        weights = ", and weights of the tokens as token_weights"
    elif loss.scope == "token" and loss.reduction != "none" and "token_weights" not in loss.roles:
        weights = ", and multiply the values of reduction='none' by weights of the tokens"
    error = mask_error(ids, weights)
    if error is not None:
        raise error
    least = ids.min().item()
    greatest = ids.max().item()
    first = ids[0].item()
    row = outside.nonzero()[0, 0].item()
    details = f": the least is {least}, the greatest {greatest}; "
    details += f"the first, {first}, is that of hidden's row {row}"
    # Labels for transformers mark padding with -100; other data may mark it with -1, for example.
    mark = -100 if (ids == -100).any() else least
    if mark != -100 and (least != greatest or least >= 0):
        return details, remedy
    instead = f"set ignore_index={mark}, not {loss.ignore_index}"
    return details, f"{instead}, if {mark} marks what is not supervised"
