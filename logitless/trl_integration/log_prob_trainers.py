"""The trainers of TRL whose losses are made of per-token log-probabilities: DPO, KTO, GRPO and RLOO.

TRL's own code computes the loss, the metrics and everything around them, from numbers that our head hands over: 2 products with a
frozen head (LoRA), 4 with a trainable one, under `logits_budget`. `cast_lm_head_to_fp32` gives unrounded logits.
"""

from dataclasses import dataclass

import trl
import trl.trainer.dpo_trainer
import trl.trainer.grpo_trainer
import trl.trainer.kto_trainer
import trl.trainer.rloo_trainer

from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin


@dataclass
class DPOConfig(ChunkedLossConfigMixin, trl.DPOConfig):
    """`trl.DPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the library's)."""


class DPOTrainer(ChunkedLossTrainerMixin, trl.DPOTrainer):
    """`trl.DPOTrainer`; with `DPOConfig(use_chunked_loss=True)` every loss type is computed under the budget."""

    stock_module = trl.trainer.dpo_trainer


@dataclass
class KTOConfig(ChunkedLossConfigMixin, trl.KTOConfig):
    """`trl.KTOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the library's)."""


class KTOTrainer(ChunkedLossTrainerMixin, trl.KTOTrainer):
    """`trl.KTOTrainer`; with `KTOConfig(use_chunked_loss=True)` its loss is computed under the budget."""

    stock_module = trl.trainer.kto_trainer


@dataclass
class GRPOConfig(ChunkedLossConfigMixin, trl.GRPOConfig):
    """`trl.GRPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the library's)."""


class GRPOTrainer(ChunkedLossTrainerMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer`; with `GRPOConfig(use_chunked_loss=True)` every loss type is computed under the budget."""

    stock_module = trl.trainer.grpo_trainer


@dataclass
class RLOOConfig(ChunkedLossConfigMixin, trl.RLOOConfig):
    """`trl.RLOOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the library's)."""


class RLOOTrainer(ChunkedLossTrainerMixin, trl.RLOOTrainer):
    """`trl.RLOOTrainer`; with `RLOOConfig(use_chunked_loss=True)` its loss is computed under the budget."""

    stock_module = trl.trainer.rloo_trainer
