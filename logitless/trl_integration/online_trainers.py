"""TRL's trainers that sample from the policy while they train it: GMPO, AsyncGRPO, A2PO and OnlineDPO.

The first two call `add_fused_lm_head` as GRPO does. A2PO and OnlineDPO project every position of policy and
reference and keep one log-probability of each; ours are asked for the log-probabilities of the completion
only. Losses and metrics stay TRL's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import trl.experimental.async_grpo.async_grpo_trainer
import trl.trainer.grpo_trainer
from torch import Tensor
from trl.experimental.a2po import A2POConfig as StockA2POConfig
from trl.experimental.a2po import A2POTrainer as StockA2POTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig as StockAsyncGRPOConfig
from trl.experimental.async_grpo import AsyncGRPOTrainer as StockAsyncGRPOTrainer
from trl.experimental.gmpo import GMPOConfig as StockGMPOConfig
from trl.experimental.gmpo import GMPOTrainer as StockGMPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig as StockOnlineDPOConfig
from trl.experimental.online_dpo import OnlineDPOTrainer as StockOnlineDPOTrainer

from .attached_head import AttachedHeadTrainerMixin
from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin


@dataclass
class GMPOConfig(ChunkedLossConfigMixin, StockGMPOConfig):
    """`trl.experimental.gmpo.GMPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class GMPOTrainer(ChunkedLossTrainerMixin, StockGMPOTrainer):
    """`trl.experimental.gmpo.GMPOTrainer`; with `GMPOConfig(use_chunked_loss=True)` its loss is computed
    under the budget."""

    stock_module = trl.trainer.grpo_trainer


@dataclass
class AsyncGRPOConfig(ChunkedLossConfigMixin, StockAsyncGRPOConfig):
    """`trl.experimental.async_grpo.AsyncGRPOConfig` with `use_chunked_loss` (default False) and
    `logits_budget` (bytes, default the library's)."""


class AsyncGRPOTrainer(ChunkedLossTrainerMixin, StockAsyncGRPOTrainer):
    """`trl.experimental.async_grpo.AsyncGRPOTrainer`; with `AsyncGRPOConfig(use_chunked_loss=True)` its loss
    is computed under the budget. What TRL asks for beside it (a vLLM server, a GPU with its tree attention)
    it asks for here too."""

    stock_module = trl.experimental.async_grpo.async_grpo_trainer


@dataclass
class A2POConfig(ChunkedLossConfigMixin, StockA2POConfig):
    """`trl.experimental.a2po.A2POConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class A2POTrainer(AttachedHeadTrainerMixin, StockA2POTrainer):
    """`trl.experimental.a2po.A2POTrainer`; with `A2POConfig(use_chunked_loss=True)` policy and reference
    build no logits."""

    def _get_sequence_logps(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
    ) -> Tensor:
        if not self.uses_chunked_loss:
            return super()._get_sequence_logps(model, input_ids, attention_mask, logits_to_keep)
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        return model(
            input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True
        ).log_probs.sum(dim=1)


@dataclass
class OnlineDPOConfig(ChunkedLossConfigMixin, StockOnlineDPOConfig):
    """`trl.experimental.online_dpo.OnlineDPOConfig` with `use_chunked_loss` (default False) and
    `logits_budget` (bytes, default the library's)."""


class OnlineDPOTrainer(AttachedHeadTrainerMixin, StockOnlineDPOTrainer):
    """`trl.experimental.online_dpo.OnlineDPOTrainer`; with `OnlineDPOConfig(use_chunked_loss=True)` policy
    and reference build no logits.

    Raises:
        ValueError: the flag is on for an encoder-decoder.
    """

    def _forward(
        self,
        model: Any,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        vision_inputs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        if not self.uses_chunked_loss:
            return super()._forward(
                model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs
            )
        length = completion_ids.shape[1]
        if vision_inputs is None:
            # As TRL cuts a prompt on its left.
            surplus = max(prompt_ids.shape[1] + length - self.max_length, 0)
            prompt_ids, prompt_mask = prompt_ids[:, surplus:], prompt_mask[:, surplus:]
        # What each position predicts, padding included, which TRL's metrics count. Without a prompt TRL does
        # not shift.
        before = prompt_ids.shape[1] - 1
        labels = (
            torch.nn.functional.pad(completion_ids, (before, 1), value=-100)
            if before >= 0
            else completion_ids
        )
        ids, mask = (
            torch.cat((prompt_ids, completion_ids), dim=1),
            torch.cat((prompt_mask, completion_mask), dim=1),
        )
        out = model(
            ids, attention_mask=mask, shift_labels=labels, fused_lm_head=True, **(vision_inputs or {})
        )
        start = max(before, 0)
        return out.log_probs[:, start : start + length]
