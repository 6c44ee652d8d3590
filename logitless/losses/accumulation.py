"""Gradient accumulation straight into a "main gradient" of the head: `accumulate_into=` of a call.

Nothing may be added to it before the backward pass, and nothing of its size be kept until then. So the forward pass computes the loss
alone, and the backward pass solves the call once more, from its first product, with the main gradient in the place of d_weight.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.losses import engine
from logitless.losses.checks import expect
from logitless.losses.engine import Problem
from logitless.losses.function import _absent, _forward, _problem, operands, outside_dispatch, registered_loss
from logitless.losses.plan import Plan

if TYPE_CHECKING:
    from logitless.losses.base import LinearLoss


def check_main_gradient(loss: "LinearLoss", main: Tensor | None, grad_scale: float, weight: Tensor, problem: Problem) -> None:
    if main is None:
        expect(grad_scale == 1.0, "grad_scale", "1.0 without accumulate_into", grad_scale, "scale the loss itself")
        return
    name, stat = "accumulate_into", problem.stat_dtype
    expect(isinstance(main, Tensor), name, "a tensor", type(main).__name__, "pass the main gradient", TypeError)
    expect(problem.weight is weight, name, "a plain tensor as weight", type(weight).__name__, "leave it out")
    expect(main.shape == problem.weight.shape, name, f"weight's shape {tuple(problem.weight.shape)}", tuple(main.shape), "one per weight")
    expect(main.dtype == stat, name, f"a {stat} tensor", main.dtype, "sum the micro-batches in full precision", TypeError)
    expect(main.device == weight.device, name, f"weight's device {weight.device}", main.device, "move it there")
    expect(not main.requires_grad, name, "a tensor that requires no gradient", "one that does", "it is a gradient: detach it")
    expect(weight.requires_grad, name, "a trainable weight", "a frozen one", "leave it out")
    expect(loss.reduction != "none", "reduction", "'mean' or 'sum' with accumulate_into", repr(loss.reduction), "reduce the loss")
    number = isinstance(grad_scale, int | float) and math.isfinite(grad_scale)
    expect(number, "grad_scale", "a finite number", grad_scale, "pass 1 / the number of micro-batches, for example")


def accumulating_call(
    loss: "LinearLoss", problem: Problem, main: Tensor, grad_scale: float
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Plan | None]:
    """(loss, metrics, logps) and the plan of the forward pass."""
    plans: list[Plan] = []
    needs = [problem.needs.hidden, problem.needs.weight, problem.needs.bias]
    outputs = Accumulating.apply(loss, plans, grad_scale, problem.sequences, problem.dtype, needs, main, *operands(loss, problem))
    return outputs, plans[0] if plans else None


class Accumulating(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, plans, grad_scale, sequences, dtype, needs, main, *tensors):
        outputs, _, _, plan = _forward(loss, True, sequences, dtype, [False] * 3, tensors)
        if plan is not None:
            plans.append(plan)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        # Not saved: every call in between may add to it.
        ctx.main = main
        ctx.loss, ctx.grad_scale, ctx.sequences, ctx.dtype, ctx.needs = loss, grad_scale, sequences, dtype, needs
        ctx.mark_non_differentiable(*(x for x in outputs[1:] if x is not None))
        return outputs

    @staticmethod
    def backward(ctx, upstream: Tensor | None, *_):
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise RuntimeError("create_graph: expected False, got True; logitless losses have no second derivative.")
        tensors = ctx.saved_tensors
        d_hidden = d_bias = None
        if upstream is not None:
            _expect_one(upstream, on_host=ctx.loss.compact and not compiling)
            arguments = (*tensors[:7], list(tensors[7:]), ctx.sequences, ctx.dtype, ctx.needs)
            if compiling:
                d_hidden, d_bias = _accumulate_op(ctx.main, ctx.grad_scale, *arguments, ctx.loss.key)
            else:
                d_hidden, d_bias = _accumulate(ctx.loss, _problem(ctx.loss, *arguments), ctx.main, ctx.grad_scale, static=False)
            d_hidden, d_bias = d_hidden if ctx.needs[0] else None, d_bias if ctx.needs[2] else None
        return (*[None] * 7, d_hidden, None, d_bias, *[None] * (len(tensors) - 3))


def _expect_one(upstream: Tensor, *, on_host: bool) -> None:
    expected = "an upstream gradient of 1 with accumulate_into"
    if on_host:
        expect(upstream.item() == 1, "loss", expected, upstream.item(), "leave the loss unscaled, and pass the factor as grad_scale")
    else:
        torch._assert_async(upstream == 1, f"loss: expected {expected}, got another; pass the factor as grad_scale.")


def _accumulate(loss: "LinearLoss", problem: Problem, main: Tensor, grad_scale: float, *, static: bool):
    """Add to `main`; returns (d_hidden, d_bias), finished."""
    stat, V = problem.stat_dtype, main.shape[0]
    d_bias = torch.zeros(V, 1, dtype=stat, device=main.device) if problem.needs.bias else None
    solved, _ = engine.solve(loss, problem, static=static, coefficient=grad_scale, d_weight=main, d_bias=d_bias, straight=True)
    d_hidden = engine.finish(solved.d_hidden, solved.pending, problem.hidden.dtype, owned=True)
    return d_hidden, None if d_bias is None else engine.finish(d_bias, solved.pending, problem.bias.dtype, owned=True).view(-1)


@torch.library.custom_op("logitless::accumulate", mutates_args=("main",))
def _accumulate_op(
    main: Tensor, grad_scale: float, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, num_items: Tensor | None,
    cu_seqlens: Tensor | None, frozen: Tensor | None, inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype,
    needs: Sequence[bool], key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss = registered_loss(key)
    with outside_dispatch():
        problem = _problem(loss, hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs)
        d_hidden, d_bias = _accumulate(loss, problem, main, grad_scale, static=True)
        return _absent(d_hidden, main), _absent(d_bias, main)


@_accumulate_op.register_fake
def _(main, grad_scale, hidden, weight, bias, targets, num_items, cu_seqlens, frozen, inputs, sequences, dtype, needs, key):
    d_hidden = hidden.new_empty(hidden.shape) if needs[0] else main.new_empty(0)
    return d_hidden, bias.new_empty(bias.shape) if needs[2] else main.new_empty(0)
