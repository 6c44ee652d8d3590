"""`FusedLinearBase`, the one autograd Function: from hidden states, head and targets to the loss.

It runs in one of four modes:

* `SOLVED`: the forward pass computes the loss with its gradients, up to a scalar; the backward pass
  multiplies them by that scalar and the upstream gradient, in the same pass that casts d_weight.
* `PER_TOKEN`: per-token numbers are handed out, and what follows is ordinary autograd. The backward pass
  walks the chunks again once their gradients are known; with a frozen head it only scales one vector per
  token, which the forward pass kept.
* `INTO_MAIN`: the forward pass computes the loss alone. The backward pass solves the call again and adds
  the weight's gradient to the caller's main gradient. Nothing may be added to that earlier, and nothing of
  its size is kept until then.
* `INTO_MAIN_NOW`: the same, but the forward pass solves the call and adds, because the caller allows it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine import operators, passes
from logitless.engine.call import Given
from logitless.engine.gradients import finish
from logitless.engine.packing import Signature, pack, unpack
from logitless.engine.plan import Plan
from logitless.errors import expect


class Mode(Enum):
    """What a call hands out, and when its gradients are computed."""

    SOLVED = "the loss, solved in the forward pass"
    PER_TOKEN = "per-token numbers"
    INTO_MAIN = "the loss, solved in the backward pass onto a main gradient"
    INTO_MAIN_NOW = "the loss, solved in the forward pass onto a main gradient"


@dataclass
class Run:
    """What is no tensor in a call of the Function."""

    mode: Mode
    signature: Signature
    sequences: int
    main: Tensor | None = None
    grad_scale: float = 1.0
    plans: list[Plan] = field(default_factory=list)  # filled by an eager forward pass


class Outcome(NamedTuple):
    """What a call gave."""

    loss: Tensor | None  # 0-d
    metrics: Tensor | None  # (heads, 1 + metrics): each head's own loss, then its metrics
    numbers: dict[str, Tensor]  # (N,) per token, or 0-d, by name
    plan: Plan | None  # None inside a compiled graph


# (heads, mode) -> Outcome: what computes in place of the passes; None for the passes themselves.
StandIn = Callable[[Sequence[Given], Mode], Outcome]
_STAND_IN: ContextVar[StandIn | None] = ContextVar("stand_in", default=None)


@contextmanager
def replaced(stand_in: StandIn | None) -> Iterator[None]:
    """While this is active, eager calls of this thread go to `stand_in`."""
    token = _STAND_IN.set(stand_in)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def run_calls(
    heads: Sequence[Given], mode: Mode, main: Tensor | None = None, grad_scale: float = 1.0
) -> Outcome:
    """Run the heads of one public call: from a loss to `passes`, under autograd if anything trains."""
    # In this order Dynamo never meets the ContextVar.
    if not torch.compiler.is_compiling() and (stand_in := _STAND_IN.get()) is not None:
        return stand_in(heads, mode)
    signature, tensors, sequences = pack(heads)
    trainable = any(signature.needs)
    run = Run(
        mode if trainable or mode is Mode.PER_TOKEN else Mode.SOLVED, signature, sequences, main, grad_scale
    )
    outputs = FusedLinearBase.apply(run, *tensors) if trainable else _forward(run, signature, tensors)[0]
    plan, loss = run.plans[0] if run.plans else None, signature.loss
    if mode is Mode.PER_TOKEN:
        return Outcome(None, None, dict(zip(loss.objective.number_names(loss), outputs, strict=True)), plan)
    value, metrics, *numbers = outputs
    # Onto a main gradient there is no d_logps: the forward pass knows no gradient, or a scaled one.
    named = dict(zip(passes.solved_names(loss), numbers)) if numbers else {}
    return Outcome(value, metrics, named, plan)


def _forward(run: Run, signature: Signature, tensors: Sequence[Tensor | None]):
    """(outputs, what the backward pass needs of this one, rows), eagerly or through an operator."""
    sequences, per_token = run.sequences, run.mode is Mode.PER_TOKEN
    if torch.compiler.is_compiling():
        key = operators.graph_key(signature)
        if per_token:
            vectors, *numbers = operators.numbers_op(list(tensors), sequences, key)
            return tuple(numbers), [vectors], None
        outputs = operators.solve_op(list(tensors), sequences, key)
        kept = 1 + len(signature.needs)
        return tuple(outputs[:-kept]), list(outputs[-kept:]), None
    calls = unpack(signature, tensors, sequences)
    if run.mode is Mode.INTO_MAIN_NOW:
        solved, *gradients = operators.accumulate(calls[0], run.main, run.grad_scale, static=False)
        run.plans.append(solved.plan)
        return (solved.metrics[0, 0], solved.metrics, *_without_d_logps(run, solved.tokens)), gradients, None
    if per_token:
        numbers = passes.token_numbers(calls[0])
        run.plans.append(numbers.plan)
        names = signature.loss.objective.number_names(signature.loss)
        return tuple(numbers.named[name] for name in names), [numbers.vectors], numbers.rows
    solved = passes.solve(calls, static=False)
    run.plans.append(solved.plan)
    sums = [solved.gradients.sums.get(slot) for slot in range(len(signature.needs))]
    # A factor of 1 that the host knows is none.
    deferred = None if solved.is_final else solved.deferred_on_device
    return (solved.loss, solved.metrics, *solved.tokens), [deferred, *sums], None


def _without_d_logps(run: Run, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Outputs whose last one would be the gradient with respect to logps, where the loss hands that out."""
    return outputs[:-1] if run.signature.loss.return_logps else outputs


class FusedLinearBase(torch.autograd.Function):
    """The passes under autograd: called directly in eager mode, as opaque operators under `torch.compile`."""

    @staticmethod
    def forward(ctx, run: Run, *tensors: Tensor | None):
        signature, into_main = run.signature, run.mode is Mode.INTO_MAIN
        outputs, kept, ctx.rows = _forward(
            run, signature.without_gradients() if into_main else signature, tensors
        )
        if into_main:
            outputs = _without_d_logps(run, outputs)
        ctx.set_materialize_grads(False)
        trained = tensors[: len(signature.needs)]
        ctx.run, ctx.count = run, len(tensors)
        ctx.trained = [None if x is None else (x.dtype, x.shape) for x in trained]
        if run.mode in (Mode.SOLVED, Mode.INTO_MAIN_NOW):
            ctx.save_for_backward(*kept)
            ctx.mark_non_differentiable(*outputs[1:])
        elif into_main:
            ctx.save_for_backward(*tensors)  # `main` is not saved: every call in between may add to it
            ctx.mark_non_differentiable(*outputs[1:])
        else:
            ctx.save_for_backward(*tensors, *kept, *outputs)
            objective, loss = signature.loss.objective, signature.loss
            names, differentiable = objective.number_names(loss), objective.differentiable_names(loss)
            plain = [x for name, x in zip(names, outputs, strict=True) if name not in differentiable]
            ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False, got True; logitless losses have no second derivative: where "
                "you need one, differentiate F.cross_entropy(hidden @ weight.T, targets) or its like on full "
                "logits."
            )
        gradients = [None] * len(ctx.trained)
        if any(grad is not None for grad in upstream):
            gradients = BACKWARD[ctx.run.mode](ctx, upstream, compiling)
        return (None, *gradients, *[None] * (ctx.count - len(ctx.trained)))


def _backward_solved(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    deferred, *sums = ctx.saved_tensors
    # Where nobody can come back for them, the kept gradients become the returned ones.
    owned = not compiling and not torch._C._autograd._get_current_graph_task_keep_graph()
    factor = upstream[0] if deferred is None else deferred * upstream[0]
    return _finished(ctx, sums, factor, owned=owned)


def _backward_per_token(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    saved, run = ctx.saved_tensors, ctx.run
    tensors, vectors, numbers = saved[: ctx.count], saved[ctx.count], saved[ctx.count + 1 :]
    if compiling:
        key = operators.graph_key(run.signature)
        arguments = (list(tensors), vectors, list(numbers), list(upstream), run.sequences, key)
        deferred, *sums = operators.gradients_op(*arguments)
    else:
        (call,) = unpack(run.signature, tensors, run.sequences)
        deferred, found = operators.token_gradients(call, numbers, upstream, vectors, ctx.rows, static=False)
        sums = [found.sums.get(slot) for slot in range(len(run.signature.needs))]
    return _finished(ctx, sums, deferred, owned=not compiling)


def _backward_into_main(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    run, tensors = ctx.run, ctx.saved_tensors
    _expect_one(upstream[0], on_host=run.signature.loss.compact and not compiling)
    if compiling:
        key = operators.graph_key(run.signature)
        d_hidden, d_bias = operators.accumulate_op(
            run.main, run.grad_scale, list(tensors), run.sequences, key
        )
    else:
        (call,) = unpack(run.signature, tensors, run.sequences)
        _, d_hidden, d_bias = operators.accumulate(call, run.main, run.grad_scale, static=False)
    return _by_slot(run, d_hidden, d_bias)


def _backward_added(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    _expect_one(upstream[0], on_host=ctx.run.signature.loss.compact)
    return _by_slot(ctx.run, *ctx.saved_tensors)


def _by_slot(run: Run, d_hidden: Tensor | None, d_bias: Tensor | None) -> list[Tensor | None]:
    """Gradients of the trained tensors, of which the weight has got its own already."""
    hidden, _, bias, _ = run.signature.parts[0].slots
    gradients = [None] * len(run.signature.needs)
    if run.signature.needs[hidden]:
        gradients[hidden] = d_hidden
    if bias is not None and run.signature.needs[bias]:
        gradients[bias] = d_bias
    return gradients


BACKWARD = {
    Mode.SOLVED: _backward_solved,
    Mode.PER_TOKEN: _backward_per_token,
    Mode.INTO_MAIN: _backward_into_main,
    Mode.INTO_MAIN_NOW: _backward_added,
}


def _finished(ctx, sums: Sequence[Tensor | None], factor: Tensor, *, owned: bool) -> list[Tensor | None]:
    """Gradients of the trained tensors in their shapes and dtypes."""
    needs = ctx.run.signature.needs
    wanted = [x.reshape(-1, x.shape[-1]) if need else None for x, need in zip(sums, needs, strict=True)]
    dtypes = [None if kind is None else kind[0] for kind in ctx.trained]
    found = finish(wanted, factor, dtypes, owned=owned)
    return [None if x is None else x.view(kind[1]) for x, kind in zip(found, ctx.trained, strict=True)]


def _expect_one(upstream: Tensor, *, on_host: bool) -> None:
    expected = "an upstream gradient of 1 with accumulate_into"
    if on_host:
        remedy = "leave the loss unscaled, and pass the factor as grad_scale"
        expect(upstream.item() == 1, "loss", expected, upstream.item(), remedy)
    else:
        torch._assert_async(
            upstream == 1, f"loss: expected {expected}, got another; pass the factor as grad_scale."
        )
