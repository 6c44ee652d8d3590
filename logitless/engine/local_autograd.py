"""Derivatives inside a pass, isolated from the autograd state (hooks, grad mode) of the caller."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# Saved-tensor hooks that return the saved tensor. They override the hooks of an activation checkpoint, which
# would discard the saved tensors and run the model again. The tensor is detached: an operation that saves its
# output would otherwise create a reference cycle that keeps its graph alive.
identity_hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, torch.Tensor.detach, lambda x: x)


@contextmanager
def no_hooks() -> Iterator[None]:
    """Context without saved-tensor hooks, which torch.func does not support (not even identity hooks)."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def recorded(
    function: Callable[[dict[str, Tensor]], Result], variables: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Result]:
    """Run `function` on detached copies of `variables` that require grad, and return (copies, result)."""
    with torch.enable_grad(), identity_hooks():
        leaves = {name: x.detach().requires_grad_() for name, x in variables.items()}
        return leaves, function(leaves)


def gradients_of(
    outputs: Sequence[Tensor], upstream: Sequence[Tensor], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of each leaf, given the gradients of the outputs.

    The operations of a loss are so small that host time dominates. torch.func would take three times as much
    host time. Autograd's device thread would also take more host time, and is disabled here.
    """
    if not outputs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(
            outputs, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True
        )
    return dict(zip(leaves, gradients, strict=True))


def grad_and_value(
    function: Callable[[dict[str, Tensor]], tuple[Tensor, object]], variables: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[Tensor, object]]:
    """`torch.func.grad_and_value(has_aux=True)` with ordinary autograd: return (gradients, both results)."""
    leaves, (total, more) = recorded(function, variables)
    outputs = [total] if total.requires_grad else []
    return gradients_of(outputs, [torch.ones_like(x) for x in outputs], leaves), (total.detach(), more)
