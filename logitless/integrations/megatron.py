"""Megatron-core 0.19.2: the losses of `GPTModel`, by its option `output_processor` (since 0.18).

    model(..., labels=labels, output_processor=output_processor)

returns the same losses (b, s) as the model and builds no logits. This module imports and replaces nothing of
Megatron: it reads the tensor-parallel group and all options from the output layer and the config.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import type_error, value_error
from logitless.exchange import exchanged
from logitless.integrations.sequences import GatherSequence
from logitless.integrations.versions import check_version, log_replacement
from logitless.losses import linear_cross_entropy

REMEDY = "call the model without output_processor"


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    labels: Tensor | None,
    config: Any,
    context: Mapping[str, Any] | None = None,
    inference_context: Any = None,
    **unused: Any,
) -> Tensor:
    """Per-token losses, for `GPTModel.forward(..., output_processor=output_processor)`.

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
        ValueError: with this output layer, option or shape the losses would differ from the model's.
        TypeError: `context` is no mapping.
    """
    if inference_context is not None:
        raise value_error("inference_context", "None", type(inference_context).__name__, REMEDY)
    if labels is None:
        gather = unused.get("runtime_gather_output")
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=gather)
        return unused["scale_logits"](logits).transpose(0, 1).contiguous()
    options = {} if context is None else context
    if not isinstance(options, Mapping):
        expected = "None or a mapping of options of linear_cross_entropy"
        got = type(options).__name__
        raise type_error("context", expected, got, "pass them as a dict")
    if config.use_mup:
        options = {"logit_scale": config.mup_output_mult, **options}
    _check_options(output_layer, output_weight, config)
    _announce_once(options.get("logits_budget"))
    # The layer is called, because its hooks wait for a weight that is being gathered (overlap_param_gather).
    with exchanged(output_layer, "loss", _loss_forward, (labels, options)):
        return output_layer(hidden_states, weight=output_weight)


def _loss_forward(output_layer, state, original, hidden: Tensor, *, weight: Tensor | None) -> Tensor:
    """Forward pass of the output layer that returns the losses; `state`: (labels, options)."""
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
        weight = AccumulateIntoMainGrad.apply(weight)
    # Every rank has all of d_hidden: it must not be summed over the group.
    hidden = hidden.transpose(0, 1)
    return linear_cross_entropy(hidden, weight, labels, reduction="none", tp_group=group, **options)


class AccumulateIntoMainGrad(torch.autograd.Function):
    """Identity whose gradient is added to `weight.main_grad`, as Megatron's layers do with
    `gradient_accumulation_fusion`.

    Multi-token prediction calls the original layer with the same weight. Its backward pass sets
    `weight.grad_added_to_main_grad`, with which DistributedDataParallel's hook ignores `weight.grad`.
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
        # The hook needs a gradient. A tied embedding adds its own gradient to this one.
        return grad.new_zeros(()).expand_as(grad)


def _check_options(output_layer: nn.Module, output_weight: Tensor | None, config: Any) -> None:
    """Raise ValueError for options with which the losses or the weight's gradient would be wrong."""
    class_name = type(output_layer).__name__
    if class_name != "ColumnParallelLinear":
        raise value_error("output_layer", "a ColumnParallelLinear", class_name, REMEDY)
    if output_layer.bias is not None:
        raise value_error("output_layer", "no bias", "a bias", REMEDY)
    is_deferred = getattr(config, "defer_embedding_wgrad_compute", False)
    if is_deferred:
        raise value_error("defer_embedding_wgrad_compute", "False", is_deferred, "turn it off")
    remat_size = getattr(output_layer, "gtp_remat_size", 1)
    if remat_size != 1:
        raise value_error("output_layer.gtp_remat_size", "1", remat_size, REMEDY)
    weight = output_layer.weight if output_weight is None else output_weight
    if hasattr(weight, "__fsdp_param__"):
        raise value_error("output_layer", "a weight outside of Megatron-FSDP", "one inside", REMEDY)


@cache
def _announce_once(logits_budget: int | str | None) -> None:
    check_version("megatron")
    log_replacement("Megatron-core", "logits and cross-entropy of GPTModel", logits_budget)
