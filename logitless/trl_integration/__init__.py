"""One flag in TRL: the trainers you know, with a loss that never builds the full logits.

    from logitless.trl_integration import SFTConfig, SFTTrainer

    SFTTrainer(model, args=SFTConfig(use_chunked_loss=True), train_dataset=dataset).train()

Each pair here is TRL's own Config and Trainer plus `use_chunked_loss` and `logits_budget`; with the flag off
it *is* TRL's pair. They cover TRL's trainers for language models and, from `trl.experimental`, A2PO,
AsyncDistillation, AsyncGRPO, CPO, GKD, GMPO, GOLD, IW-OPD, OnlineDPO, ORPO, SDFT, SDPO, ServerDistillation
and TPO. For trainers and models that exist already there are `apply_to` and `patch_model`. This is the only
folder of the library that imports trl or transformers.
"""

from .versions import SUPPORTED, require_supported

require_supported()

from .async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer  # noqa: E402
from .distillation_trainers import (  # noqa: E402
    DistillationConfig,
    DistillationTrainer,
    GKDConfig,
    GKDTrainer,
)
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
from .online_trainers import (  # noqa: E402
    A2POConfig,
    A2POTrainer,
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    GMPOConfig,
    GMPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
)
from .preference_trainers import CPOConfig, CPOTrainer, ORPOConfig, ORPOTrainer  # noqa: E402
from .self_distillation_trainers import SDFTConfig, SDFTTrainer, SDPOConfig, SDPOTrainer  # noqa: E402
from .sft import SFTConfig, SFTTrainer  # noqa: E402
from .teacher_distillation_trainers import (  # noqa: E402
    GOLDConfig,
    GOLDTrainer,
    IWOPDConfig,
    IWOPDTrainer,
    ServerDistillationConfig,
    ServerDistillationTrainer,
)
from .triple_preference import TPOConfig, TPOTrainer  # noqa: E402

__all__ = [
    "A2POConfig",
    "A2POTrainer",
    "AsyncDistillationConfig",
    "AsyncDistillationTrainer",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
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
    "GMPOConfig",
    "GMPOTrainer",
    "GOLDConfig",
    "GOLDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "IWOPDConfig",
    "IWOPDTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "SDFTConfig",
    "SDFTTrainer",
    "SDPOConfig",
    "SDPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "SUPPORTED",
    "TPOConfig",
    "TPOTrainer",
    "ServerDistillationConfig",
    "ServerDistillationTrainer",
    "apply_to",
    "patch_model",
]
