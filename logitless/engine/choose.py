"""Which rows of a call are walked: what its targets and inputs say, read in one host sync.

With a sharded head it says too how large the vocabulary is.
"""

from functools import partial

import torch
from torch import Tensor

from logitless.engine.call import Call
from logitless.engine.operands import MASKS, WRONG_MASK
from logitless.engine.remembered import Remembered
from logitless.engine.rows import Grouping, OtherSize, Rows, Shard, all_rows, select_rows
from logitless.engine.spec import Fault
from logitless.errors import expect
from logitless.kernels.head.targets import marked
from logitless.parallel.collectives import ALONE, Peers
from logitless.parallel.vocabulary import Shards

# Size of the vocabulary in the last call, by the group's name and this rank's code (see `Shards`).
_SIZES = Remembered()


def choose_rows(call: Call, shard: Shard | None = None) -> tuple[Call, Rows]:
    """Which rows are projected, and in which order; raises the call's faults (see `spec.Fault`).

    A call comes back with the shards of its vocabulary, whose sizes are read with the number of rows.
    """
    if call.vocabulary.sharded and shard is None:
        return _of_shards(call)
    if call.loss.unmasked and shard is None:
        N = call.targets.shape[0]
        return call, Rows(N, N, 0, None, None, None)
    loss, targets, V = call.loss, call.targets, call.V if shard is None else shard.V
    found = [] if loss.faults is None else loss.faults(targets, call.inputs, V)
    marking = [fault for fault in found if fault.count.dim()]
    others = torch.stack([fault.count for fault in marking]) if marking else None
    marks = marked(targets, V, loss.ignore_index, others)
    expected, remedy = f"ids in [0, {V}) or ignore_index", "fix the labels or set ignore_index"
    if not loss.compact:
        expected += " (and a mask of 0 and 1, where it is one of integers)"
    seen = partial(_seen_outside, targets, marks, loss.ignore_index, remedy)
    faults = [Fault(marks[1], "targets", expected, "{count} outside", remedy, seen), *marking]
    if call.num_items is not None and loss.reduction == "mean":
        zero = ((call.num_items == 0) & marks[0].any()).long()
        remedy = "count what is supervised"
        faults.append(Fault(zero, "num_items", "a number above 0", "0 beside supervised tokens", remedy))
    faults += [fault for fault in found if not fault.count.dim()]
    peers = ALONE
    if loss.tp_group is not None or loss.cp_group is not None:
        peers = Peers(tuple(group for group in (loss.tp_group, loss.cp_group) if group is not None))
    options = {"compact": loss.compact, "peers": peers, "shard": shard}
    options |= {"boundaries": loss.boundaries_argument}
    rows = select_rows(marks, faults, _grouping(call), call.cu_seqlens, **options)
    tokens, chosen = call.sequences.counts(targets.device, rows.tokens, rows.chosen_tokens)
    call = call if shard is None else call.with_shards(rows.shards)
    return call, rows._replace(tokens=tokens, chosen_tokens=chosen)


def every_row(call: Call) -> Rows:
    """The rows of a call whose every token counts. Asks the device for nothing."""
    return all_rows(call.targets.shape[0], _grouping(call), call.targets.device)


def _grouping(call: Call) -> Grouping:
    loss = call.loss
    grouped, packed = loss.scope != "token", call.cu_seqlens is not None
    # Ranks with slices of the same sequences have different chunks: they meet once, with all tokens read.
    together = loss.scope == "batch" or loss.cp_group is not None or (grouped and not loss.compact and packed)
    sequences = call.sequence_count if grouped else 0
    return Grouping(sequences, max(1, sequences) if together else loss.sequences_per_group, grouped)


def _of_shards(call: Call) -> tuple[Call, Rows]:
    """The same of a sharded head. Until all ranks have met, its vocabulary has the size of the last call."""
    group = call.loss.tp_group
    code = Shards.code(call.weight, unrounded=call.unrounded)
    if not call.loss.compact:
        shards = Shards.gathered(code, group, call.targets.device)
        call, rows = choose_rows(call, Shard(group, code, shards.V, sure=True))
        return call.with_shards(shards), rows._replace(shards=shards)
    known = group.group_name, code
    shard = Shard(group, code, _SIZES.get(known, 0), sure=False)
    try:
        return choose_rows(call, shard)
    except OtherSize as other:
        V = other.V
    _SIZES[known] = V
    return choose_rows(call, shard._replace(V=V, sure=True))


def _seen_outside(targets: Tensor, marks: Tensor, ignore_index: int, remedy: str) -> tuple[str, str]:
    """What to say of targets that are no ids, and a remedy: another one where they look like a mark."""
    outside = marks[1]
    ids = targets[outside]
    if not ids.numel():  # they are on other ranks
        return "", remedy
    wrong_mask = (ids == WRONG_MASK).sum().item()
    expect(
        not wrong_mask, "mask", MASKS, f"{wrong_mask} others", "pass which tokens count, such as mask != 0"
    )
    least, greatest, first = ids.min().item(), ids.max().item(), ids[0].item()
    row = outside.nonzero()[0, 0].item()
    seen = f": the least is {least}, the greatest {greatest}; "
    seen += f"the first, {first}, is that of hidden's row {row}"
    # As in labels made for transformers, or in data that marks padding with -1.
    mark = -100 if (ids == -100).any() else least
    if mark != -100 and (least != greatest or least >= 0):
        return seen, remedy
    return seen, f"set ignore_index={mark}, not {ignore_index}, if {mark} marks what is not supervised"
