"""Reaching the LM head: where a model keeps its backbone and head, and a forward pass that scores tokens in place of logits.

TRL 1.16 calls `model(..., labels=labels, fused_lm_head=True)` and reads a `FusedCausalLMOutput`. `attach_chunked_head` answers
that call with our losses. It all happens inside the model's own `forward`, where the hooks of DDP, FSDP and DeepSpeed fire.
"""

import functools
import types
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel
from transformers.utils import is_peft_available
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

# What model families call the factor on their logits. Granite, MiniCPM3 and HyperCLOVA X are in `head_options` below.
SCALE_NAMES = ("logit_scale", "output_multiplier", "lm_head_multiplier")


class Score(Protocol):
    """Scores the labelled tokens and returns fields of `FusedCausalLMOutput`, `log_probs` among them."""

    def __call__(
        self,
        hidden: Tensor,  # (B, T, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        labels: Tensor,  # (B, T)
        shift: bool,  # whether position i is scored on label i + 1
    ) -> dict[str, Tensor]: ...


def head_options(config: Any) -> dict[str, float | None]:
    """The `softcap` and `logit_scale` that a model of this configuration applies to its logits, for any of our losses."""
    config = config.get_text_config()
    scales = (getattr(config, name, None) for name in SCALE_NAMES)
    scale = next((scale for scale in scales if scale is not None), None)
    if scale is None and (divisor := getattr(config, "logits_scaling", None)) is not None:
        # HyperCLOVA X multiplies by the number that Granite and MiniCPM3 divide by
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    return {
        "softcap": getattr(config, "final_logit_softcapping", None),
        "logit_scale": 1.0 if scale is None else scale,
    }


def head_parameters(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight `(V, H)` and bias `(V,)` of the model's head as they are now: FSDP and PEFT replace them after construction."""
    head = model.get_output_embeddings()
    if is_peft_available():
        from peft.tuners.tuners_utils import BaseTunerLayer

        if isinstance(head, BaseTunerLayer):
            raise ValueError(
                f"model: expected an LM head without an adapter, got {type(head).__name__} on it, which the loss would "
                "leave out; remove 'lm_head' from target_modules, or train the whole head with modules_to_save=['lm_head']."
            )
    return _gathered(head.weight), _gathered(getattr(head, "bias", None))


def _gathered(parameter: Tensor | None) -> Tensor | None:
    if not isinstance(parameter, DTensor):
        return parameter
    # Every rank computes a gradient from its own tokens: average them, as DDP does. Plain `full_tensor()` takes them to be
    # equal already and gives each rank's shard the gradient of that rank's tokens alone.
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


def attach_chunked_head(model: PreTrainedModel, score: Score) -> None:
    """Makes `model(..., labels=..., fused_lm_head=True)` return `score`'s answer; every other call runs as before."""
    original_forward = model.forward

    # `generate` checks its arguments against the signature, and Trainer reads from it what the model accepts
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return _scored_forward(self, score, *args, **kwargs)
        return original_forward(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def _scored_forward(
    model: PreTrainedModel,
    score: Score,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,  # already aligned, as context and sequence parallelism pass them
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> FusedCausalLMOutput:
    config = model.config.get_text_config()
    kwargs["use_cache"] = False
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    # `base_model`, not `get_decoder()`, which leaves the images of a vision-language model out
    backbone = model.base_model(*args, **kwargs)

    weight, bias = head_parameters(model)
    # with a `device_map` the backbone can end on another device than the head
    hidden = backbone.last_hidden_state.to(weight.device)
    targets = (labels if shift_labels is None else shift_labels).to(weight.device)
    with maybe_gather_lm_head_ctx(weight, bias):
        fields = score(hidden, weight, bias, targets, shift=shift_labels is None)

    # Read by TRL under DeepSpeed's sequence parallelism only; elsewhere `compute_loss` divides the sum by its own count
    count = fields["label_mask"].sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -fields["log_probs"].sum() / count
    aux_loss = None
    if kwargs.get("output_router_logits"):
        aux_loss = _load_balancing_loss(config, backbone.router_logits, kwargs.get("attention_mask"))
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(loss=loss, aux_loss=aux_loss, **fields)


def _load_balancing_loss(config: Any, router_logits: tuple[Tensor, ...], attention_mask: Tensor | None) -> Tensor:
    # Mixtral's is the one that every mixture-of-experts model of transformers uses
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, attention_mask)
