"""TRL's trainers with four additional config options; `use_chunked_loss` computes the loss without the full
logits.

    from logitless.trl_integration import SFTConfig, SFTTrainer

    SFTTrainer(model, args=SFTConfig(use_chunked_loss=True), train_dataset=dataset).train()

Each pair of Config and Trainer is a subclass of TRL's pair. The options are `use_chunked_loss`,
`use_fused_layers`, `logits_budget` and `activation_budget`; with all of them off, a pair does exactly what
TRL's pair does. `PAIRS` names them, including those of `trl.experimental`. For existing trainers there are
`apply_to` and `remove_from`, for models `patch_model`. Only this package of the library imports trl.

Names are imported on first use: SFT imports no experimental trainer, and `patch_model` does not import TRL.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

from .versions import SUPPORTED, require_supported

# The modules of the names that are no Config or Trainer
MODULES = {
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
__all__ = ["SUPPORTED", *MODULES, *(f"{name}{part}" for name in PAIRS for part in ("Config", "Trainer"))]


def __getattr__(name: str) -> Any:
    for part in ("Config", "Trainer"):
        if name.endswith(part) and name.removesuffix(part) in PAIRS:
            config, trainer = _import(".pairs").make_pair(name.removesuffix(part))
            return config if part == "Config" else trainer
    if name.endswith(("Config", "Trainer")):
        # Not an AttributeError, whose message `from ... import` would replace
        remedy = "train it with TRL's own, without the chunked loss"
        raise ImportError(
            f"{name}: expected a Config or Trainer of {', '.join(PAIRS)}, got {name}; {remedy}."
        )
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import(MODULES[name]), name)


def _import(module: str) -> Any:
    with suppress(ModuleNotFoundError):
        return import_module(module, __name__)
    require_supported()  # its error says what to install
    return import_module(module, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
