"""For models that exist already: `patch_model`, undoable."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import is_peft_available
from trl.trainer.utils import maybe_gather_lm_head_ctx

from logitless import CrossEntropyLoss

from .head import _load_balancing_loss, head_options, head_projection, replace_forward


def _base(model: Any) -> PreTrainedModel:
    """The transformers model under an adapter."""
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def patch_model(model: PreTrainedModel, *, logits_budget: int | None = None) -> Callable[[], None]:
    """Make `model(..., labels=labels)` compute its loss without logits; returns a function that undoes it.

    The answer's `loss` is the model's own: labels are shifted, `num_items_in_batch` divides the sum where it
    is given, the soft cap and the scale of the model's head apply, and a mixture of experts adds its router
    loss. Its `logits` are None. Calls without labels, generation among them, run as before.

    Args:
        model: any causal language model of transformers, under PEFT or not; LoRA may be on the head too.
        logits_budget: bytes that the logits alive at one time may take; default the library's.

    Raises:
        ValueError: the model has no LM head, or PEFT adapts it with something else than plain LoRA (when
            called).
    """
    base = _base(model)
    if base.get_output_embeddings() is None:
        raise ValueError(
            f"model: expected a causal language model with an LM head, got {type(base).__name__}; pass "
            f"AutoModelForCausalLM's."
        )
    loss = CrossEntropyLoss(logits_budget=logits_budget, **head_options(base.config))
    original = base.forward

    @functools.wraps(type(base).forward)
    def forward(self: PreTrainedModel, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None and kwargs.get("shift_labels") is None:
            return original(*args, **kwargs)
        return _loss_forward(self, loss, *args, labels=labels, **kwargs)

    return replace_forward(base, forward)


def _loss_forward(
    model: PreTrainedModel,
    loss: CrossEntropyLoss,
    *args: Any,
    labels: Tensor | None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    config = model.config.get_text_config()
    kwargs |= {"use_cache": False, "return_dict": True}
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    backbone = model.base_model(*args, **kwargs)
    hidden, weight, bias = head_projection(model, backbone.last_hidden_state)
    targets = labels if shift_labels is None else shift_labels
    with maybe_gather_lm_head_ctx(weight, bias):
        value = loss(
            hidden,
            weight,
            targets.to(weight.device),
            bias=bias,
            shift=shift_labels is None,
            num_items=num_items_in_batch,
        ).loss
    if kwargs.get("output_router_logits"):
        aux_loss = _load_balancing_loss(config, backbone.router_logits, kwargs.get("attention_mask"))
        value = value + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return CausalLMOutputWithPast(
        loss=value,
        hidden_states=getattr(backbone, "hidden_states", None),
        attentions=getattr(backbone, "attentions", None),
    )
