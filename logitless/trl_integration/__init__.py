"""TRL's trainers with one flag more: a loss that never builds the full logits.

    from logitless.trl_integration import SFTConfig, SFTTrainer

    SFTTrainer(model, args=SFTConfig(use_chunked_loss=True), train_dataset=dataset).train()

Each pair here is TRL's own Config and Trainer plus `use_chunked_loss`, `use_fused_layers`, `logits_budget`
and `activation_budget`; with all of them off it *is* TRL's pair. `PAIRS` names them, including those of
`trl.experimental`. For existing trainers and models there are `apply_to`, with `remove_from`, and
`patch_model`. Only this folder of the library imports trl.

Names are imported on first use: SFT imports no experimental trainer, and `patch_model` no TRL.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

from .versions import SUPPORTED, require_supported

# Where the names live that are no Config or Trainer.
PLACES = {
    "ChunkedLossConfigMixin": ".pairs",
    "ChunkedLossTrainerMixin": ".pairs",
    "apply_to": ".apply",
    "head_of": "logitless.models",
    "patch_model": "logitless.models",
    "remove_from": ".apply",
}
PAIRS = (
    "A2PO AsyncDistillation AsyncGRPO CPO DPO Distillation GKD GMPO GOLD GRPO IWOPD KTO ORPO OnlineDPO RLOO "
    "SDFT SDPO SFT ServerDistillation TPO"
).split()
__all__ = ["SUPPORTED", *PLACES, *(f"{name}{part}" for name in PAIRS for part in ("Config", "Trainer"))]


def __getattr__(name: str) -> Any:
    for part in ("Config", "Trainer"):
        if name.endswith(part) and name.removesuffix(part) in PAIRS:
            made = _imported(".pairs").pair(name.removesuffix(part))
            return made[part == "Trainer"]
    if name.endswith(("Config", "Trainer")):
        # `from ... import` would replace an AttributeError's message by its own.
        remedy = "train it with TRL's own, without the chunked loss"
        raise ImportError(
            f"{name}: expected a Config or Trainer of {', '.join(PAIRS)}, got {name}; {remedy}."
        )
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_imported(PLACES[name]), name)


def _imported(place: str) -> Any:
    with suppress(ModuleNotFoundError):
        return import_module(place, __name__)
    require_supported()  # says what to install
    return import_module(place, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
