"""Forward and backward pass of a call on plain tensors, below autograd: choose rows, plan, walk, scale.

Everything here runs eagerly, also inside a compiled graph, where it is the body of an opaque operator.
"""

import functools
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logitless.kernels.cross_entropy import TokenStats, allocate_stats, twin_bytes
from logitless.kernels.matmul import piece_bytes
from logitless.kernels.scale import scale as kernels_scale
from logitless.losses.batch import Rows, Scales, select_rows, settled
from logitless.losses.checks import check_vocabulary_input
from logitless.losses.measure import logits_loss_row_bytes
from logitless.losses.plan import MIB, BudgetWarning, Plan, default_budget, make_plan
from logitless.losses.shard import VocabShard
from logitless.losses.walk import Blocks, LogitsWalk, Needs, TokenWalk, Walk, scale_rows

if TYPE_CHECKING:
    from logitless.losses.base import LinearLoss

Number = float | Tensor

# Rows that the backward pass of a frozen head scales at a time: a few [rows, H] temporaries, small beside d_hidden.
SCALED_ROWS = 2048


class Problem(NamedTuple):
    """One call's tensors, flattened to N tokens."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,) int64
    num_items: Tensor | None  # ()
    cu_seqlens: Tensor | None  # (sequences + 1,)
    inputs: Mapping[str, Tensor | None]  # by declared name
    sequences: int  # 0 where the call has none
    dtype: torch.dtype  # of the products
    needs: Needs
    # (V, H) columns of the head without gradient, which stand before those of `weight`; joined to it before a walk
    frozen: Tensor | None = None
    frozen_columns: int = 0  # how many of `weight` they are, once joined
    shard: VocabShard | None = None

    @property
    def V(self) -> int:
        """Size of the vocabulary."""
        return self.weight.shape[0] if self.shard is None else self.shard.total

    @property
    def width(self) -> int:
        """Columns of a chunk of logits, the same on all ranks, so that they walk the same chunks."""
        return self.weight.shape[0] if self.shard is None else max(self.shard.sizes)

    @property
    def stat_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def supervised(self, ignore_index: int) -> Tensor:
        return self.targets != ignore_index


class Solved(NamedTuple):
    """The loss, and its gradients up to the factor `pending`."""

    loss: Tensor
    metrics: Tensor
    tokens: list[Tensor]  # (N,) each, of `solved_names`
    pending: Tensor
    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None


def _rows(loss: "LinearLoss", problem: Problem) -> Rows:
    V = problem.V
    supervised = problem.supervised(loss.ignore_index)
    bad = (supervised & ((problem.targets < 0) | (problem.targets >= V))).sum()
    grouped = loss.scope != "token"
    # Ranks with slices of the same sequences have different chunks: they meet once, when all their tokens are read.
    together = loss.scope == "batch" or loss.cp_group is not None or (grouped and not loss.compact and problem.cu_seqlens is not None)
    roles = max(1, problem.sequences) if together else loss.sequences_per_group
    sequences = problem.sequences if grouped or loss.sequence_inputs else 0
    rows = select_rows(
        supervised, bad, V, compact=loss.compact, grouped=grouped, sequences=sequences, roles=roles, cu_seqlens=problem.cu_seqlens
    )  # fmt: skip
    tokens, chosen_tokens = counted(loss, problem, rows.tokens, rows.chosen_tokens)
    return rows._replace(tokens=tokens, chosen_tokens=chosen_tokens)


def counted(loss: "LinearLoss", problem: Problem, *tokens: Number) -> tuple[Number, ...]:
    """Numbers of tokens in this call -> in whole sequences."""
    if loss.slices is None:
        return tokens
    return loss.slices.sum(torch.stack([torch.as_tensor(x, device=problem.targets.device) for x in tokens])).unbind()


def accumulation_dtype(loss: "LinearLoss", problem: Problem, several_chunks: bool) -> torch.dtype:
    return loss.accum_dtype or (problem.stat_dtype if several_chunks else problem.dtype)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, BudgetWarning, stacklevel=6)


def _linear_in_logps(loss: "LinearLoss") -> bool:
    return not loss.is_logits_loss and set(loss.differentiates) <= {"logps", "lse"}


def keeps_vectors(loss: "LinearLoss", needs: Needs) -> bool:
    """Whether a call that hands out per-token numbers keeps d logp / d hidden with them."""
    return _linear_in_logps(loss) and needs.hidden and not needs.head


def _plan(loss: "LinearLoss", problem: Problem, rows: Rows, *, solved: bool, rewalk: bool = False) -> Plan:
    V, H = problem.width, problem.weight.shape[1]
    device = problem.weight.device
    logits_dtype = loss.logits_dtype or problem.dtype
    # What grows with the vocabulary counts; the two [C, H] matrices beside a chunk are part of O(N H).
    row_bytes = V * logits_dtype.itemsize
    if loss.is_logits_loss:
        row_bytes += logits_loss_row_bytes(loss, problem, logits_dtype)
    budget = loss.logits_budget or default_budget(device)
    fixed = piece_bytes(device, problem.dtype, logits_dtype, V, H)
    if not loss.is_logits_loss:
        fixed += twin_bytes(device, logits_dtype, V, budget)
    usable = budget - fixed
    if usable < row_bytes:
        _warn_once(
            f"logits_budget: one row of logits and its temporaries take {row_bytes + fixed} bytes, more than the {budget} given; "
            f"working one row at a time. Give at least {256 * row_bytes // MIB + 1} MiB for speed."
        )
    plan = make_plan(
        rows=rows.count, groups=rows.group_sizes, row_bytes=row_bytes, budget=max(usable, row_bytes),
        differentiable=problem.needs.any, trainable_head=problem.needs.head,
        linear_in_logps=_linear_in_logps(loss), solved=solved, rewalk=rewalk, rereads=loss.is_logits_loss,
    )  # fmt: skip
    if solved and "recompute" in plan.parts:
        need = max(rows.group_sizes) * row_bytes
        _warn_once(
            f"logits_budget: the largest group of tokens needs {need / MIB:.0f} MiB to stay resident, more than the "
            f"{budget / MIB:.0f} given, and is walked twice (4 products for 3); set logits_budget={need} to avoid that."
        )
    return plan


def scales(
    loss: "LinearLoss", problem: Problem, tokens: Number, chosen_tokens: Number, *, reduced: bool, coefficient: float = 1.0,
    pending: Number | None = None,
) -> tuple[Scales, Number]:  # fmt: skip
    """Factors of each unit, and the power of two that stays out of the chunks.

    With the factor of the main unit as m * 2^e, m in [0.5, 1) goes into the gradients that enter the chunks and 2^e is left for the
    backward pass: no gradient underflows in fp16, however many tokens there are, and applying 2^e rounds nothing. What the host knows
    stays a Python number: launching tiny kernels would keep the GPU waiting for the first product.
    """

    def inverse(x: Number) -> Number:
        if not isinstance(x, Tensor):
            return 1.0 / x if x else 1.0
        x = x.to(problem.stat_dtype)
        return 1.0 / torch.where(x == 0, 1.0, x)

    counts = {"tokens": tokens, "sequences": problem.sequences, "pairs": problem.sequences // 2, "chosen_tokens": chosen_tokens}
    metrics = {unit: inverse(count) for unit, count in counts.items()} | {None: 1.0}
    if not reduced:
        return Scales(None, metrics), 1.0
    if loss.reduction == "sum":
        normalizers = dict.fromkeys(counts, 1)
    else:
        normalizers = loss.normalizers(counts, problem.targets, problem.inputs)
        if problem.num_items is not None:
            normalizers[loss.unit] = problem.num_items
    factors = {unit: coefficient * inverse(count) for unit, count in normalizers.items()} | {None: coefficient}
    pending = _power_of_two(factors[loss.unit]) if pending is None else pending
    return Scales({unit: factor / pending for unit, factor in factors.items()}, metrics), pending


def _power_of_two(x: Number) -> Number:
    """The smallest power of two above x > 0."""
    if not isinstance(x, Tensor):
        return 2.0 ** math.frexp(x)[1]
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def _walk(loss: "LinearLoss", problem: Problem, rows: Rows, factors: Scales | None, **more) -> Walk:
    make = LogitsWalk if loss.is_logits_loss else TokenWalk
    weight, inputs = problem.weight.to(problem.dtype), problem.inputs
    if inputs.get("ref_weight") is not None:
        inputs = {**inputs, "ref_weight": inputs["ref_weight"].to(problem.dtype)}
    if problem.shard is not None and inputs.get("class_weights") is not None:
        check_vocabulary_input("class_weights", inputs["class_weights"], problem.V)
        more["column_weights"] = problem.shard.rows_of(inputs["class_weights"])
    return make(
        loss, problem.hidden, weight, problem.bias, problem.targets, inputs, rows, problem.needs, factors,
        shard=problem.shard, frozen_columns=problem.frozen_columns, **more,
    )  # fmt: skip


def _token_buffers(loss: "LinearLoss", problem: Problem, rows: Rows, plan: Plan) -> dict:
    """Per-token vectors that a TokenWalk fills. Gradients start as those of log p itself, for plans that keep its vectors."""
    if loss.is_logits_loss:
        return {}
    device, stat = problem.weight.device, problem.stat_dtype
    grads = {name: torch.zeros(rows.count, dtype=stat, device=device) for name in loss.differentiates}
    if "logps" in grads:
        grads["logps"].fill_(1.0)
    stats = allocate_stats((*loss.differentiates, *loss.observes), rows.count, stat, device)
    referred = problem.inputs.get("ref_hidden") is not None
    ref_logps = torch.empty(rows.count, dtype=stat, device=device) if referred else None
    return {"stats": stats, "grads": TokenStats(**grads), "vectors": plan.strategy == "row_scaled", "ref_logps": ref_logps}


def solve(
    loss: "LinearLoss", problem: Problem, *, static: bool, coefficient: float = 1.0, pending: Number | None = None,
    blocks: Blocks | None = None, d_weight: Tensor | None = None, d_bias: Tensor | None = None, straight: bool = False,
) -> tuple[Solved, Plan]:  # fmt: skip
    """The loss and its gradients in one pass.

    Args:
        static: dtypes may not depend on the number of tokens.
        coefficient: factor of the loss, where it is a part of another.
        pending, d_weight, d_bias: of another part, to be summed with.
        blocks: layers between the hidden states and the head.
        straight: whether d_weight holds finished gradients, to which these are added as they are.
    """
    rows = _rows(loss, problem)
    plan = _plan(loss, problem, rows, solved=True)
    # Only in fp16 would they vanish where they are not kept at order one; there d_weight is taken to that order, and back.
    shrinks = straight and problem.dtype == torch.float16
    pending = 1.0 if straight and not shrinks else pending
    factors, pending = scales(
        loss, problem, rows.tokens, rows.chosen_tokens, reduced=True, coefficient=coefficient, pending=pending
    )  # fmt: skip
    if shrinks:
        d_weight.div_(pending)
    shared = {"blocks": blocks, "d_weight": d_weight, "d_bias": d_bias}
    walk = _walk(loss, problem, rows, factors, **shared, **_token_buffers(loss, problem, rows, plan))
    walk.run(plan, accumulation_dtype(loss, problem, static or plan.chunks > 1))
    if shrinks:
        d_weight.mul_(pending)
    if plan.strategy == "row_scaled":
        _scale_all(walk.d_hidden, walk.d_hidden, walk, rows)
    loss_value = sum(value for value, _ in walk.reports) * pending
    if not isinstance(pending, Tensor):
        pending = torch.full((), pending, dtype=problem.stat_dtype, device=problem.targets.device)
    metrics = [settled([found[name] for _, found in walk.reports]).to(loss_value.dtype) for name in _metric_names(loss, walk.reports)]
    stacked = torch.stack(metrics) if metrics else loss_value.new_zeros(0)
    tokens = [_scatter(x, rows, problem.targets.shape[0]) for x in _tokens(loss, walk, pending)]
    return Solved(loss_value, stacked, tokens, pending, walk.d_hidden, walk.d_weight, walk.d_bias), plan


def _tokens(loss: "LinearLoss", walk: Walk, pending: Tensor) -> list[Tensor]:
    if not loss.return_logps:
        return []
    d_logps = walk.grads.logps * pending if walk.needs.any else torch.zeros_like(walk.stats.logps)
    return [*(x for _, x in walk.stats.items()), d_logps]


def _metric_names(loss: "LinearLoss", reports: list) -> tuple[str, ...]:
    found = set(reports[0][1])
    if found != set(loss.metric_names):
        raise ValueError(
            f"metric_names: expected the metrics that {type(loss).__name__}.terms returns, {sorted(found)}, "
            f"got {sorted(loss.metric_names)}; declare them on the class."
        )
    return loss.metric_names


def _scale_all(d_logp: Tensor, out: Tensor, walk: TokenWalk, rows: Rows) -> None:
    """`out` rows from d logp / d hidden rows (they may be the same tensor) and the gradients in `walk.grads`."""
    for start in range(0, rows.count, SCALED_ROWS):
        stop = min(start + SCALED_ROWS, rows.count)
        at = rows.slice(start, stop)
        numbers = walk.stats[start:stop], walk.grads[start:stop]
        scaled = scale_rows(d_logp[at], walk.weight, walk.targets[at], *numbers, walk.loss.head, walk.shard).to(out.dtype)
        if isinstance(at, slice):
            out[at] = scaled
        else:
            out.index_copy_(0, at, scaled)


def _scatter(x: Tensor, rows: Rows, N: int) -> Tensor:
    if rows.index is None:
        return x
    return x.new_zeros(N, *x.shape[1:]).index_copy_(0, rows.index, x)


def token_numbers(loss: "LinearLoss", problem: Problem) -> tuple[dict[str, Tensor], Tensor | None, Rows, Plan]:
    """Per-token numbers `[N]`, zero where ignored, and d logp / d hidden `[N, H]` where the plan keeps it."""
    rows = _rows(loss, problem)
    plan = _plan(loss, problem, rows, solved=False)
    N = problem.targets.shape[0]
    if loss.is_logits_loss:
        factors, _ = scales(loss, problem, rows.tokens, rows.chosen_tokens, reduced=False)
        walk = _walk(loss, problem, rows, factors, values=torch.zeros(rows.count, dtype=problem.stat_dtype, device=problem.targets.device))
        walk.run(plan, None)
        metrics = {name: settled([found[name] for _, found in walk.reports]) for name in loss.metric_names} if walk.reports else {}
        return {"values": _scatter(walk.values, rows, N)} | metrics, None, rows, plan
    walk = _walk(loss, problem, rows, None, **_token_buffers(loss, problem, rows, plan))
    walk.run(plan, problem.dtype if keeps_vectors(loss, problem.needs) else None)
    return {name: _scatter(x, rows, N) for name, x in walk.stats.items()}, walk.d_hidden, rows, plan


def token_gradients(
    loss: "LinearLoss", problem: Problem, numbers: Mapping[str, Tensor], grads: Mapping[str, Tensor], d_logp: Tensor | None,
    rows: Rows | None, *, static: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(pending, d_hidden, d_weight, d_bias) once the gradients of the per-token numbers are known."""
    rows = _rows(loss, problem) if rows is None else rows
    everything = rows.slice(0, rows.count)
    given = {name: grad[everything].to(problem.stat_dtype) for name, grad in grads.items()}
    known = {name: x[everything] for name, x in numbers.items()}
    one = torch.ones((), dtype=problem.stat_dtype, device=problem.targets.device)
    if d_logp is not None:
        given.setdefault("logps", torch.zeros_like(known["lse"]))
        walk = _walk(loss, problem, rows, None, stats=TokenStats(**known), grads=TokenStats(**given))
        out = torch.zeros_like(d_logp)
        _scale_all(d_logp, out, walk, rows)
        return one, out, None, None
    # At order one, whatever their size: the exponent of the largest is left for the end.
    largest = torch.stack([g.abs().amax() if g.numel() else one * 0 for g in given.values()]).amax()
    pending = _power_of_two(torch.where(torch.isfinite(largest) & (largest > 0), largest, one))
    given = {name: g / pending for name, g in given.items()}
    plan = _plan(loss, problem, rows, solved=False, rewalk=True)
    if loss.is_logits_loss:
        factors, _ = scales(loss, problem, rows.tokens, rows.chosen_tokens, reduced=False)
        walk = _walk(loss, problem, rows, factors, upstream=given["values"])
    else:
        walk = _walk(loss, problem, rows, None, stats=TokenStats(**known), grads=TokenStats(**given))
    walk.run(plan, accumulation_dtype(loss, problem, static or plan.chunks > 1))
    return pending, walk.d_hidden, walk.d_weight, walk.d_bias


def finish(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype, *, owned: bool) -> Tensor | None:
    """`gradient * scale` in `dtype`, in fp32 arithmetic and one pass; in place where nobody else will read the gradient."""
    if gradient is None:
        return None
    if torch.compiler.is_compiling():
        return (gradient.to(scale.dtype) * scale).to(dtype)
    return kernels_scale(gradient, scale, gradient if owned and gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype))
