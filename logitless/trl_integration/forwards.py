"""The forward passes that TRL and Accelerate have set on a model, and the one below them.

TRL's `add_fused_lm_head` sets a `forward` on the instance, which calls the earlier one in calls without
`fused_lm_head`. Accelerate sets another for mixed precision, once per model, and keeps the earlier one as
`_original_forward`. A model that is passed from trainer to trainer collects them: TRL's second head is around
Accelerate's autocast, because Accelerate does not prepare a model twice. TRL's fused head calls the backbone
directly, so the wrappers around the head apply to it, and the forward passes below the head do not. Our head
takes the place of TRL's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn
from trl.trainer.utils import add_fused_lm_head

from logitless.engine.head_view import is_of_user
from logitless.errors import value_error
from logitless.exchange import instance_forward, stock_forward
from logitless.models.logits import accepted, keywords_of

from .adapter import name_of


@dataclass(frozen=True)
class Forwards:
    """The forward passes of a model.

    Attributes:
        model: the model.
        on_instance: the `forward` attribute of the instance, if any.
        base: the forward pass below those of TRL and Accelerate, bound to the model: that of its class, or
            one that the user has set on the instance.
        has_outer_autocast: whether Accelerate's autocast is around TRL's outermost fused head.
        fused_head: TRL's outermost fused head, if any.
        keywords: the `keywords_of` `base`.
        needs_labels: whether `base` has to be called with labels.
    """

    model: nn.Module
    on_instance: Callable | None
    base: Callable
    has_outer_autocast: bool
    fused_head: Callable | None
    keywords: frozenset[str] | None
    needs_labels: bool

    def is_current(self, model: nn.Module) -> bool:
        """Whether these are the forward passes of `model` now."""
        return self.model is model and self.on_instance is instance_forward(model)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for `base`: those given, without a cache, for a `ModelOutput`.

        Raises:
            ValueError: `base` does not take one of them. TRL's fused head passes them to the backbone.
        """
        fixed = {"use_cache": False, "return_dict": True}
        arguments = {name: x for name, x in given.items() if name not in fixed}
        if self.keywords is not None:
            unknown = [name for name in arguments if name not in self.keywords]
            if unknown:
                expected = f"a forward pass that takes {', '.join(unknown)}"
                raise value_error("model", expected, name_of(self.base), "add **kwargs to its signature")
        return arguments | accepted(self.keywords, **fixed)


def forwards_of(model: nn.Module) -> Forwards:
    """Read the forward passes of a model, from the outermost to the innermost."""
    on_instance = instance_forward(model)
    original_of_accelerate = vars(model).get("_original_forward")
    has_outer_autocast = False
    fused_head = None
    forward = on_instance
    while forward is not None:
        if is_fused_head(forward):
            fused_head = fused_head or forward
            forward = fused_head_options(forward)["original_forward"]
        elif original_of_accelerate is not None and _wraps(forward, original_of_accelerate):
            has_outer_autocast = has_outer_autocast or fused_head is None
            forward = original_of_accelerate
        else:
            break
    # In a deep copy of a model, the inner forward passes are bound to the original model.
    function = _function_of(forward)
    base = stock_forward(model)
    if function is not None and function is not base.__func__ and not _is_class_forward(model, function):
        base = MethodType(function, model) if isinstance(forward, MethodType) else forward
    labels = inspect.signature(base).parameters.get("labels")
    needs_labels = labels is not None and labels.default is labels.empty
    keywords = keywords_of(base)
    return Forwards(model, on_instance, base, has_outer_autocast, fused_head, keywords, needs_labels)


def check_fused_head(forwards: Forwards) -> None:
    """Raise ValueError if the user has set a `forward` on a model above TRL's fused head: the chunked loss
    would not call it with TRL's arguments, and it would not see TRL's outputs."""
    forward = forwards.on_instance
    is_overridden = forward is not None and is_of_user(forward, forwards.model)
    if forwards.fused_head is None and is_overridden:
        remedy = "set it before the trainer is constructed, or use a hook"
        raise value_error("model.forward", "TRL's fused head", name_of(forward), remedy)


def is_fused_head(forward: Any) -> bool:
    """Whether this is a forward pass that `add_fused_lm_head` has set on a model."""
    code = getattr(_function_of(forward), "__code__", None)
    return code is not None and code in add_fused_lm_head.__code__.co_consts


def fused_head_options(forward: Callable) -> dict[str, Any]:
    """The arguments of the call of `add_fused_lm_head` that has made this forward pass, and
    `original_forward`."""
    return dict(inspect.getclosurevars(_function_of(forward)).nonlocals)


def _function_of(forward: Any) -> Any:
    """The function of a bound method; any other object itself."""
    return getattr(forward, "__func__", forward)


def _is_class_forward(model: nn.Module, function: Callable) -> bool:
    return any(vars(cls).get("forward") is function for cls in type(model).__mro__)


def _wraps(forward: Callable, original: Callable) -> bool:
    """Whether `forward` is Accelerate's wrapper around `original`."""
    function = _function_of(forward)
    original_function = _function_of(original)
    while True:
        function = getattr(function, "__wrapped__", None)
        if function is None:
            return False
        if function is original_function:
            return True
