"""The forward passes that TRL and Accelerate have put on a model, and the model's own.

TRL's `add_fused_lm_head` sets a `forward` on the instance, which calls the earlier one in calls without
`fused_lm_head`. Accelerate sets another for mixed precision, once per model, and keeps the earlier one as
`_original_forward`. A model that is passed from trainer to trainer collects them: TRL's second head is around
Accelerate's autocast, because Accelerate does not prepare a model twice. TRL's fused head calls the backbone
itself, so the wrappers around the head apply to it, and the forward passes below the head do not. Our head
takes the place of TRL's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn
from trl.trainer.utils import add_fused_lm_head

from logitless.exchange import instance_forward, stock_forward


@dataclass(frozen=True)
class Forwards:
    """The forward passes found on a model.

    Attributes:
        model: whose they are.
        found: `forward` on the instance, if any.
        own: the model's own forward pass, bound to it: its class's, or one that a user has put on the
            instance.
        prepared: whether Accelerate's autocast is around TRL's fused head.
        fused: TRL's fused head that a call meets first, if there is one.
    """

    model: nn.Module
    found: Callable | None
    own: Callable
    prepared: bool
    fused: Callable | None


def forwards_of(model: nn.Module) -> Forwards:
    found = instance_forward(model)
    original = vars(model).get("_original_forward")
    prepared = False
    fused = None
    below = found
    while below is not None:
        if is_fused(below):
            fused = fused or below
            below = fused_options(below)["original_forward"]
        elif original is not None and _wraps(below, original):
            prepared = prepared or fused is None
            below = original
        else:
            break
    # Of a deep copy it is bound to the original.
    function = getattr(below, "__func__", below)
    own = stock_forward(model)
    if function is not None and function is not own.__func__ and not _is_of_class(model, function):
        own = MethodType(function, model) if isinstance(below, MethodType) else below
    return Forwards(model, found, own, prepared, fused)


def is_fused(forward: Any) -> bool:
    """Whether this is a forward pass that `add_fused_lm_head` has put on a model."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and code in add_fused_lm_head.__code__.co_consts


def fused_options(forward: Callable) -> dict[str, Any]:
    """The arguments with which `add_fused_lm_head` has made this, and `original_forward`."""
    return dict(inspect.getclosurevars(getattr(forward, "__func__", forward)).nonlocals)


def _is_of_class(model: nn.Module, function: Callable) -> bool:
    return any(vars(cls).get("forward") is function for cls in type(model).__mro__)


def _wraps(forward: Callable, original: Callable) -> bool:
    """Whether `forward` is Accelerate's around `original`."""
    inner, wanted = getattr(forward, "__func__", forward), getattr(original, "__func__", original)
    while (inner := getattr(inner, "__wrapped__", None)) is not None:
        if inner is wanted:
            return True
    return False
