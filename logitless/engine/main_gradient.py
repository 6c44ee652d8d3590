"""Checks of `accumulate_into=`, the main gradient, and of `accumulate_now=`."""

import math

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.errors import type_error, value_error


def check_main_gradient(given: HeadCall, weight: object, main: object, grad_scale: float) -> None:
    """Raise unless this call's backward pass can add the gradient of `weight` to `main`."""
    name = "accumulate_into"
    shape = tuple(given.weight.shape)
    stat = torch.promote_types(given.dtype, torch.float32)
    if not isinstance(main, Tensor):
        raise type_error(name, "a tensor", type(main).__name__, "pass the main gradient")
    if given.weight is not weight:
        raise value_error(name, "a plain tensor as weight", type(weight).__name__, "leave it out")
    if main.shape != shape:
        raise value_error(name, f"weight's shape {shape}", tuple(main.shape), "one per weight")
    if main.dtype != stat:
        raise type_error(name, f"a {stat} tensor", main.dtype, "sum the micro-batches in full precision")
    if main.device != weight.device:
        raise value_error(name, f"weight's device {weight.device}", main.device, "move it there")
    if main.requires_grad:
        raise value_error(
            name, "a tensor that requires no gradient", "one that does", "it is a gradient: detach it"
        )
    if not weight.requires_grad:
        raise value_error(name, "a trainable weight", "a frozen one", "leave it out")
    if given.loss.reduction == "none":
        raise value_error(
            "reduction", "'mean' or 'sum' with accumulate_into", repr(given.loss.reduction), "reduce the loss"
        )
    if not isinstance(grad_scale, int | float) or not math.isfinite(grad_scale):
        raise value_error(
            "grad_scale", "a finite number", grad_scale, "pass 1 / the number of micro-batches, for example"
        )


def check_now(grad_scale: float) -> None:
    """Raise unless this call's forward pass runs once, and under autograd."""
    name = "accumulate_now"
    remedy = "leave it out: accumulate_into alone adds in the backward pass"
    if not torch.is_grad_enabled():
        raise value_error(name, "a call under autograd", "one under torch.no_grad", remedy)
    # A checkpoint inside a graph would run the forward pass again in the backward pass.
    if torch.compiler.is_compiling():
        raise value_error(name, "an eager call", "one under torch.compile", remedy)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise value_error(
            name, "no saved-tensor hooks", "active ones, as of an activation checkpoint", remedy
        )
    if grad_scale == 0:
        raise value_error("grad_scale", "a number other than 0 with accumulate_now", 0, "skip the call")
