"""One flag in TRL: the trainers you know, with a loss that never builds the full logits.

    from logitless.trl_integration import SFTConfig, SFTTrainer

    SFTTrainer(model, args=SFTConfig(use_chunked_loss=True), train_dataset=dataset).train()

Each pair here is TRL's own Config and Trainer plus `use_chunked_loss` and `logits_budget`; with the flag off it *is* TRL's
pair. This is the only folder of the library that imports trl or transformers.
"""

from .versions import SUPPORTED, require_supported

require_supported()

from .distillation_trainers import DistillationConfig, DistillationTrainer, GKDConfig, GKDTrainer  # noqa: E402
from .existing import apply_to, patch_model  # noqa: E402
from .log_prob_trainers import (  # noqa: E402
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin  # noqa: E402
from .preference_trainers import CPOConfig, CPOTrainer, ORPOConfig, ORPOTrainer  # noqa: E402
from .sft import SFTConfig, SFTTrainer  # noqa: E402

__all__ = [
    "CPOConfig",
    "CPOTrainer",
    "ChunkedLossConfigMixin",
    "ChunkedLossTrainerMixin",
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "GKDConfig",
    "GKDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "SUPPORTED",
    "apply_to",
    "patch_model",
]
