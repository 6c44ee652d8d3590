"""axolotl 0.21.0: a plugin that makes the model's labelled calls compute their loss without full logits.

    plugins:
      - logitless.integrations.axolotl.LogitlessPlugin
    logitless_budget: 2684354560

The plugin calls `logitless.models.patch_model` on the loaded model, after the adapters, and with
`logitless_fused_layers: true` also `fuse_layers`. Trainers of `rl:` keep their own losses.
"""

import logging
from typing import Any

from torch import nn

from logitless.errors import message, value_error, warn
from logitless.integrations.versions import announce, check_version, unavailable
from logitless.models import fuse_layers, patch_model

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, Field, model_validator
except ImportError as error:
    raise unavailable("axolotl", error) from error

# axolotl shows the INFO lines of loggers with its own name alone.
LOGGER = logging.getLogger("axolotl.logitless")
# Keys of axolotl with which the loss is computed elsewhere, or from logits.
EXCLUDED = (
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "flash_attn_cross_entropy",
    "unsloth_cross_entropy_loss",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "use_dft",
    "use_eaft",
    "orpo_alpha",
    "kd_trainer",
)
LIGER_LAYERS = (
    "liger_rope",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_layer_norm",
    "liger_swiglu",
    "liger_glu_activation",
)
PARALLEL = ("context_parallel_size", "sequence_parallel_degree")


class LogitlessArgs(BaseModel):
    """Keys of the plugin in an axolotl config."""

    logitless: bool | None = Field(
        default=True, description="Compute the loss of labelled calls without full logits."
    )
    logitless_budget: int | None = Field(
        default=None, description="Bytes that a chunk of logits and its temporaries may take."
    )
    logitless_fused_layers: bool | None = Field(
        default=False, description="Fuse norms, rotary embeddings and gates."
    )

    @model_validator(mode="before")
    @classmethod
    def check_logitless(cls, data: Any) -> Any:
        """Refuse the keys of axolotl that exclude the plugin."""
        if data.get("logitless", True):
            for key in EXCLUDED:
                if data.get(key):
                    remedy = f"leave {key} out, or set logitless: false"
                    raise value_error(key, "unset if logitless is enabled", data[key], remedy)
            for key in PARALLEL:
                if (data.get(key) or 1) > 1:
                    remedy = "axolotl gathers logits there; set logitless: false"
                    raise value_error(key, "1 if logitless is enabled", data[key], remedy)
        if data.get("logitless_fused_layers"):
            for key in LIGER_LAYERS:
                if data.get(key):
                    remedy = f"leave {key} out, as both replace the same layers"
                    raise value_error(key, "unset if logitless_fused_layers is enabled", data[key], remedy)
        return data


class LogitlessPlugin(BasePlugin):
    """Plugin for `plugins:` in an axolotl config."""

    def get_input_args(self) -> str:
        return "logitless.integrations.axolotl.LogitlessArgs"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Patch the model, and fuse its layers if the config says so."""
        check_version("axolotl")
        if cfg.logitless is not False and cfg.rl:
            expected = "unset if logitless is enabled, as the trainer computes another loss"
            warn(message("rl", expected, cfg.rl, "set logitless: false"), UserWarning)
        elif cfg.logitless is not False:
            patch_model(model, logits_budget=cfg.logitless_budget)
            announce("axolotl", "loss of labelled calls", cfg.logitless_budget, logger=LOGGER)
        if cfg.logitless_fused_layers:
            fuse_layers(model)
