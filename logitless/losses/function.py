"""`FusedLinearBase`, the one autograd Function, and the operators that stand for it under `torch.compile`.

A call runs in one of two ways:

* The loss is *solved* in the forward pass (`reduction="mean"` or `"sum"`): one walk over the chunks leaves the loss and its
  gradients, accumulated up to a scalar. The backward pass multiplies them by that scalar and the upstream gradient, in the same
  pass that casts d_weight to the weight's dtype.
* *Per-token numbers* are handed out (`reduction="none"`, `linear_logprobs`): what follows is ordinary autograd, and the backward
  pass walks the chunks again once their gradients are known. With a frozen head that second walk is not needed: the first one
  keeps d logp / d hidden, one vector per token.

The whole of either pass is one opaque operator for `torch.compile`, which would otherwise unroll the chunk loop into a new graph
for every length.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.kernels.cross_entropy import allocate_stats
from logitless.losses import engine
from logitless.losses.engine import Problem
from logitless.losses.plan import Plan
from logitless.losses.shard import VocabShard
from logitless.losses.walk import Needs

if TYPE_CHECKING:
    from logitless.losses.base import LinearLoss

_LOSSES: dict[str, "LinearLoss"] = {}


@torch.compiler.assume_constant_result
def register(cls: type, values: tuple) -> str:
    """A string that names a loss inside a compiled graph. Works where a loss is built inside one, too."""
    key = f"{cls.__module__}.{cls.__qualname__}@{id(cls):x}{values}"
    if key not in _LOSSES:
        loss = _LOSSES[key] = object.__new__(cls)
        for field, value in zip(fields(cls), values, strict=True):
            object.__setattr__(loss, field.name, value)
        object.__setattr__(loss, "key", key)
    return key


def registered_loss(key: str) -> "LinearLoss":
    return _LOSSES[key]


def names_out(loss: "LinearLoss") -> tuple[str, ...]:
    """Names of the per-token numbers that a call hands out, in order."""
    if loss.is_logits_loss:
        return ("values", *loss.metric_names)
    return tuple(name for name, _ in allocate_stats((*loss.differentiates, *loss.observes), 0, torch.float32, torch.device("cpu")).items())


def solved_names(loss: "LinearLoss") -> tuple[str, ...]:
    """Names of the per-token numbers that stand beside a solved loss, in order."""
    return (*names_out(loss), "d_logps") if loss.return_logps else ()


def _differentiable(loss: "LinearLoss") -> tuple[str, ...]:
    """Which of them carry a gradient; lse does for nothing."""
    return ("values",) if loss.is_logits_loss else (*loss.differentiates, "lse")


def call(loss: "LinearLoss", problem: Problem, *, solved: bool) -> tuple[tuple[Tensor, ...], Plan | None]:
    """Run a call under autograd: (loss, metrics, *numbers of `solved_names`) if solved, else the numbers of `names_out`; and the plan."""
    p = problem
    needs = [p.needs.hidden, p.needs.weight, p.needs.bias]
    tensors = operands(loss, p)
    if not p.needs.any:
        outputs, _, _, plan = _forward(loss, solved, p.sequences, p.dtype, needs, tensors)
        return outputs, plan
    plans: list[Plan] = []
    outputs = FusedLinearBase.apply(loss, plans, solved, p.sequences, p.dtype, needs, *tensors)
    return outputs, plans[0] if plans else None


def operands(loss: "LinearLoss", problem: Problem) -> tuple[Tensor | None, ...]:
    """All tensors of a call, as `_problem` takes them."""
    p = problem
    return (p.hidden, p.weight, p.bias, p.targets, p.num_items, p.cu_seqlens, p.frozen, *(p.inputs[name] for name in loss.inputs))


def _forward(loss: "LinearLoss", solved: bool, sequences: int, dtype: torch.dtype, needs: list[bool], tensors: tuple[Tensor | None, ...]):
    """(outputs, what the backward pass needs of this one, rows, plan), eagerly or through an operator."""
    arguments = (*tensors[:7], list(tensors[7:]), sequences, dtype, needs)
    if torch.compiler.is_compiling():
        if solved:
            *outputs, pending, d_hidden, d_weight, d_bias = _solve_op(*arguments, loss.key)
            return tuple(outputs), [pending, d_hidden, d_weight, d_bias], None, None
        d_logp, *numbers = _numbers_op(*arguments, loss.key)
        return tuple(numbers), [d_logp], None, None
    problem = _problem(loss, *arguments)
    if solved:
        found, plan = engine.solve(loss, problem, static=False)
        return (found.loss, found.metrics, *found.tokens), list(found[3:]), None, plan
    found, d_logp, rows, plan = engine.token_numbers(loss, problem)
    return tuple(found[name] for name in names_out(loss)), [d_logp], rows, plan


class FusedLinearBase(torch.autograd.Function):
    """hidden, head and targets in; the loss, or its per-token numbers, out; the logits nowhere.

    Forward and backward are `engine.solve`, `engine.token_numbers` and `engine.token_gradients`, called directly in eager mode and
    as opaque operators under `torch.compile`.
    """

    @staticmethod
    def forward(ctx, loss, plans, solved, sequences, dtype, needs, *tensors):
        outputs, kept, ctx.rows, plan = _forward(loss, solved, sequences, dtype, needs, tensors)
        if plan is not None:
            plans.append(plan)
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.solved, ctx.sequences, ctx.dtype, ctx.needs = loss, solved, sequences, dtype, needs
        ctx.dtypes = [None if x is None else x.dtype for x in tensors[:3]]
        ctx.tensors = len(tensors)
        if solved:
            ctx.save_for_backward(*kept)
            ctx.mark_non_differentiable(*outputs[1:])
        else:
            ctx.save_for_backward(*tensors, *kept, *outputs)
            names = names_out(loss)
            ctx.mark_non_differentiable(*(x for name, x in zip(names, outputs, strict=True) if name not in _differentiable(loss)))
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False, got True; the losses have no second derivative, so compute the "
                "logits with hidden @ weight.T and differentiate F.cross_entropy where you need one."
            )
        if ctx.solved:
            pending, *gradients = ctx.saved_tensors
            scale = None if upstream[0] is None else pending * upstream[0]
        else:
            scale, gradients = _second_walk(ctx, upstream, compiling)
        found = [None, None, None]
        if scale is not None:
            # Where nobody can come back for them, the kept gradients become the returned ones.
            owned = not compiling and not (ctx.solved and torch._C._autograd._get_current_graph_task_keep_graph())
            found = [
                engine.finish(gradient, scale, dtype, owned=owned) if need else None
                for gradient, dtype, need in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
            ]
            found[2] = None if found[2] is None else found[2].view(-1)
        return (None,) * 6 + tuple(found) + (None,) * (ctx.tensors - 3)


def _second_walk(ctx, upstream: Sequence[Tensor | None], compiling: bool):
    saved = ctx.saved_tensors
    tensors, d_logp, numbers = saved[: ctx.tensors], saved[ctx.tensors], saved[ctx.tensors + 1 :]
    if all(gradient is None for gradient in upstream):
        return None, ()
    arguments = (*tensors[:7], list(tensors[7:]), ctx.sequences, ctx.dtype, ctx.needs)
    if compiling:
        scale, *gradients = _gradients_op(*arguments, ctx.loss.key, d_logp, list(numbers), list(upstream))
    else:
        scale, *gradients = _token_gradients(ctx.loss, _problem(ctx.loss, *arguments), d_logp, numbers, upstream, ctx.rows, static=False)
    return scale, gradients


def _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs) -> Problem:
    named, columns = dict(zip(loss.inputs, inputs, strict=True)), 0
    if frozen is not None:
        columns = frozen.shape[1]
        joined = frozen.new_empty((frozen.shape[0], hidden.shape[1]), dtype=dtype)
        joined[:, :columns], joined[:, columns:] = frozen, weight
        weight = joined
    shard = None if loss.tp_group is None else VocabShard.of(weight, loss.tp_group)
    return Problem(
        hidden, weight, bias, targets, num_items, cu_seqlens, named, sequences, dtype, Needs(*needs), frozen_columns=columns, shard=shard
    )  # fmt: skip


def _token_gradients(loss, problem: Problem, d_logp, numbers, upstream, rows, *, static: bool):
    named = dict(zip(names_out(loss), zip(numbers, upstream, strict=True), strict=True))
    values = {name: x for name, (x, _) in named.items() if x.dim()}
    grads = {name: g for name, (_, g) in named.items() if g is not None and name in _differentiable(loss)}
    return engine.token_gradients(loss, problem, values, grads, d_logp, rows, static=static)


# The same three passes as opaque operators. An operator returns tensors only, always as many: empty ones stand for None.


def _absent(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _problem_shapes(hidden, weight, dtype, needs, accum) -> list[Tensor]:
    V, H = weight.shape
    return [
        hidden.new_empty(hidden.shape if needs[0] else 0, dtype=dtype),
        hidden.new_empty((V, H) if needs[1] else 0, dtype=accum),
        hidden.new_empty((V, 1) if needs[2] else 0, dtype=torch.promote_types(dtype, torch.float32)),
    ]


@torch.library.custom_op("logitless::solve", mutates_args=())
def _solve_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_items: Tensor | None, cu_seqlens: Tensor | None,
    frozen: Tensor | None, inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype, needs: Sequence[bool], key: str,
) -> list[Tensor]:  # fmt: skip
    loss = _LOSSES[key]
    with outside_dispatch():
        problem = _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs)
        found, _ = engine.solve(loss, problem, static=True)
        return [found.loss, found.metrics, *found.tokens, *(_absent(x, found.loss) for x in found[3:])]


@_solve_op.register_fake
def _(hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs, key):
    loss, stat = _LOSSES[key], torch.promote_types(dtype, torch.float32)
    shapes = ((), (len(loss.metric_names),), *(targets.shape for _ in solved_names(loss)), ())
    numbers = [hidden.new_empty(shape, dtype=stat) for shape in shapes]
    return numbers + _problem_shapes(hidden, weight, dtype, needs, loss.accum_dtype or stat)


@torch.library.custom_op("logitless::numbers", mutates_args=())
def _numbers_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_items: Tensor | None, cu_seqlens: Tensor | None,
    frozen: Tensor | None, inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype, needs: Sequence[bool], key: str,
) -> list[Tensor]:  # fmt: skip
    loss = _LOSSES[key]
    with outside_dispatch():
        problem = _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs)
        found, d_logp, _, _ = engine.token_numbers(loss, problem)
        return [_absent(d_logp, hidden), *(found[name] for name in names_out(loss))]


@_numbers_op.register_fake
def _(hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs, key):
    loss, stat = _LOSSES[key], torch.promote_types(dtype, torch.float32)
    kept = engine.keeps_vectors(loss, Needs(*needs))
    shapes = [() if name in loss.metric_names else targets.shape for name in names_out(loss)]
    return [hidden.new_empty(hidden.shape if kept else 0, dtype=dtype), *(hidden.new_empty(shape, dtype=stat) for shape in shapes)]


@torch.library.custom_op("logitless::gradients", mutates_args=())
def _gradients_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_items: Tensor | None, cu_seqlens: Tensor | None,
    frozen: Tensor | None, inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype, needs: Sequence[bool], key: str,
    d_logp: Tensor, numbers: Sequence[Tensor], upstream: Sequence[Tensor | None],
) -> list[Tensor]:  # fmt: skip
    loss = _LOSSES[key]
    with outside_dispatch():
        problem = _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs)
        kept = d_logp if engine.keeps_vectors(loss, problem.needs) else None
        found = _token_gradients(loss, problem, kept, numbers, upstream, None, static=True)
        return [_absent(x, found[0]) for x in found]


@_gradients_op.register_fake
def _(hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs, key, d_logp, numbers, upstream):
    stat = torch.promote_types(dtype, torch.float32)
    return [hidden.new_empty((), dtype=stat), *_problem_shapes(hidden, weight, dtype, needs, _LOSSES[key].accum_dtype or stat)]


# Dispatch state of a plain program, as it is while this module is imported.
_PLAIN_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def outside_dispatch():
    """Let `torch.func.grad_and_value` work inside an operator's body.

    The dispatcher calls a body with autograd and functorch masked out, and on a compiled graph's first run from inside a dispatch
    mode; differentiating there ends in "Cannot access data pointer of Tensor that doesn't have storage". The guard puts the mask of a
    plain program back. (The alternative, tracing the gradient beforehand with make_fx, costs a trace per loss and shape class.)
    """
    return torch._C._ForceDispatchKeyGuard(*_PLAIN_DISPATCH)
