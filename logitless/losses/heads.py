"""Replace the LM head modules in the arguments of a loss by their tensors."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, wraps

import torch
from torch import Tensor

from logitless.engine.head_view import same_option, view_of
from logitless.engine.operands import SplitHead
from logitless.errors import value_error
from logitless.parallel.groups import TENSOR_PARALLEL

# Prefixes of the argument names `hidden`, `weight` and `bias`, one for each head of a call.
PREFIXES = ("", "teacher_", "ref_")
# Arguments that a head module replaces.
HEADS = tuple(f"{prefix}{name}" for prefix in PREFIXES for name in ("weight", "bias"))


def resolve_heads(loss, arguments: dict) -> tuple:
    """Return (loss, arguments) with every head module or `HeadView` in the arguments replaced by its tensors.

    A LoRA adapter on a head adds columns to its weight and to its hidden states; see `HeadView.operands`. The
    returned loss has the softcap and logit_scale of the model's head. If the view of `weight` has
    `in_shards`, the `tp_group` of the returned loss is that of `loss`, or "tp" if that is None.

    Raises:
        TypeError: a module without a converter (`head_view.view_of`).
        ValueError: a bias was passed with a head module, or an option of the loss differs from the model's.
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
                f"{prefix}bias", f"None if {name} is an LM head", "a tensor", "the bias of the head is used"
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
    """Return (loss, weight, bias) of a head module in a call with several heads or several hidden states.

    A LoRA adapter on the head is refused, because the adapter would add columns to the hidden states.
    """
    if view_of(head, name).columns:
        raise value_error(name, "a head without an adapter", "LoRA on it", "merge it, or train the full head")
    loss, resolved = resolve_heads(loss, {"weight": head, "bias": bias})
    return loss, resolved["weight"], resolved["bias"]


def _kept(function: Callable) -> Callable:
    """Cache a function of a loss.

    Losses with a process group are not cached: the cache would keep it alive.
    """
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
            remedy = "leave it out: it is read from the model"
            raise value_error(name, f"the model's {value}", current, remedy)
        if name not in defaults:
            raise value_error(
                f"{prefix}weight",
                f"a head with {option} {without}",
                value,
                "pass log-probabilities instead of this head",
            )
        changes[name] = value
    return replace(loss, **changes) if changes else loss
