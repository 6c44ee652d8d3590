"""The trainers of TRL whose losses are made of per-token log-probabilities: DPO, KTO, GRPO and RLOO.

TRL's own code computes the loss, the metrics and everything around them, from numbers that our head hands
over, under `logits_budget`: 2 products with a frozen head (LoRA), 4 with a trainable one. For DPO and GRPO a
    trainable head takes 3, as our loss class computes the
gradient in the same walk (see `foreseen.py`). `cast_lm_head_to_fp32` gives unrounded logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import trl
import trl.trainer.dpo_trainer
import trl.trainer.grpo_trainer
import trl.trainer.kto_trainer
import trl.trainer.rloo_trainer
from torch import Tensor
from transformers import PreTrainedModel

from logitless import DPOLoss, GRPOLoss

from .foreseen import ForeseenScore, Foresight
from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin, swapped

# DPO's loss types that TRL smooths; the others ignore `label_smoothing`.
SMOOTHED = {"exo_pair", "robust", "aot", "aot_unpaired"}
# GRPO's loss types that bound the ratio by `delta`, and the options that shape sapo and vespo.
CLIPPED = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo"}
SHAPES = (
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


class ForeseeingTrainerMixin(ChunkedLossTrainerMixin):
    """For trainers whose `_compute_loss` one of our classes computes too."""

    # What the next call of the model is to solve, if anything
    foresight: Foresight | None = None

    def chunked_score(self, model: PreTrainedModel, **stock_options: Any) -> ForeseenScore:
        differentiable = bool(getattr(self.args, "entropy_coef", 0.0))
        return ForeseenScore(self, model, differentiable_entropy=differentiable, **stock_options)


@dataclass
class DPOConfig(ChunkedLossConfigMixin, trl.DPOConfig):
    """`trl.DPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the
    library's)."""


class DPOTrainer(ForeseeingTrainerMixin, trl.DPOTrainer):
    """`trl.DPOTrainer`; with `DPOConfig(use_chunked_loss=True)` every loss type is computed under the
    budget."""

    stock_module = trl.trainer.dpo_trainer

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        smoothed = SMOOTHED & set(self.loss_types)
        if (
            not self.uses_chunked_loss
            or not torch.is_grad_enabled()
            or (self.label_smoothing and smoothed != set(self.loss_types))
        ):
            return super()._compute_loss(model, inputs, return_outputs)
        # TRL asks the reference after the policy, and takes what it is given.
        if not self.precompute_ref_logps:
            reference = self.model if self.ref_model is None else self.ref_model
            chosen, rejected = self.compute_ref_log_probs(reference, inputs)
            inputs = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        with swapped(self, precompute_ref_logps=True, foresight=self._foreseen(inputs, bool(smoothed))):
            return super()._compute_loss(model, inputs, return_outputs)

    def _foreseen(self, inputs: dict[str, Any], smoothed: bool) -> Foresight:
        options = {
            "beta": self.beta,
            "loss_type": tuple(self.loss_types),
            "loss_weights": tuple(self.loss_weights),
            "label_smoothing": self.label_smoothing if smoothed else 0.0,
            "f_divergence_type": self.f_divergence_type,
            "f_alpha_divergence_coef": self.f_alpha_divergence_coef,
            "ld_alpha": self.ld_alpha,
            "use_weighting": self.use_weighting,
            "discopop_tau": self.args.discopop_tau,
        }
        return Foresight(
            DPOLoss,
            options,
            {"ref_logps": torch.cat((inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]))},
        )


@dataclass
class KTOConfig(ChunkedLossConfigMixin, trl.KTOConfig):
    """`trl.KTOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the
    library's)."""


class KTOTrainer(ChunkedLossTrainerMixin, trl.KTOTrainer):
    """`trl.KTOTrainer`; with `KTOConfig(use_chunked_loss=True)` its loss is computed under the budget."""

    stock_module = trl.trainer.kto_trainer


@dataclass
class GRPOConfig(ChunkedLossConfigMixin, trl.GRPOConfig):
    """`trl.GRPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the
    library's)."""


class GRPOTrainer(ForeseeingTrainerMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer`; with `GRPOConfig(use_chunked_loss=True)` every loss type is computed under the
    budget."""

    stock_module = trl.trainer.grpo_trainer

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        with swapped(self, foresight=self._foreseen(inputs) if self.uses_chunked_loss else None):
            return super()._compute_loss(model, inputs)

    def _foreseen(self, inputs: dict[str, Any]) -> Foresight | None:
        old, sampling = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        masks_off_policy = self.off_policy_mask_threshold is not None
        # What needs the entropy of every token, or its gradient, is walked twice.
        if (
            self._entropy_bonus_enabled
            or self.top_entropy_quantile < 1
            or (masks_off_policy and old is None and sampling is None)
        ):
            return None
        args, prompt = self.args, inputs["prompt_ids"].shape[1]
        corrected = self.loss_type == "vespo" or (self.use_vllm and self.vllm_importance_sampling_correction)

        def aligned(x: Tensor | None) -> Tensor | None:
            """From the completions (B, C) to the labels, prompts too; what comes per sequence as it is."""
            return F.pad(x, (prompt, 0)) if x is not None and x.shape == inputs["completion_ids"].shape else x

        options = {
            "loss_type": self.loss_type,
            "beta": self.beta,
            "epsilon": self.epsilon_low,
            "epsilon_high": self.epsilon_high,
            "delta": args.delta if self.loss_type in CLIPPED else None,
            "importance_sampling_level": self.importance_sampling_level,
            "use_bias_correction_kl": args.use_bias_correction_kl,
            "off_policy_mask_threshold": self.off_policy_mask_threshold,
            "max_completion_length": self.max_completion_length,
            **{name: getattr(args, name) for name in SHAPES},
        }
        given = {
            "advantages": aligned(inputs["advantages"]),
            "old_logps": aligned(old),
            "sampling_logps": aligned(sampling),
            "mask": aligned(inputs["completion_mask"] * inputs.get("tool_mask", 1)),
            "ref_logps": aligned(inputs["ref_per_token_logps"]) if self.beta else None,
            "importance_weights": aligned(inputs.get("importance_sampling_ratio")) if corrected else None,
        }
        return Foresight(GRPOLoss, options, given)


@dataclass
class RLOOConfig(ChunkedLossConfigMixin, trl.RLOOConfig):
    """`trl.RLOOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the
    library's)."""


class RLOOTrainer(ChunkedLossTrainerMixin, trl.RLOOTrainer):
    """`trl.RLOOTrainer`; with `RLOOConfig(use_chunked_loss=True)` its loss is computed under the budget."""

    stock_module = trl.trainer.rloo_trainer
