"""`accumulate_into=`: what must be true of a main gradient."""

import math

from torch import Tensor

from logitless.engine.call import Call
from logitless.errors import expect


def check_main_gradient(call: Call, weight: object, main: object, grad_scale: float) -> None:
    """Raise unless the backward pass of this call can add the gradient of `weight`, as the caller gave it, to `main`."""
    if main is None:
        expect(grad_scale == 1.0, "grad_scale", "1.0 without accumulate_into", grad_scale, "scale the loss itself")
        return
    name, stat, shape = "accumulate_into", call.stat_dtype, tuple(call.weight.shape)
    expect(isinstance(main, Tensor), name, "a tensor", type(main).__name__, "pass the main gradient", TypeError)
    expect(call.weight is weight, name, "a plain tensor as weight", type(weight).__name__, "leave it out")
    expect(main.shape == shape, name, f"weight's shape {shape}", tuple(main.shape), "one per weight")
    expect(main.dtype == stat, name, f"a {stat} tensor", main.dtype, "sum the micro-batches in full precision", TypeError)
    expect(main.device == weight.device, name, f"weight's device {weight.device}", main.device, "move it there")
    remedy = "it is a gradient: detach it"
    expect(not main.requires_grad, name, "a tensor that requires no gradient", "one that does", remedy)
    expect(weight.requires_grad, name, "a trainable weight", "a frozen one", "leave it out")
    reduction = call.loss.reduction
    expect(reduction != "none", "reduction", "'mean' or 'sum' with accumulate_into", repr(reduction), "reduce the loss")
    number = isinstance(grad_scale, int | float) and math.isfinite(grad_scale)
    remedy = "pass 1 / the number of micro-batches, for example"
    expect(number, "grad_scale", "a finite number", grad_scale, remedy)
