"""Saved-tensor hooks of the caller, such as those of an activation checkpoint, do not apply inside a pass."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
