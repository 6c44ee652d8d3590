"""`head_of`: the LM head of a model, with its softcap and logit scale, as the `weight` of a loss."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from logitless.engine.head_view import HeadView, is_of_user, view_of
from logitless.errors import value_error
from logitless.exchange import exchanged, instance_forward
from logitless.models.heads import (
    COPIED,
    COPY_REMEDY,
    base_of,
    calls_another_model,
    find_head,
    read_head,
    unwrap,
)
from logitless.models.logits import Deferral, accepted, defer_logits, deferring_head, keywords_of, logits_in


class _CachedTransform(NamedTuple):
    """Softcap and logit scale that were measured, and the model's `_options` at that time."""

    options: list[Any]
    softcap: float | None
    logit_scale: float


_CACHED_TRANSFORMS: WeakKeyDictionary[nn.Module, _CachedTransform] = WeakKeyDictionary()


def head_of(model: nn.Module) -> HeadView:
    """Return the LM head of a model, to be passed as `weight` to a loss.

        loss_fn(model.model(ids).last_hidden_state, head_of(model), targets)

    Softcap and logit scale are measured by running the model's own forward pass on artificial hidden states:
    once, and again after a number in the model's configuration or attributes, or a forward hook of the head,
    has changed. Call `head_of` in every step, because FSDP and PEFT replace parameters.

    Args:
        model: a causal language model of transformers, or its LM head. The model may have PEFT adapters and
            be wrapped by DDP, torch.compile, Lightning Fabric, DeepSpeed or accelerate.

    Returns:
        HeadView(weight, bias, columns, softcap, logit_scale).

    Raises:
        ValueError: the model has no head, or has layers between backbone and head, which `patch_model`
            supports.
        TypeError: the head is of an unsupported class, such as a quantized one.
    """
    model = unwrap(model)
    if not hasattr(model, "get_output_embeddings"):
        return view_of(model, "model")
    base = base_of(model)
    head = find_head(base)
    view = read_head(head)
    options = _options(base, head)
    cached = _CACHED_TRANSFORMS.get(base)
    if cached is None or cached.options != options:
        forward = instance_forward(head)
        if forward is not None and is_of_user(forward, head):
            remedy = "use patch_model(model), which calls the head"
            raise value_error("model", "a head with its class's `forward`", "an overridden one", remedy)
        cached = _CachedTransform(options, *_measure_softcap_and_scale(base, head, view.weight))
        _CACHED_TRANSFORMS[base] = cached
    return view._replace(softcap=cached.softcap, logit_scale=cached.logit_scale, of_model=True)


def _options(model: nn.Module, head: nn.Module) -> list[Any]:
    """Return (name, value) of all numbers, strings and Nones in a model's attributes and configurations,
    except `training`, and the class, hooks and `forward` of its head. The model's forward pass may read them.
    """
    # By identity: a hook may refer to the model, which the cache must not keep alive.
    hooks = (*head._forward_pre_hooks.items(), *head._forward_hooks.items())
    of_head = [type(head), id(instance_forward(head)), *((key, id(hook)) for key, hook in hooks)]
    config = getattr(model, "config", None)
    owners = [model] if config is None else [model, config]
    if hasattr(config, "get_text_config") and config.get_text_config() is not config:
        owners.append(config.get_text_config())
    attributes = [(name, value) for owner in owners for name, value in vars(owner).items()]
    simple_types = (int, float, str, type(None))
    simple = [
        (name, value) for name, value in attributes if isinstance(value, simple_types) and name != "training"
    ]
    return simple + of_head


class _BackboneOutput:
    """Output of a backbone that has only hidden states; every other field is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _return_hidden(
    backbone: nn.Module, hidden: Tensor, original: Any, *args: Any, **kwargs: Any
) -> _BackboneOutput:
    return _BackboneOutput(hidden)


def _measure_softcap_and_scale(
    model: nn.Module, head: nn.Module, weight: Tensor
) -> tuple[float | None, float]:
    """Return (softcap, logit scale) from a forward pass whose backbone returns fixed hidden states.

    Raises:
        ValueError: what reaches the head is not a multiple of the hidden states that the backbone returned.
    """
    # Integers below 62 are exact in every dtype.
    values = torch.arange(weight.shape[1], dtype=torch.float64).remainder(61).add(1)
    hidden = values.to(weight.device)[None, None]
    ids = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    reason = type(model).__name__
    for backbone in (model.base_model, model.get_decoder()):
        # The head is not compared with its parameters, which may be sharded.
        unchecked = Deferral(is_checked=True, checked_forward=instance_forward(head))
        deferring = deferring_head(head, unchecked)
        try:
            with (
                deferring,
                exchanged(backbone, "features", _return_hidden, hidden),
                torch.no_grad(),
                defer_logits(model),
            ):
                options = accepted(keywords_of(model.forward), return_dict=True)
                logits = logits_in(model.forward(ids, **options), model)
        except Exception as error:
            reason = f"{type(model).__name__} ({type(error).__name__}: {error})"
            continue
        if logits.shape == (*hidden.shape[:-1], weight.shape[0]) and logits.hidden.shape == hidden.shape:
            factor = logits.hidden.double() / hidden
            if torch.allclose(factor, factor[..., :1]):
                return logits.softcap, logits.logit_scale * factor[0, 0, 0].item()
    remedy = "use patch_model(model), which supports layers between the two"
    if calls_another_model(model):
        reason, remedy = COPIED, COPY_REMEDY
    raise ValueError(f"model: expected a head that takes the backbone's output, got {reason}; {remedy}.")
