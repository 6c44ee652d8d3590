"""Replace LM head modules among the arguments of a loss by their tensors."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, wraps

import torch
from torch import Tensor

from logitless.engine.head_view import same_option, view_of
from logitless.engine.operands import SplitHead
from logitless.errors import value_error
from logitless.parallel.groups import TENSOR_PARALLEL

# Prefixes of the names of hidden states, weight and bias of the heads in a call.
PREFIXES = ("", "teacher_", "ref_")
# Arguments that a head module replaces.
HEADS = tuple(f"{prefix}{name}" for prefix in PREFIXES for name in ("weight", "bias"))


def resolve_heads(loss, arguments: dict) -> tuple:
    """(loss, arguments) with every head module or `HeadView` among the arguments replaced by its tensors.

    The loss takes the softcap and scale of a model's head, and the `tp_group` of a view with `in_shards`.

    Raises:
        TypeError: a module that cannot be read.
        ValueError: a bias beside a head's, or an option of the loss that contradicts the view.
    """
    arguments = dict(arguments)
    split = None
    for prefix in PREFIXES:
        name = f"{prefix}weight"
        hidden = arguments.get(f"{prefix}hidden")
        head = arguments.get(name)
        if head is None or isinstance(head, Tensor | SplitHead):
            continue
        view = view_of(head, name)
        if arguments.get(f"{prefix}bias") is not None:
            raise value_error(
                f"{prefix}bias", f"None beside a head as {name}", "a tensor", "the head brings its own"
            )
        if view.of_model:
            loss = _with_options(loss, prefix, view.softcap, view.logit_scale)
        if prefix == "" and view.in_shards:
            loss = _in_shards(loss)
            split = view.weight
        elif split is not None:
            view = view.split_like(split)
        wide, weight, bias = view.operands(view.weight[:0] if hidden is None else hidden)
        if prefix and isinstance(weight, SplitHead):
            weight = torch.cat(weight, dim=1)
        arguments |= {name: weight, f"{prefix}bias": bias} | (
            {} if hidden is None else {f"{prefix}hidden": wide}
        )
    return loss, arguments


def without_adapter(loss, name: str, head: object, bias: Tensor | None) -> tuple:
    """(loss, weight, bias) of a head whose hidden states other heads use too, so that it cannot have LoRA."""
    if view_of(head, name).columns:
        raise value_error(
            name, "a head without an adapter", "LoRA on it", "merge it, or train the head whole"
        )
    loss, resolved = resolve_heads(loss, {"weight": head, "bias": bias})
    return loss, resolved["weight"], resolved["bias"]


def _kept(function: Callable) -> Callable:
    """Cache a function of a loss, except for losses with a group, which the cache would keep alive."""
    once = lru_cache(maxsize=256)(function)

    @wraps(function)
    def call(loss, *options):
        alone = loss.tp_group is None and loss.cp_group is None
        return (once if alone else function)(loss, *options)

    return call


@_kept
def _in_shards(loss):
    return replace(loss, tp_group=TENSOR_PARALLEL) if loss.tp_group is None else loss


@_kept
def _with_options(loss, prefix: str, softcap: float | None, logit_scale: float):
    defaults = {field.name: field.default for field in fields(loss)}
    changes = {}
    for option, value, without in (("softcap", softcap, None), ("logit_scale", logit_scale, 1.0)):
        name = f"{prefix}{option}"
        default = defaults.get(name, without)
        current = getattr(loss, name, default)
        if same_option(current, value):
            continue
        if current != default:
            raise value_error(name, f"the model's own {value}", current, "leave it out: the head brings it")
        if name not in defaults:
            raise value_error(
                f"{prefix}weight",
                f"a head with {option} {without}",
                value,
                "pass log-probabilities in its place",
            )
        changes[name] = value
    return replace(loss, **changes) if changes else loss
