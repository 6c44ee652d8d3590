"""`FusedLinearBase`, the autograd Function that computes the loss from hidden states, head and targets.

It runs in one of four modes:

* `SOLVED`: the forward pass computes the loss, and its gradients up to a scalar factor. The backward pass
  multiplies the gradients by this factor and by the upstream gradient, and casts d_weight in the same kernel.
* `PER_TOKEN`: the forward pass returns per-token statistics, and ordinary autograd differentiates the
  caller's function of these statistics. The backward pass receives the gradients of the statistics and
  recomputes the chunks of logits. With a frozen head, no sampling mask and a loss of log p and lse only, the
  forward pass saves d logp / d hidden instead, and the backward pass scales it.
* `ACCUMULATE_IN_BACKWARD`: the forward pass computes the loss without gradients. The backward pass computes
  loss and gradients, and adds d_weight to the caller's main gradient. Between both passes, no tensor of the
  size of d_weight is kept.
* `ACCUMULATE_IN_FORWARD`: the forward pass computes loss and gradients, and adds d_weight to the main
  gradient (`accumulate_now`).
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
from logitless.engine.call import HeadCall, Signature, pack, unpack
from logitless.engine.gradients import either, finish
from logitless.engine.plan import Plan
from logitless.errors import value_error


class Mode(Enum):
    """The results of the Function, and the pass that computes the gradients."""

    SOLVED = "the loss, solved in the forward pass"
    PER_TOKEN = "per-token statistics"
    ACCUMULATE_IN_BACKWARD = "the loss, solved in the backward pass onto a main gradient"
    ACCUMULATE_IN_FORWARD = "the loss, solved in the forward pass onto a main gradient"


@dataclass
class CallSpec:
    """The non-tensor arguments of the Function."""

    mode: Mode
    signature: Signature
    sequences: int
    main: Tensor | None = None
    grad_scale: float = 1.0
    plans: list[Plan] = field(default_factory=list)  # filled by an eager forward pass


class CallResult(NamedTuple):
    """The results of a public call."""

    loss: Tensor | None  # 0-d
    metrics: Tensor | None  # (heads, 1 + metrics): the loss of each head, then its metrics
    statistics: dict[str, Tensor]  # statistics by name: (N,) per token, or 0-d
    plan: Plan | None  # None inside a compiled graph


# (heads, mode) -> CallResult: a function that replaces the passes (`tools` sets it); None: the passes run.
StandIn = Callable[[Sequence[HeadCall], Mode], CallResult]
_STAND_IN: ContextVar[StandIn | None] = ContextVar("stand_in", default=None)


@contextmanager
def replaced(stand_in: StandIn | None) -> Iterator[None]:
    """Context in which eager calls in this thread run `stand_in` instead of the passes."""
    token = _STAND_IN.set(stand_in)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def run_calls(
    heads: Sequence[HeadCall], mode: Mode, main: Tensor | None = None, grad_scale: float = 1.0
) -> CallResult:
    """Run the heads of one public call, under autograd if any tensor needs a gradient.

    Args:
        heads: one `HeadCall` per head.
        mode: see the module's docstring.
        main: (V, H) main gradient of the modes `ACCUMULATE_IN_BACKWARD` and `ACCUMULATE_IN_FORWARD`.
        grad_scale: factor of the gradients in these two modes.
    """
    # `is_compiling` is tested first, so that Dynamo does not trace the ContextVar.
    if not torch.compiler.is_compiling() and (stand_in := _STAND_IN.get()) is not None:
        return stand_in(heads, mode)
    signature, tensors, sequences = pack(heads)
    trainable = any(signature.needs)
    run = CallSpec(
        mode if trainable or mode is Mode.PER_TOKEN else Mode.SOLVED, signature, sequences, main, grad_scale
    )
    outputs = FusedLinearBase.apply(run, *tensors) if trainable else _forward(run, signature, tensors)[0]
    plan = run.plans[0] if run.plans else None
    loss = signature.loss
    if mode is Mode.PER_TOKEN:
        return CallResult(
            None, None, dict(zip(loss.objective.statistic_names(loss), outputs, strict=True)), plan
        )
    value, metrics, *statistics = outputs
    # With a main gradient there is no d_logps: the forward pass computes no gradient, or one scaled by
    # grad_scale.
    named = dict(zip(passes.solved_names(loss), statistics)) if statistics else {}
    if not trainable:
        named.pop("d_logps", None)
    return CallResult(value, metrics, named, plan)


def _forward(run: CallSpec, signature: Signature, tensors: Sequence[Tensor | None]):
    """Run the forward pass, eagerly or as an operator.

    Returns:
        (outputs of the Function, tensors that the forward pass computed for the backward pass, `Rows`). The
        rows are None in a graph, and in the mode `SOLVED`, whose backward pass does not use them.
    """
    sequences = run.sequences
    per_token = run.mode is Mode.PER_TOKEN
    if torch.compiler.is_compiling():
        key = operators.graph_key(signature)
        if per_token:
            dlogp_dhidden, *statistics = operators.statistics_op(list(tensors), sequences, key)
            return tuple(statistics), [dlogp_dhidden], None
        outputs = operators.solve_op(list(tensors), sequences, key)
        saved_count = 1 + len(signature.needs)
        saved = [*outputs[-saved_count:], *_supervised_in_graph(signature, tensors)]
        return tuple(outputs[:-saved_count]), saved, None
    calls = unpack(signature, tensors, sequences)
    if run.mode is Mode.ACCUMULATE_IN_FORWARD:
        solved, *gradients = operators.accumulate(calls[0], run.main, run.grad_scale, fixed_dtypes=False)
        run.plans.append(solved.plan)
        outputs = (solved.metrics[0, 0], solved.metrics, *_without_d_logps(run, solved.tokens))
        return outputs, gradients, solved.rows
    if per_token:
        statistics = passes.token_statistics(calls[0])
        run.plans.append(statistics.plan)
        names = signature.loss.objective.statistic_names(signature.loss)
        return tuple(statistics.named[name] for name in names), [statistics.dlogp_dhidden], statistics.rows
    solved = passes.solve(calls, fixed_dtypes=False)
    plan = solved.plan
    if run.mode is Mode.ACCUMULATE_IN_BACKWARD:  # the call needs gradients, `signature` does not
        (call,) = unpack(run.signature, tensors, sequences)
        plan = passes.plan_into_main(call, solved)
    run.plans.append(plan)
    indices = range(len(signature.needs))
    sums = [solved.gradients.sums.get(index) for index in indices]
    supervised = [solved.gradients.supervised.get(index) for index in indices]
    # None: the host knows that the factor is 1, so no multiplication is needed.
    deferred = None if solved.is_final else solved.deferred_on_device
    rows = solved.rows if run.mode is Mode.ACCUMULATE_IN_BACKWARD else None
    return (solved.loss, solved.metrics, *solved.tokens), [deferred, *sums, *supervised], rows


def _supervised_in_graph(signature: Signature, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`Gradients.supervised` of the trained tensors, from the targets, by operations that Dynamo traces."""
    trained = len(signature.needs)
    reached = {}
    for part, targets in zip(signature.parts, tensors[trained:], strict=False):
        supervised = targets != signature.loss.ignore_index
        some = supervised.any()
        hidden, weight, bias, layers = part.indices
        for index, rows in ((hidden, supervised), *[(other, some) for other in (weight, bias, *layers)]):
            reached[index] = either(reached[index], rows) if index in reached else rows
    return [reached.get(index) for index in range(trained)]


def _without_d_logps(run: CallSpec, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the outputs without d_logps, the last output of a loss with `return_logps`."""
    return outputs[:-1] if run.signature.loss.return_logps else outputs


class FusedLinearBase(torch.autograd.Function):
    """The passes under autograd: called directly in eager mode, as opaque operators under `torch.compile`.

    Steps:

    1. A loss checks and flattens its arguments (`call.prepare`). `run_calls` packs the heads into a flat list
       of tensors and a `Signature` (`call.pack`), and applies this Function.
    2. `forward` unpacks the list into one `HeadCall` per head and runs a pass: `passes.solve` for a reduced
       loss, `passes.token_statistics` for statistics.
    3. The pass chooses the supervised rows, plans the chunks and runs the chunk loop (`loop.run`).
    4. `forward` saves what the backward pass of the mode needs: the sums of gradients and their deferred
       factor (`SOLVED`), or the packed tensors, the statistics and d logp / d hidden (`PER_TOKEN`).
    5. `backward` gets the upstream gradient. In `SOLVED` it runs no chunk; in `PER_TOKEN` with a trainable
       head it recomputes the chunks (`passes.token_gradients`).
    6. `gradients.finish` multiplies each sum by the deferred factor and the upstream gradient, and casts it
       to the dtype of its tensor. This is done in place if the sum has this dtype and autograd does not
       retain the graph.
    7. `backward` returns one gradient per trained tensor, and None for all other tensors.

    FSDP2: `prepare` gathers a DTensor parameter (`parallel.groups.local_parameter`), so the arguments of the
    Function are plain tensors. The autograd node of this gather averages d_weight over the ranks after step
    7.

    tp_group: `weight` is this rank's shard (V_r, H). The passes exchange statistics per token and all-reduce
    d_hidden; d_weight (V_r, H) is complete without a collective.

    cp_group: `hidden` contains the tokens of this rank's slices. Every rank gets the loss of the whole
    sequences, d_hidden of its tokens, and its contribution to d_weight, which the caller sums over the group.

    torch.compile: Dynamo traces `forward` and `backward`. Each pass in them is one opaque operator
    (`operators`), so that the chunk loop is not unrolled. The results do not contain a `Plan`.
    """

    @staticmethod
    def forward(ctx, run: CallSpec, *tensors: Tensor | None):
        signature = run.signature
        into_main = run.mode is Mode.ACCUMULATE_IN_BACKWARD
        outputs, saved, ctx.rows = _forward(
            run, signature.without_gradients() if into_main else signature, tensors
        )
        if into_main:
            outputs = _without_d_logps(run, outputs)
        ctx.set_materialize_grads(False)
        trained = tensors[: len(signature.needs)]
        ctx.run = run
        ctx.count = len(tensors)
        ctx.trained = [None if x is None else (x.dtype, x.shape) for x in trained]
        if run.mode in (Mode.SOLVED, Mode.ACCUMULATE_IN_FORWARD):
            ctx.save_for_backward(*saved)
            ctx.mark_non_differentiable(*outputs[1:])
        elif into_main:
            ctx.save_for_backward(*tensors)  # `main` is not saved: other calls may modify it before backward
            ctx.mark_non_differentiable(*outputs[1:])
        else:
            ctx.save_for_backward(*tensors, *saved, *outputs)
            loss = signature.loss
            objective = loss.objective
            names = objective.statistic_names(loss)
            differentiable = objective.differentiable_names(loss)
            plain = [x for name, x in zip(names, outputs, strict=True) if name not in differentiable]
            ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False, got True; logitless losses have no second derivative. If you "
                "need one, differentiate a function of the full logits, such as "
                "F.cross_entropy(hidden @ weight.T, targets)."
            )
        gradients = [None] * len(ctx.trained)
        if any(grad is not None for grad in upstream):
            gradients = BACKWARD[ctx.run.mode](ctx, upstream, compiling)
        return (None, *gradients, *[None] * (ctx.count - len(ctx.trained)))


def _backward_solved(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    deferred, *saved = ctx.saved_tensors
    sums, supervised = saved[: len(ctx.trained)], saved[len(ctx.trained) :]
    # Without retain_graph, the saved gradients may be scaled in place and returned.
    owned = not compiling and not torch._C._autograd._get_current_graph_task_keep_graph()
    factor = upstream[0] if deferred is None else deferred * upstream[0]
    return _finished(ctx, sums, factor, supervised, owned=owned)


def _backward_per_token(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    saved = ctx.saved_tensors
    run = ctx.run
    tensors = saved[: ctx.count]
    dlogp_dhidden = saved[ctx.count]
    statistics = saved[ctx.count + 1 :]
    if compiling:
        key = operators.graph_key(run.signature)
        arguments = (list(tensors), dlogp_dhidden, list(statistics), list(upstream), run.sequences, key)
        deferred, *sums = operators.gradients_op(*arguments)
    else:
        (call,) = unpack(run.signature, tensors, run.sequences)
        deferred, gradients = operators.token_gradients(
            call, statistics, upstream, dlogp_dhidden, ctx.rows, fixed_dtypes=False
        )
        sums = [gradients.sums.get(index) for index in range(len(run.signature.needs))]
    return _finished(ctx, sums, deferred, owned=not compiling)


def _backward_into_main(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    run = ctx.run
    tensors = ctx.saved_tensors
    if compiling:
        supervised = tensors[len(run.signature.needs)] != run.signature.loss.ignore_index
        _expect_one(upstream[0], supervised.any(), on_host=False)
        key = operators.graph_key(run.signature)
        d_hidden, d_bias = operators.accumulate_op(
            run.main, run.grad_scale, list(tensors), run.sequences, key
        )
    else:
        _expect_one(upstream[0], ctx.rows.tokens, on_host=run.signature.loss.compact)
        (call,) = unpack(run.signature, tensors, run.sequences)
        _, d_hidden, d_bias = operators.accumulate(call, run.main, run.grad_scale, fixed_dtypes=False)
    return _by_index(run, d_hidden, d_bias)


def _backward_added(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    _expect_one(upstream[0], ctx.rows.tokens, on_host=ctx.run.signature.loss.compact)
    return _by_index(ctx.run, *ctx.saved_tensors)


def _by_index(run: CallSpec, d_hidden: Tensor | None, d_bias: Tensor | None) -> list[Tensor | None]:
    """The gradients by index of the trained tensors; None for the weight, whose gradient is in `main`."""
    hidden, _, bias, _ = run.signature.parts[0].indices
    gradients = [None] * len(run.signature.needs)
    if run.signature.needs[hidden]:
        gradients[hidden] = d_hidden
    if bias is not None and run.signature.needs[bias]:
        gradients[bias] = d_bias
    return gradients


BACKWARD = {
    Mode.SOLVED: _backward_solved,
    Mode.PER_TOKEN: _backward_per_token,
    Mode.ACCUMULATE_IN_BACKWARD: _backward_into_main,
    Mode.ACCUMULATE_IN_FORWARD: _backward_added,
}


def _finished(
    ctx,
    sums: Sequence[Tensor | None],
    factor: Tensor,
    supervised: Sequence[Tensor | None] | None = None,
    *,
    owned: bool,
) -> list[Tensor | None]:
    """Return the gradients of the trained tensors, in the shapes and dtypes of these tensors.

    See `gradients.finish` for `supervised`.
    """
    needs = ctx.run.signature.needs
    wanted = [x.reshape(-1, x.shape[-1]) if need else None for x, need in zip(sums, needs, strict=True)]
    dtypes = [None if kind is None else kind[0] for kind in ctx.trained]
    grads = finish(wanted, factor, dtypes, supervised, owned=owned)
    return [None if x is None else x.view(kind[1]) for x, kind in zip(grads, ctx.trained, strict=True)]


def _expect_one(upstream: Tensor, tokens: int | Tensor, *, on_host: bool) -> None:
    """Refuse an upstream gradient other than 1, unless the call has no supervised `tokens` and so adds 0."""
    expected = "an upstream gradient of 1 with accumulate_into"
    if on_host:
        if upstream.item() != 1 and tokens != 0:
            raise value_error(
                "loss",
                expected,
                upstream.item(),
                "leave the loss unscaled, and pass the factor as grad_scale",
            )
    else:
        torch._assert_async(
            (upstream == 1) | (tokens == 0),
            f"loss: expected {expected}, got another; pass the factor as grad_scale.",
        )
