"""The three passes over a call: solve it, hand out per-token numbers, compute gradients from those numbers'.

Everything here runs eagerly below autograd, also inside a compiled graph, where it is the body of an opaque
operator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from logitless.engine.budget import default_budget, warn_once
from logitless.engine.call import Call
from logitless.engine.gathered import GatheredProjection
from logitless.engine.gradients import Gradients, spared_bytes
from logitless.engine.guess import Guess
from logitless.engine.loop import run
from logitless.engine.objective import Objective, settled
from logitless.engine.plan import MIB, Facts, Pass, Plan, make_plan
from logitless.engine.projection import Projection
from logitless.engine.reduction import power_of_two, unit_factors
from logitless.engine.row_vectors import scale_vectors
from logitless.engine.rows import Grouping, Rows, select_rows
from logitless.engine.spec import Fault, LossSpec
from logitless.kernels.targets import marked
from logitless.parallel.peers import ALONE, Peers

# By whether only some columns of the head are gathered.
PROJECTIONS = {False: Projection, True: GatheredProjection}


@dataclass
class Solved:
    """The loss of a call, and its gradients up to a deferred factor."""

    loss: Tensor  # 0-d
    metrics: Tensor  # (heads, 1 + metrics): the head's own loss without its coefficient, then its metrics
    tokens: list[Tensor]  # (N,) each, of `solved_names`
    deferred: Tensor  # 0-d
    gradients: Gradients
    plan: Plan  # of the last head


@dataclass
class Numbers:
    """Per-token numbers of a call."""

    named: dict[str, Tensor]  # (N,) each, 0 where ignored; or 0-d
    vectors: Tensor | None  # (N, H) d logp / d hidden, where the plan keeps it
    rows: Rows
    plan: Plan


def solve(calls: Sequence[Call], *, static: bool, main: Tensor | None = None) -> Solved:
    """The loss and its gradients in one pass.

    Args:
        calls: the heads, one after the other.
        static: dtypes may not depend on the number of tokens.
        main: a tensor that the weight's finished gradient is added to.
    """
    static = static or len(calls) > 1

    def planned(call: Call, rows: Rows) -> Plan:
        spared = spared_bytes(call, static=static, main=main)
        return plan_for(call, rows, Pass.SOLVE, len(calls), spared)

    guess = Guess(calls, Pass.SOLVE, partial(_begun, planned, gradients=True))
    chosen = [choose_rows(call, guess.read) for call in calls]
    gradients = Gradients([call for call, _ in chosen], static=static, main=main)
    deferred, losses, metrics = gradients.deferred, [], []
    for call, rows in chosen:
        plan = planned(call, rows)
        factors, deferred = unit_factors(call, rows, deferred)
        objective = call.loss.objective.solving(call, rows, plan, factors)
        head = guess.head(plan, rows) or _head(call, rows, plan, gradients=True)
        gradients.open(call, deferred, several_chunks=plan.chunks > 1)
        run(plan, head, objective, gradients)
        if plan.strategy == "row_scaled":
            scale_vectors(head.d_hidden, head.d_hidden, objective, head)
        gradients.close(call, head, deferred)
        total, found = settled(call, objective.reports, factors.metrics)
        # A factor of 1 that the host knows costs no kernel; one on the device is not asked for.
        known = isinstance(deferred, float) and deferred == 1.0
        losses.append(total if known else total * deferred)
        own = losses[-1] if call.coefficient == 1.0 else losses[-1] / call.coefficient
        metrics.append(torch.stack([own, *found]))
    if not isinstance(deferred, Tensor):
        deferred = torch.full((), deferred, dtype=call.stat_dtype, device=call.targets.device)
    asked = call.loss.return_logps or call.loss.return_predictions
    tokens = _tokens(call, rows, objective, deferred) if asked else []
    table = torch.stack(metrics) if len(metrics) > 1 else metrics[0][None]
    return Solved(sum(losses[1:], losses[0]), table, tokens, deferred, gradients, plan)


def solved_names(loss: LossSpec) -> tuple[str, ...]:
    """Names of the per-token numbers that stand beside a solved loss, in order: what its options ask for."""
    if loss.return_logps:
        return (*loss.objective.number_names(loss), "d_logps")
    return ("predictions",) if loss.return_predictions else ()


def _tokens(call: Call, rows: Rows, objective: Objective, deferred: Tensor) -> list[Tensor]:
    """The numbers of `solved_names`; d_logps is d loss / d logps."""
    names, numbers, N = solved_names(call.loss), objective.numbers(), call.targets.shape[0]
    if "d_logps" in names:
        zero = torch.zeros_like(numbers["logps"])
        numbers["d_logps"] = objective.grads.logps * deferred if call.trainable else zero
    return [rows.scattered(numbers[name], N) for name in names]


def token_numbers(call: Call) -> Numbers:
    """Per-token numbers for autograd outside, and d logp / d hidden where that spares a second walk."""
    planned, vectors = partial(plan_for, purpose=Pass.NUMBERS), keeps_vectors(call)
    guess = Guess([call], Pass.NUMBERS, partial(_begun, planned, gradients=vectors))
    (call, rows), N = choose_rows(call, guess.read), call.targets.shape[0]
    plan = planned(call, rows)
    objective = call.loss.objective.reading(call, rows, plan)
    head = guess.head(plan, rows) or _head(call, rows, plan, gradients=vectors)
    run(plan, head, objective, Gradients([call], static=False))
    numbers = {name: rows.scattered(x, N) if x.dim() else x for name, x in objective.numbers().items()}
    return Numbers(numbers, head.d_hidden, rows, plan)


def token_gradients(
    call: Call,
    numbers: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    vectors: Tensor | None,
    rows: Rows | None,
    *,
    static: bool,
) -> tuple[Tensor, Gradients]:
    """The deferred factor, and the gradients, once those of the per-token numbers (N,) are known."""
    if rows is None:
        call, rows = choose_rows(call)
    else:
        call = call.with_shards(rows.shards)
    everything = rows.at(0, rows.count)
    given = {name: x[everything].to(call.stat_dtype) for name, x in upstream.items()}
    known = {name: x[everything] for name, x in numbers.items()}
    gradients = Gradients([call], static=static)
    one = torch.ones((), dtype=call.stat_dtype, device=call.targets.device)
    if vectors is not None:
        objective = call.loss.objective.writing(call, rows, known, given)
        head = Projection(call, rows, gradients=False)
        head.d_hidden = torch.empty_like(vectors) if rows.index is None else torch.zeros_like(vectors)
        scale_vectors(vectors, head.d_hidden, objective, head)
        gradients.close(call, head, one)
        return one, gradients
    deferred = one
    if gradients.deferred is None:
        # At order one, whatever their size: the exponent of the largest is left for the end.
        largest = torch.stack([x.abs().amax() if x.numel() else one * 0 for x in given.values()]).amax()
        deferred = power_of_two(torch.where(torch.isfinite(largest) & (largest > 0), largest, one))
        given = {name: x / deferred for name, x in given.items()}
    spared = spared_bytes(call, static=static)
    plan = plan_for(call, rows, Pass.GRADIENTS, spared=spared)
    objective = call.loss.objective.writing(call, rows, known, given)
    head = _head(call, rows, plan, gradients=True)
    gradients.open(call, deferred, several_chunks=plan.chunks > 1)
    run(plan, head, objective, gradients)
    gradients.close(call, head, deferred)
    return deferred, gradients


def _head(call: Call, rows: Rows, plan: Plan, *, gradients: bool) -> Projection:
    return PROJECTIONS[plan.columns > 0](call, rows, gradients=gradients)


def _begun(
    planned: Callable[[Call, Rows], Plan], call: Call, rows: Rows, *, gradients: bool
) -> tuple[Plan, Projection]:
    """The plan of some rows, and a head that has projected its first chunk."""
    plan = planned(call, rows)
    head = _head(call, rows, plan, gradients=gradients)
    head.begin(plan)
    return plan, head


def keeps_vectors(call: Call) -> bool:
    """Whether a call that hands out per-token numbers keeps d logp / d hidden with them."""
    hidden_alone = call.needs.hidden and not (call.needs.weight or call.needs.bias)
    return hidden_alone and call.loss.objective.linear_in_logps(call.loss)


def choose_rows(call: Call, read: Callable[[Tensor], list[int]] = Tensor.tolist) -> tuple[Call, Rows]:
    """Which rows are projected, and in which order; raises the call's faults (see `spec.Fault`).

    The call comes back with the shards of its vocabulary, whose sizes are read with the number of rows.
    """
    loss, targets, V = call.loss, call.targets, call.V
    shards, known = None, f"{V}"
    if call.vocabulary.sharded:
        shards = call.vocabulary.codes_of(call.weight, loss.tp_group, unrounded=call.unrounded)
        V, known = (shards // 2).sum(), "{V}"
    found = [] if loss.faults is None else loss.faults(targets, call.inputs, V)
    marking = [fault for fault in found if fault.count.dim()]
    others = torch.stack([fault.count for fault in marking]) if marking else None
    marks = marked(targets, V, loss.ignore_index, others)
    expected, remedy = f"ids in [0, {known}) or ignore_index", "fix the labels or set ignore_index"
    seen = partial(_seen_outside, targets, marks, loss.ignore_index, remedy)
    faults = [Fault(marks[1], "targets", expected, "{count} outside", remedy, seen), *marking]
    if call.num_items is not None and loss.reduction == "mean":
        zero = ((call.num_items == 0) & marks[0].any()).long()
        remedy = "count what is supervised"
        faults.append(Fault(zero, "num_items", "a number above 0", "0 beside supervised tokens", remedy))
    faults += [fault for fault in found if not fault.count.dim()]
    grouped, packed = loss.scope != "token", call.cu_seqlens is not None
    # Ranks with slices of the same sequences have different chunks: they meet once, with all tokens read.
    together = loss.scope == "batch" or loss.cp_group is not None or (grouped and not loss.compact and packed)
    sequences = call.sequence_count if grouped else 0
    grouping = Grouping(sequences, max(1, sequences) if together else loss.sequences_per_group, grouped)
    cu_seqlens = call.cu_seqlens if grouped else None
    peers = ALONE
    if loss.tp_group is not None or loss.cp_group is not None:
        peers = Peers(tuple(group for group in (loss.tp_group, loss.cp_group) if group is not None))
    options = {"compact": loss.compact, "peers": peers, "shards": shards, "read": read}
    rows = select_rows(marks, faults, grouping, cu_seqlens, **options)
    tokens, chosen = call.sequences.counts(targets.device, rows.tokens, rows.chosen_tokens)
    call = call if shards is None else call.with_shards(rows.shards)
    return call, rows._replace(tokens=tokens, chosen_tokens=chosen)


def _seen_outside(targets: Tensor, marks: Tensor, ignore_index: int, remedy: str) -> tuple[str, str]:
    """What to say of targets that are no ids, and a remedy: another one where they look like a mark."""
    outside = marks[1]
    ids = targets[outside]
    if not ids.numel():  # they are on other ranks
        return "", remedy
    least, greatest, first = ids.min().item(), ids.max().item(), ids[0].item()
    row = outside.nonzero()[0, 0].item()
    seen = f": the least is {least}, the greatest {greatest}; "
    seen += f"the first, {first}, is that of hidden's row {row}"
    # As in labels made for transformers, or in data that marks padding with -1.
    mark = -100 if (ids == -100).any() else least
    if mark != -100 and (least != greatest or least >= 0):
        return seen, remedy
    return seen, f"set ignore_index={mark}, not {ignore_index}, if {mark} marks what is not supervised"


def plan_for(call: Call, rows: Rows, purpose: Pass, heads: int = 1, spared: int = 0) -> Plan:
    """The plan of a pass: its strategy and chunks within `logits_budget`, or the device's default.

    What grows with the vocabulary counts; the two [C, H] matrices beside a chunk belong to O(N H).
    `spared`: see `Gradients.spared_bytes`.
    """
    loss, device, needs = call.loss, call.weight.device, call.needs
    budget = loss.logits_budget or default_budget(device)
    costs = loss.objective.costs(call, budget, purpose)
    row_bytes, fixed = costs.row_bytes, costs.fixed_bytes
    if budget - fixed < row_bytes:
        warn_once(
            f"logits_budget: one row of logits and its temporaries take {row_bytes + fixed} bytes, more than "
            f"the {budget} given; working one row at a time. Give at least {256 * row_bytes // MIB + 1} MiB "
            "for speed."
        )
    usable, trainable_head = max(budget - fixed, row_bytes), needs.weight or needs.bias
    backward = (needs.hidden or needs.layers) + needs.weight
    twice = purpose is Pass.NUMBERS and call.trainable and not keeps_vectors(call)
    facts = Facts(
        rows.count,
        None if rows.group_sizes is None else tuple(rows.group_sizes),
        call.trainable,
        trainable_head,
        costs.linear_in_logps,
        costs.rereads,
        costs.columns,
        spared,
        backward,
        1 + backward if twice else 0,
        fixed,
        heads,
    )
    plan = make_plan(purpose, facts, row_bytes=row_bytes, budget=usable)
    if purpose is Pass.SOLVE and "recompute" in plan.parts:
        needed = max(rows.group_sizes) * row_bytes
        enough = needed + loss.objective.costs(call, 2 * needed, purpose).fixed_bytes
        warn_once(
            f"logits_budget: the largest group of tokens needs {needed / MIB:.0f} MiB to stay resident, more "
            f"than the {usable / MIB:.0f} given, and is walked twice (4 products for 3); set "
            f"logits_budget={enough} to avoid that."
        )
    return plan
