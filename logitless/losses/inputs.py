"""Typed keyword arguments (PEP 692) that several losses share.

The signature of a loss's `__call__` lists the arguments of this loss; these dicts list the shared arguments.
tests/test_typing.py compares both with the arguments that the calls accept.
"""

from typing import TYPE_CHECKING, Literal, Required, TypedDict

import torch
from torch import Tensor, nn

from logitless.engine.head_view import HeadView
from logitless.engine.sampling_mask import SamplingMask

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

# An LM head: its weight (V, H), its module, or a `HeadView` of it.
HeadWeight = Tensor | nn.Module | HeadView
Reduction = Literal["mean", "sum", "none"]


class CallInputs(TypedDict, total=False):
    """Keyword arguments of every loss, documented in `LinearLoss.__call__`."""

    bias: Tensor | None
    num_items: float | Tensor | None
    shift: bool
    cu_seqlens: Tensor | None
    mask: Tensor | None
    accumulate_into: Tensor | None
    grad_scale: float


class ReferenceInputs(CallInputs, total=False):
    """Keyword arguments of losses with a reference model: log-probabilities, or hidden states and head."""

    ref_logps: Tensor | None
    ref_hidden: Tensor | None
    ref_weight: HeadWeight | None
    ref_bias: Tensor | None


class PolicyInputs(CallInputs, total=False):
    """Keyword arguments of policy losses: advantages, and what the sampler of the rollout returned."""

    advantages: Required[Tensor]
    old_logps: Tensor | None
    sampling_logps: Tensor | None
    sampling_mask: SamplingMask | None


class RolloutInputs(PolicyInputs, ReferenceInputs, total=False):
    """Keyword arguments of GRPO and PPO."""

    importance_weights: Tensor | None


class HeadOptions(TypedDict, total=False):
    """Fields of a loss that functions such as `linear_logprobs` accept, documented in `LinearLoss`."""

    softcap: float | None
    logit_scale: float
    temperature: float
    logits_budget: int | str | None
    accum_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    compact: bool
    tp_group: "ProcessGroup | DeviceMesh | str | None"
