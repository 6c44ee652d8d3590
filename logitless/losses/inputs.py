"""Keywords of the losses' calls, and options of heads, as type checkers see them (PEP 692).

A call's own signature has what is particular to a loss; these have the rest. tests/test_typing.py compares
both with what the calls take.
"""

from typing import TYPE_CHECKING, Literal, Required, TypedDict

import torch
from torch import Tensor, nn

from logitless.engine.head_view import HeadView

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# An LM head: its weight (V, H), or the head itself.
HeadWeight = Tensor | nn.Module | HeadView
Reduction = Literal["mean", "sum", "none"]


class CallInputs(TypedDict, total=False):
    """What the call of every loss takes: see `CrossEntropyLoss.__call__`."""

    bias: Tensor | None
    num_items: float | Tensor | None
    shift: bool
    cu_seqlens: Tensor | None
    mask: Tensor | None
    accumulate_into: Tensor | None
    accumulate_now: bool
    grad_scale: float


class ReferenceInputs(CallInputs, total=False):
    """With a reference model, as log-probabilities or as hidden states and head."""

    ref_logps: Tensor | None
    ref_hidden: Tensor | None
    ref_weight: HeadWeight | None
    ref_bias: Tensor | None


class RolloutInputs(CallInputs, total=False):
    """With what is known of a rollout: the calls of GRPO and PPO."""

    advantages: Required[Tensor]
    old_logps: Tensor | None
    sampling_logps: Tensor | None
    importance_weights: Tensor | None


class HeadOptions(TypedDict, total=False):
    """Options of a loss that its functions (`linear_logprobs` and others) take: see `CrossEntropyLoss`."""

    softcap: float | None
    logit_scale: float
    temperature: float
    logits_budget: int | None
    accum_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    compact: bool
    tp_group: "ProcessGroup | DeviceMesh | str | None"
