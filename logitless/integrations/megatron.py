"""Megatron-core 0.19.2: the losses of `GPTModel`, by the hook `output_processor` that it has since 0.18.

    model(..., labels=labels, output_processor=output_processor)

returns the losses that the model returns, (b, s), and builds no logits. Nothing of Megatron is imported or
replaced: the tensor-parallel group and all options are read from the output layer and the config.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import type_error, value_error
from logitless.exchange import exchanged
from logitless.integrations.sequences import GatherSequence
from logitless.integrations.versions import announce, check_version
from logitless.losses import linear_cross_entropy

STOCK = "call the model without output_processor"


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    labels: Tensor | None,
    config: Any,
    context: Mapping[str, Any] | None = None,
    inference_context: Any = None,
    **others: Any,
) -> Tensor:
    """The losses of tokens, for `GPTModel.forward(..., output_processor=output_processor)`.

    The vocabulary may be sharded over the tensor-parallel group, with `sequence_parallel` or without. Rows
    that pad the vocabulary take part in the softmax, as in Megatron.

    Args:
        hidden_states: (s, b, H); with `sequence_parallel` (s / ranks, b, H).
        output_layer: the model's `ColumnParallelLinear`.
        output_weight: (V / ranks, H), the weight of the embedding if both share it.
        labels: (b, s); a loss is 0 where the label is -100. None: the logits, as the model returns them.
        config: the model's `TransformerConfig`.
        context: options of `linear_cross_entropy`, such as {"logits_budget": 2**30}; GPTModel takes them as
            `output_processor_context`.
        inference_context: None.

    Returns:
        (b, s) fp32.

    Raises:
        ValueError: an output layer, option or shape with which the losses would differ from the model's.
        TypeError: `context` is no mapping.
    """
    if inference_context is not None:
        raise value_error("inference_context", "None", type(inference_context).__name__, STOCK)
    if labels is None:
        gather = others.get("runtime_gather_output")
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=gather)
        return others["scale_logits"](logits).transpose(0, 1).contiguous()
    options = {} if context is None else context
    if not isinstance(options, Mapping):
        expected = "None or a mapping of options of linear_cross_entropy"
        got = type(options).__name__
        raise type_error("context", expected, got, "pass them as a dict")
    if config.use_mup:
        options = {"logit_scale": config.mup_output_mult, **options}
    _check(output_layer, output_weight, config)
    _announce_once(options.get("logits_budget"))
    # Its hooks wait for a weight that is still being gathered (overlap_param_gather).
    with exchanged(output_layer, "loss", _losses, (labels, options)):
        return output_layer(hidden_states, weight=output_weight)


def _losses(output_layer, state, stock, hidden: Tensor, *, weight: Tensor | None) -> Tensor:
    """The forward pass of the output layer while the losses are computed."""
    labels, options = state
    weight = output_layer.weight if weight is None else weight
    group = output_layer.tp_group if output_layer.tp_group.size() > 1 else None
    if output_layer.sequence_parallel and group is not None:
        hidden = GatherSequence.apply(hidden, group)
    s, b, _ = hidden.shape
    if labels.shape != (b, s):
        expected = f"shape {(b, s)}, (b, s) of hidden states (s, b, H)"
        remedy = "check the layouts"
        raise value_error("labels", expected, tuple(labels.shape), remedy)
    if output_layer.gradient_accumulation_fusion and hasattr(weight, "main_grad") and weight.requires_grad:
        weight = IntoMainGradient.apply(weight)
    # d_hidden is whole on every rank: no sum over the group may follow.
    hidden = hidden.transpose(0, 1)
    return linear_cross_entropy(hidden, weight, labels, reduction="none", tp_group=group, **options)


class IntoMainGradient(torch.autograd.Function):
    """Identity whose gradient is added to `weight.main_grad`, as Megatron's layers do with
    `gradient_accumulation_fusion`.

    Multi-token prediction calls the stock layer with the same weight. Its backward pass marks the weight, so
    that the hook of DistributedDataParallel would drop a gradient that arrives in `weight.grad`.
    """

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weight = ctx.weight
        weight.main_grad.add_(grad)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # The hook expects a gradient, and adds it to that of a tied embedding.
        return grad.new_zeros(()).expand_as(grad)


def _check(output_layer: nn.Module, output_weight: Tensor | None, config: Any) -> None:
    """Raise ValueError for what would change the losses or the gradient of the weight."""
    kind = type(output_layer).__name__
    if kind != "ColumnParallelLinear":
        raise value_error("output_layer", "a ColumnParallelLinear", kind, STOCK)
    if output_layer.bias is not None:
        raise value_error("output_layer", "no bias", "a bias", STOCK)
    deferred = getattr(config, "defer_embedding_wgrad_compute", False)
    if deferred:
        raise value_error("defer_embedding_wgrad_compute", "False", deferred, "turn it off")
    remat = getattr(output_layer, "gtp_remat_size", 1)
    if remat != 1:
        raise value_error("output_layer.gtp_remat_size", "1", remat, STOCK)
    weight = output_layer.weight if output_weight is None else output_weight
    sharded = hasattr(weight, "__fsdp_param__")
    if sharded:
        raise value_error("output_layer", "a weight outside of Megatron-FSDP", "one inside", STOCK)


@cache
def _announce_once(logits_budget: int | None) -> None:
    check_version("megatron")
    announce("Megatron-core", "logits and cross-entropy of GPTModel", logits_budget)
