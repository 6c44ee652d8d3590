"""The three passes over a call: `solve`, `token_statistics` and `token_gradients`.

`solve` computes the loss and its gradients. `token_statistics` computes per-token statistics, and
`token_gradients` the gradients of the operands from the gradients of these statistics. The passes run
eagerly, below autograd. In a compiled graph, each is the body of an opaque operator.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.engine.budget import default_budget, warn_once
from logitless.engine.call import HeadCall
from logitless.engine.choose import resolve_rows
from logitless.engine.early_projection import over_rows
from logitless.engine.gradients import Gradients
from logitless.engine.loop import run
from logitless.engine.objectives.base import Objective, settled
from logitless.engine.objectives.gathered import GatheredProjection
from logitless.engine.objectives.replay import ReplayObjective, ReplayProjection
from logitless.engine.plan import Facts, Pass, Plan, Replayed, make_plan, make_replay_plan
from logitless.engine.projection import Projection
from logitless.engine.reduction import power_of_two, unit_factors
from logitless.engine.rows import Rows
from logitless.engine.spec import LossSpec
from logitless.kernels.head.scale import scale

# Number of rows that `scale_cached_grad` scales at a time. Its temporaries (rows, H) are small compared with
# d_hidden.
SCALED_ROWS = 2048


@dataclass
class Solved:
    """The loss of a call, and its gradients up to a deferred factor."""

    loss: Tensor  # 0-d
    metrics: Tensor  # (heads, 1 + metrics): the loss of each head without its coefficient, then its metrics
    tokens: list[Tensor]  # (N,) per-token statistics, in the order of `solved_names`
    deferred: float | Tensor  # the factor by which the gradients must still be multiplied; a number, or 0-d
    gradients: Gradients
    plan: Plan  # of the last head
    rows: Rows  # of the last head

    @property
    def is_final(self) -> bool:
        """Whether the host knows that the deferred factor is 1."""
        return isinstance(self.deferred, float) and self.deferred == 1.0

    @property
    def deferred_on_device(self) -> Tensor:
        """The deferred factor as a 0-d tensor in the dtype of the loss."""
        if isinstance(self.deferred, Tensor):
            return self.deferred
        return torch.full((), self.deferred, dtype=self.loss.dtype, device=self.loss.device)


@dataclass
class Statistics:
    """Per-token statistics of a call."""

    named: dict[str, Tensor]  # by name: (N,) per token, 0 for ignored tokens; or 0-d
    dlogp_dhidden: Tensor | None  # (N, H) d logp / d hidden, if the plan keeps it
    rows: Rows
    plan: Plan


def solve(calls: Sequence[HeadCall], *, fixed_dtypes: bool, main: Tensor | None = None) -> Solved:
    """Compute the loss and its gradients in one pass.

    Args:
        calls: the heads, in order.
        fixed_dtypes: whether the dtypes of the gradients must not depend on the number of tokens.
        main: (V, H) to which the complete gradient of the weight is added.
    """
    if len(calls) == 1 and main is None:
        return over_rows(
            calls[0], lambda call, rows: _solve([(call, rows)], fixed_dtypes=fixed_dtypes, main=None)
        )
    return _solve(list(map(resolve_rows, calls)), fixed_dtypes=fixed_dtypes or len(calls) > 1, main=main)


def _solve(chosen: Sequence[tuple[HeadCall, Rows]], *, fixed_dtypes: bool, main: Tensor | None) -> Solved:
    d_weight_in_stat_dtype = fixed_dtypes or main is not None
    gradients = Gradients([call for call, _ in chosen], fixed_dtypes=fixed_dtypes, main=main)
    deferred = gradients.deferred
    losses = []
    metrics = []
    for call, rows in chosen:
        plan = plan_for(call, rows, Pass.SOLVE, len(chosen), d_weight_in_stat_dtype=d_weight_in_stat_dtype)
        factors, deferred = unit_factors(call, rows, deferred)
        objective = objective_of(call).for_loss(call, rows, plan, factors)
        head = projection_of(plan)(call, rows, gradients=True)
        gradients.open(call, deferred, several_chunks=plan.d_weight_parts > 1)
        run(plan, rows.chunked, head, objective, gradients)
        if plan.strategy == "cached_grad":
            scale_cached_grad(head.d_hidden, head.d_hidden, objective, head)
        gradients.close(call, head, deferred)
        total, head_metrics = settled(call, objective.reports, factors.metrics)
        # Skip the multiplication if the host knows that the factor is 1. A factor on the device is not read
        # back.
        is_one = isinstance(deferred, float) and deferred == 1.0
        losses.append(total if is_one else total * deferred)
        head_loss = losses[-1] if call.coefficient == 1.0 else losses[-1] / call.coefficient
        metrics.append(torch.stack([head_loss, *head_metrics]))
    asked = call.loss.return_logps or call.loss.return_predictions
    tokens = _tokens(call, rows, objective, deferred) if asked else []
    table = torch.stack(metrics) if len(metrics) > 1 else metrics[0][None]
    return Solved(sum(losses[1:], losses[0]), table, tokens, deferred, gradients, plan, rows)


def plan_into_main(call: HeadCall, solved: Solved) -> Plan:
    """The plan of a call whose backward pass adds to a main gradient.

    Args:
        call: the call, with what needs a gradient: the backward pass solves it.
        solved: the result of the forward pass, which computed no gradients.
    """
    call = call.with_shards(solved.rows.shards)
    later = plan_for(call, solved.rows, Pass.SOLVE, d_weight_in_stat_dtype=True)
    return replace(solved.plan, in_backward=later)


def solved_names(loss: LossSpec) -> tuple[str, ...]:
    """Names of the per-token statistics that `solve` also returns, in order. They depend on the options."""
    if loss.return_logps:
        return (*loss.objective.statistic_names(loss), "d_logps")
    return ("predictions",) if loss.return_predictions else ()


def _tokens(call: HeadCall, rows: Rows, objective: Objective, deferred: float | Tensor) -> list[Tensor]:
    """The (N,) statistics of `solved_names`; d_logps is d loss / d logps."""
    names = solved_names(call.loss)
    statistics = objective.named_statistics()
    N = call.targets.shape[0]
    if "d_logps" in names:
        has_grad = call.trainable and "logps" in call.loss.differentiates
        zero = torch.zeros_like(statistics["logps"])
        statistics["d_logps"] = objective.grads.logps * deferred if has_grad else zero
        if has_grad and rows.replay is not None:
            statistics["d_logps"] = rows.replay.in_row_order(statistics["d_logps"])
    return [rows.scattered(statistics[name], N) for name in names]


def token_statistics(call: HeadCall) -> Statistics:
    """Compute per-token statistics.

    With a frozen head, also compute d logp / d hidden, so that the backward pass need not recompute the
    logits. It is not computed with a sampling mask or a differentiable entropy; see `keeps_dlogp_dhidden`.
    """
    return over_rows(call, _token_statistics)


def _token_statistics(call: HeadCall, rows: Rows) -> Statistics:
    N = call.targets.shape[0]
    cached_grad = keeps_dlogp_dhidden(call)
    plan = plan_for(call, rows, Pass.STATISTICS)
    objective = objective_of(call).for_stats(call, rows, plan)
    head = projection_of(plan)(call, rows, gradients=cached_grad)
    run(plan, rows.chunked, head, objective, Gradients([call], fixed_dtypes=False))
    statistics = {
        name: rows.scattered(x, N) if x.dim() else x for name, x in objective.named_statistics().items()
    }
    return Statistics(statistics, head.d_hidden, rows, plan)


def token_gradients(
    call: HeadCall,
    statistics: Mapping[str, Tensor],
    upstream: Mapping[str, Tensor],
    dlogp_dhidden: Tensor | None,
    rows: Rows | None,
    *,
    fixed_dtypes: bool,
) -> tuple[Tensor, Gradients]:
    """The backward pass of `token_statistics`.

    Args:
        call: the call.
        statistics: (N,) statistics by name, as the forward pass returned them.
        upstream: (N,) gradients of the differentiable statistics, by name.
        dlogp_dhidden: (N, H) d logp / d hidden, if the forward pass kept it.
        rows: the rows of the forward pass; None: choose them again.
        fixed_dtypes: see `solve`.

    Returns:
        (deferred factor, gradients up to that factor).
    """
    if rows is None:
        call, rows = resolve_rows(call)
    else:
        call = call.with_shards(rows.shards)
    everything = rows.at(0, rows.count)
    gradients = Gradients([call], fixed_dtypes=fixed_dtypes)
    if not call.loss.compact and (dlogp_dhidden is not None or gradients.deferred is None):
        # With compact=False, ignored rows have upstream gradients too. The kernels of a chunk do not read
        # them. They must neither multiply a kept d logp / d hidden nor choose the power of two of fp16.
        upstream = {name: _masked(x, rows.supervised) for name, x in upstream.items()}
    grads = {name: x[everything].to(call.stat_dtype) for name, x in upstream.items()}
    row_statistics = {name: x[everything] for name, x in statistics.items()}
    one = torch.ones((), dtype=call.stat_dtype, device=call.targets.device)
    if dlogp_dhidden is not None:
        objective = call.loss.objective.for_backward(call, rows, row_statistics, grads)
        head = Projection(call, rows, gradients=False)
        head.d_hidden = (
            torch.empty_like(dlogp_dhidden) if rows.index is None else torch.zeros_like(dlogp_dhidden)
        )
        scale_cached_grad(dlogp_dhidden, head.d_hidden, objective, head)
        gradients.close(call, head, one)
        return one, gradients
    deferred = one
    if gradients.deferred is None:
        # Divide by a power of two so that the largest upstream gradient is near 1. `finish` multiplies by it
        # again.
        largest = torch.stack([x.abs().amax() if x.numel() else one * 0 for x in grads.values()]).amax()
        deferred = power_of_two(torch.where(torch.isfinite(largest) & (largest > 0), largest, one))
        grads = {name: x / deferred for name, x in grads.items()}
    plan = plan_for(call, rows, Pass.GRADIENTS, d_weight_in_stat_dtype=fixed_dtypes)
    objective = objective_of(call).for_backward(call, rows, row_statistics, grads)
    head = projection_of(plan)(call, rows, gradients=True)
    gradients.open(call, deferred, several_chunks=plan.d_weight_parts > 1)
    run(plan, rows.chunked, head, objective, gradients)
    gradients.close(call, head, deferred)
    return deferred, gradients


def _masked(x: Tensor, supervised: Tensor) -> Tensor:
    """`x` (N, ...), with 0 in the rows that are not supervised (N,)."""
    return torch.where(supervised.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


def objective_of(call: HeadCall) -> type[Objective]:
    """The objective class of a call: `ReplayObjective` with a sampling mask, else that of the loss."""
    return call.loss.objective if call.sets is None else ReplayObjective


def projection_of(plan: Plan) -> type[Projection]:
    """The class of the projection of a plan."""
    if plan.replay is not None:
        return ReplayProjection
    return GatheredProjection if plan.columns else Projection


def scale_cached_grad(dlogp_dhidden: Tensor, out: Tensor, objective: Objective, head: Projection) -> None:
    """Compute d_hidden from `dlogp_dhidden` (N, H) and the gradients of the statistics (strategy
    cached_grad).

    Writes d_hidden to `out` (N, H), which may be `dlogp_dhidden`.
    """
    rows = objective.rows
    factor = objective.cached_grad_factor()
    if factor is not None:
        # Rows that were not projected get a factor of 0.
        scale(dlogp_dhidden, rows.scattered(factor, dlogp_dhidden.shape[0]), out)
        return
    for start in range(0, rows.count, SCALED_ROWS):
        stop = min(start + SCALED_ROWS, rows.count)
        at = rows.at(start, stop)
        scaled = objective.scale_cached_grad(dlogp_dhidden[at], at, slice(start, stop), head).to(out.dtype)
        if isinstance(at, slice):
            out[at] = scaled
        else:
            out.index_copy_(0, at, scaled)


def keeps_dlogp_dhidden(call: HeadCall) -> bool:
    """Whether a call that returns per-token statistics also keeps d logp / d hidden."""
    hidden_alone = call.needs.hidden and not (call.needs.weight or call.needs.bias)
    hidden_alone = hidden_alone and call.sets is None
    return hidden_alone and call.loss.objective.linear_in_logps(call.loss)


def plan_for(
    call: HeadCall, rows: Rows, purpose: Pass, heads: int = 1, *, d_weight_in_stat_dtype: bool = False
) -> Plan:
    """Make the plan of a pass: its strategy, and chunks within `logits_budget` or the default budget of the
    device.

    The budget limits memory of size (C, V). The features and d_features (C, H) of a chunk are not counted,
    because they are no larger than the (N, H) tensors of the call.

    Args:
        call: the call.
        rows: the rows to project.
        purpose: the kind of the pass.
        heads: number of heads of the public call.
        d_weight_in_stat_dtype: whether d_weight is summed in `stat_dtype` even if there is a single chunk.
    """
    loss = call.loss
    device = call.weight.device
    needs = call.needs
    budget = loss.logits_budget or default_budget(device)
    costs = loss.objective.costs(call, budget, purpose)
    row_bytes, fixed = costs.row_bytes, costs.fixed_bytes
    if rows.teacher is not None:
        row_bytes += math.ceil(rows.teacher.share() * costs.teacher_bytes)
    replay = rows.replay
    if replay is not None and replay.picked and call.fp32_logits:
        row_bytes += call.width * call.logits_dtype.itemsize  # a second buffer, for stored logits
    if budget - fixed < row_bytes:
        warn_once(
            loss,
            "row",
            f"logits_budget: expected at least {row_bytes + fixed} bytes, for one row of logits and its "
            f"temporaries, got {budget} bytes; working one row at a time, set "
            f"logits_budget={256 * row_bytes + fixed} (bytes) or more for speed.",
        )
    usable = max(budget - fixed, row_bytes)
    trainable_head = needs.weight or needs.bias
    backward = (needs.hidden or needs.layers) + needs.weight
    twice = purpose is Pass.STATISTICS and call.trainable and not keeps_dlogp_dhidden(call)
    spared = 0
    # Memory for the sum of d_weight in a wider dtype, which a single chunk does not need. It is also counted
    # in Pass.STATISTICS, so that this pass has the same chunks as the Pass.GRADIENTS that follows. In fp16 it
    # is not counted, because d_weight is always fp32.
    summed = needs.weight and call.dtype not in (call.stat_dtype, torch.float16)
    if summed and not d_weight_in_stat_dtype and loss.accum_dtype is None:
        spared = call.weight.numel() * call.stat_dtype.itemsize
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
        str(call.logits_dtype).removeprefix("torch."),
    )
    if replay is not None:
        kinds = replay.plain, replay.picked, replay.gathered, replay.certain
        replayed = Replayed(*kinds, replay.replayed, replay.kept_ids, replay.single)
        return make_replay_plan(purpose, facts, replayed, row_bytes=row_bytes, budget=usable)
    plan = make_plan(purpose, facts, row_bytes=row_bytes, budget=usable)
    if purpose is Pass.SOLVE and "recompute" in plan.parts:
        needed = max(rows.group_sizes) * row_bytes
        enough = needed + loss.objective.costs(call, 2 * needed, purpose).fixed_bytes
        warn_once(
            loss,
            "group",
            f"logits_budget: expected at least {enough} bytes, for the largest group of tokens of this call, "
            f"got {budget} bytes; the group is projected twice (4 products for 3), set "
            f"logits_budget={enough} (bytes) to avoid that.",
        )
    return plan
