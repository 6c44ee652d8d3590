"""Checks of `accumulate_into=`, the main gradient, and of `accumulate_now=`."""

import math

import torch
from torch import Tensor

from logitless.engine.call import Given
from logitless.errors import expect


def check_main_gradient(given: Given, weight: object, main: object, grad_scale: float) -> None:
    """Raise unless this call's backward pass can add the gradient of `weight` to `main`."""
    name, shape = "accumulate_into", tuple(given.weight.shape)
    stat = torch.promote_types(given.dtype, torch.float32)
    expect(
        isinstance(main, Tensor), name, "a tensor", type(main).__name__, "pass the main gradient", TypeError
    )
    expect(given.weight is weight, name, "a plain tensor as weight", type(weight).__name__, "leave it out")
    expect(main.shape == shape, name, f"weight's shape {shape}", tuple(main.shape), "one per weight")
    expect(
        main.dtype == stat,
        name,
        f"a {stat} tensor",
        main.dtype,
        "sum the micro-batches in full precision",
        TypeError,
    )
    expect(
        main.device == weight.device, name, f"weight's device {weight.device}", main.device, "move it there"
    )
    remedy = "it is a gradient: detach it"
    expect(not main.requires_grad, name, "a tensor that requires no gradient", "one that does", remedy)
    expect(weight.requires_grad, name, "a trainable weight", "a frozen one", "leave it out")
    reduction = given.loss.reduction
    expect(
        reduction != "none",
        "reduction",
        "'mean' or 'sum' with accumulate_into",
        repr(reduction),
        "reduce the loss",
    )
    number = isinstance(grad_scale, int | float) and math.isfinite(grad_scale)
    remedy = "pass 1 / the number of micro-batches, for example"
    expect(number, "grad_scale", "a finite number", grad_scale, remedy)


def check_now(grad_scale: float) -> None:
    """Raise unless this call's forward pass runs once, and under autograd."""
    name, remedy = "accumulate_now", "leave it out: accumulate_into alone adds in the backward pass"
    expect(torch.is_grad_enabled(), name, "a call under autograd", "one under torch.no_grad", remedy)
    # A checkpoint inside a graph would run the forward pass again in the backward pass.
    expect(not torch.compiler.is_compiling(), name, "an eager call", "one under torch.compile", remedy)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    got = "active ones, as of an activation checkpoint"
    expect(not hooks, name, "no saved-tensor hooks", got, remedy)
    expect(grad_scale != 0, "grad_scale", "a number other than 0 with accumulate_now", 0, "skip the call")
