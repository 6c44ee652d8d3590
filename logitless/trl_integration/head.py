"""Reaching the LM head: where a model keeps its backbone and head, and a forward pass that scores tokens in
place of logits.

TRL 1.16 calls `model(..., labels=labels, fused_lm_head=True)` and reads a `FusedCausalLMOutput`.
`attach_chunked_head` answers that call with our losses. It all happens inside the model's own `forward`,
where the hooks of DDP, FSDP and DeepSpeed fire.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel
from transformers.utils import is_peft_available
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from logitless.engine.operands import SplitHead

# What model families call the factor on their logits. Granite, MiniCPM3 and HyperCLOVA X are in
# `head_options` below.
SCALE_NAMES = ("logit_scale", "output_multiplier", "lm_head_multiplier")


class Score(Protocol):
    """Scores the labelled tokens and returns fields of `FusedCausalLMOutput`, `log_probs` among them."""

    def __call__(
        self,
        hidden: Tensor,  # (B, T, H)
        weight: Tensor | SplitHead,  # (V, H)
        bias: Tensor | None,  # (V,)
        labels: Tensor,  # (B, T)
        shift: bool,  # whether position i is scored on label i + 1
    ) -> dict[str, Tensor]: ...


def head_options(config: Any) -> dict[str, float | None]:
    """The `softcap` and `logit_scale` that a model of this configuration applies to its logits, for any of
    our losses."""
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
    """Weight `(V, H)` and bias `(V,)` of the model's head as they are now: FSDP and PEFT replace them after
    construction."""
    head = model.get_output_embeddings()
    if is_peft_available():
        from peft.tuners.tuners_utils import BaseTunerLayer

        if isinstance(head, BaseTunerLayer):
            raise ValueError(
                f"model: expected an LM head without an adapter, got {type(head).__name__} on it, which the "
                f"loss would "
                "leave out; remove 'lm_head' from target_modules, or train the whole head with "
                "modules_to_save=['lm_head']."
            )
    return _gathered(head.weight), _gathered(getattr(head, "bias", None))


def head_projection(
    model: PreTrainedModel, hidden: Tensor
) -> tuple[Tensor, Tensor | SplitHead, Tensor | None]:
    """Hidden states, weight and bias whose product is what the model's head makes of `hidden` at the moment.

    LoRA on the head, where it is switched on, makes the first two wider, [h, s·h·Aᵀ] · [W, B]ᵀ; a frozen W
    gets no gradient (`SplitHead`).
    """
    head = model.get_output_embeddings()
    if is_peft_available():
        from peft.tuners.tuners_utils import BaseTunerLayer

        if isinstance(head, BaseTunerLayer):
            names = _lora_names(head)
            weight, bias = (_gathered(getattr(head.get_base_layer(), name)) for name in ("weight", "bias"))
            hidden, weight, bias = _placed(hidden, weight, bias)
            return _with_lora(head, names, hidden, weight, bias) if names else (hidden, weight, bias)
    return _placed(hidden, *head_parameters(model))


def _lora_names(head: Any) -> list[str]:
    """The adapters that take part in the head's own forward pass."""
    from peft.tuners.lora import Linear
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    remedy = "remove 'lm_head' from target_modules, or train the whole head with modules_to_save=['lm_head']"
    found = [] if isinstance(head, Linear) else [f"{type(head).__module__}.{type(head).__name__}"]
    if not found and head.disable_adapters and head.merged:
        # as its own forward does
        head.unmerge()
    off = bool(found) or head.disable_adapters or head.merged
    names = [] if off else [name for name in head.active_adapters if name in head.lora_A]
    found += [type(head.lora_variant[name]).__name__ for name in names if name in head.lora_variant]
    if found:
        raise ValueError(
            f"model: expected no adapter but plain LoRA on the LM head, got {', '.join(found)}, which the "
            f"loss would leave out; {remedy}."
        )
    if names and is_deepspeed_zero3_enabled():
        raise ValueError(
            f"model: expected an LM head without an adapter under DeepSpeed ZeRO-3, got LoRA, untested "
            f"there; {remedy}."
        )
    return names


def _with_lora(
    head: Any, names: list[str], hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | SplitHead, Tensor | None]:
    wide, columns = [hidden], []
    for name in names:
        down, up, scale = head.lora_A[name], head.lora_B[name], head.scaling[name]
        x = head.lora_dropout[name](hidden.to(down.weight.dtype))
        wide.append((torch.nn.functional.linear(x, _gathered(down.weight)) * scale).to(hidden.dtype))
        # PEFT keeps the adapters of a half-precision model in fp32
        columns.append(_gathered(up.weight).to(weight.dtype))
        if up.bias is not None:
            extra = (_gathered(up.bias) * scale).to(weight.dtype)
            bias = extra if bias is None else bias + extra
    hidden, trained = torch.cat(wide, dim=-1), torch.cat(columns, dim=1)
    return (
        hidden,
        torch.cat((weight, trained), dim=1) if weight.requires_grad else SplitHead(weight, trained),
        bias,
    )


def _placed(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    # with a `device_map` the backbone can end on another device than the head
    return hidden.to(weight.device), weight, bias


def _gathered(parameter: Tensor | None) -> Tensor | None:
    if not isinstance(parameter, DTensor):
        return parameter
    # Every rank computes a gradient from its own tokens: average them, as DDP does. Plain `full_tensor()`
    # takes them to be equal already and gives each rank's shard the gradient of that rank's tokens alone.
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


def attach_chunked_head(model: PreTrainedModel, score: Score) -> Callable[[], None]:
    """Makes `model(..., labels=..., fused_lm_head=True)` return `score`'s answer; every other call runs as
    before. Returns its undoing."""
    original_forward = model.forward

    # `generate` checks its arguments against the signature, and Trainer reads from it what the model accepts
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return _scored_forward(self, score, *args, **kwargs)
        return original_forward(*args, **kwargs)

    return replace_forward(model, forward)


def replace_forward(model: PreTrainedModel, forward: Any) -> Callable[[], None]:
    """Puts `forward` in the place of the model's own; returns a function that puts back what was there."""
    undo = remembered(model)
    model.forward = types.MethodType(forward, model)
    # A replica would run this forward, which is bound to the original, on the original's GPU.
    model._replicate_for_data_parallel = _refuse_replicas
    return undo


def remembered(*models: PreTrainedModel) -> Callable[[], None]:
    """A function that gives every model the forward back that it has now."""
    names = ("forward", "_replicate_for_data_parallel")
    before = [{name: model.__dict__[name] for name in names if name in model.__dict__} for model in models]

    def restore() -> None:
        for model, attributes in zip(models, before, strict=True):
            for name in names:
                model.__dict__.pop(name, None)
            model.__dict__.update(attributes)

    return restore


def _refuse_replicas() -> None:
    raise ValueError(
        "model: expected one process per GPU, got nn.DataParallel around the chunked loss; start it with "
        "torchrun or accelerate launch, "
        "or make a single GPU visible with CUDA_VISIBLE_DEVICES."
    )


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

    hidden, weight, bias = head_projection(model, backbone.last_hidden_state)
    targets = (labels if shift_labels is None else shift_labels).to(weight.device)
    with maybe_gather_lm_head_ctx(weight, bias):
        fields = score(hidden, weight, bias, targets, shift=shift_labels is None)

    # Read by TRL under DeepSpeed's sequence parallelism only; elsewhere `compute_loss` divides the sum by its
    # own count
    count = fields["label_mask"].sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -fields["log_probs"].sum() / count
    aux_loss = None
    if kwargs.get("output_router_logits"):
        aux_loss = _load_balancing_loss(config, backbone.router_logits, kwargs.get("attention_mask"))
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(loss=loss, aux_loss=aux_loss, **fields)


def _load_balancing_loss(
    config: Any, router_logits: tuple[Tensor, ...], attention_mask: Tensor | None
) -> Tensor:
    # Mixtral's is the one that every mixture-of-experts model of transformers uses
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func(
        router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
    )
