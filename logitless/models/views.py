"""`head_of`: the LM head of a model with its softcap and scale, for any of our losses."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from logitless.engine.head_view import HeadView, view_of
from logitless.exchange import exchanged
from logitless.models.heads import base_of, find_head, read_head, unwrapped
from logitless.models.logits import Deferral, DeferredLogits, answering, deferred


class _Known(NamedTuple):
    """Softcap and scale found by a model's forward pass, and the model's configuration at that time."""

    options: list[Any]
    softcap: float | None
    logit_scale: float


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def head_of(model: nn.Module) -> HeadView:
    """The LM head of a model, to be passed as `weight` to a loss.

        loss_fn(model.base_model(ids).last_hidden_state, head_of(model), targets)

    Softcap and logit scale are measured by running the model's own forward pass on made-up hidden states:
    once, and again after a number in the model's configuration or attributes has changed. Call `head_of` in
    every step, because FSDP and PEFT replace parameters.

    Args:
        model: a causal language model of transformers, or its LM head. PEFT's adapters and the wrappers of
            DDP, torch.compile, Lightning Fabric, DeepSpeed and accelerate may be around the model.

    Returns:
        HeadView(weight, bias, columns, softcap, logit_scale).

    Raises:
        ValueError: the model has no head, or layers between backbone and head; `patch_model` supports those.
        TypeError: the head is not supported (quantized heads, by name).
    """
    model = unwrapped(model)
    if not hasattr(model, "get_output_embeddings"):
        return view_of(model, "model")
    base = base_of(model)
    view = read_head(find_head(base))
    options = _options(base)
    known = _KNOWN.get(base)
    if known is None or known.options != options:
        known = _KNOWN[base] = _Known(options, *_told(base, view.weight))
    return view._replace(softcap=known.softcap, logit_scale=known.logit_scale, of_model=True)


def _options(model: nn.Module) -> list[Any]:
    """Every number, string and None in the attributes and configurations of a model, which its forward pass
    may read."""
    config = getattr(model, "config", None)
    owners = [model] if config is None else [model, config]
    if hasattr(config, "get_text_config") and config.get_text_config() is not config:
        owners.append(config.get_text_config())
    plain = (int, float, str, type(None))
    named = [item for owner in owners for item in vars(owner).items() if isinstance(item[1], plain)]
    return [(name, value) for name, value in named if name != "training"]


class _Features:
    """A backbone's output with nothing but hidden states."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _features(backbone: nn.Module, hidden: Tensor, stock: Any, *args: Any, **kwargs: Any) -> _Features:
    return _Features(hidden)


def _told(model: nn.Module, weight: Tensor) -> tuple[float | None, float]:
    # Whole numbers are exact in every dtype.
    numbers = torch.arange(weight.shape[1], dtype=torch.float64).remainder(61).add(1)
    hidden = numbers.to(weight.device)[None, None]
    ids = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    reason = type(model).__name__
    for backbone in (model.base_model, model.get_decoder()):
        # The head is not checked here, where it may be sharded.
        answers = answering(find_head(model), Deferral(checked=True))
        try:
            with (
                answers,
                exchanged(backbone, "features", _features, hidden),
                torch.no_grad(),
                deferred(model),
            ):
                logits = model.forward(ids, return_dict=True).logits
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        direct = isinstance(logits, DeferredLogits) and logits.rows == weight.shape[0]
        if direct and logits.hidden.shape == hidden.shape:
            factor = logits.hidden.double() / hidden
            if torch.allclose(factor, factor[..., :1]):
                return logits.cap, logits.gain * factor[0, 0, 0].item()
    remedy = "patch_model(model) takes models with layers between the two"
    raise ValueError(f"model: expected a head right behind its backbone, got {reason}; {remedy}.")
