"""axolotl 0.21.0: a plugin with which the model's labelled calls compute their loss without full logits.

    plugins:
      - logitless.integrations.axolotl.LogitlessPlugin
    logitless_budget: 2684354560

The plugin calls `logitless.models.patch_model` on the loaded model, after the adapters, and with
`logitless_fused_layers: true` also `fuse_layers`. Trainers of `rl:` keep their own losses.
"""

import logging
from difflib import get_close_matches
from typing import Any

from torch import nn

from logitless.errors import message, value_error, warn
from logitless.integrations.versions import check_version, log_replacement, unavailable_error
from logitless.models import fuse_layers, patch_model

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, Field, model_validator
except ImportError as error:
    raise unavailable_error("axolotl", error) from error

# axolotl shows INFO lines only of loggers whose names begin with "axolotl".
LOGGER = logging.getLogger("axolotl.logitless")
# Keys of axolotl with which another code computes the loss, or one that needs logits
INCOMPATIBLE_KEYS = (
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
LIGER_LAYER_KEYS = (
    "liger_rope",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_layer_norm",
    "liger_swiglu",
    "liger_glu_activation",
)
PARALLEL_SIZE_KEYS = ("context_parallel_size", "sequence_parallel_degree")


class LogitlessArgs(BaseModel):
    """Keys of the plugin in an axolotl config."""

    logitless: bool | None = Field(
        default=True, description="Compute the loss of labelled calls without full logits."
    )
    logitless_budget: int | str | None = Field(
        default=None, description="Bytes that a chunk of logits and its temporaries may take."
    )
    logitless_fused_layers: bool | None = Field(
        default=False, description="Fuse norms, rotary embeddings and gates."
    )

    @model_validator(mode="before")
    @classmethod
    def check_logitless(cls, data: Any) -> Any:
        """Raise ValueError for a misspelt key of the plugin, or a key of axolotl that it does not support."""
        names = list(LogitlessArgs.model_fields)
        for key in data:
            # axolotl ignores keys that it does not know.
            similar = get_close_matches(key, names, 1, 0.85)
            if key not in names and (similar or key.startswith("logitless")):
                expected = f"a key of the plugin ({', '.join(names)})"
                remedy = f"write {similar[0]}" if similar else "pick one of these"
                raise value_error("config", expected, key, remedy)
        if data.get("logitless", True):
            for key in INCOMPATIBLE_KEYS:
                if data.get(key):
                    remedy = f"leave {key} out, or set logitless: false"
                    raise value_error(key, "unset if logitless is enabled", data[key], remedy)
            for key in PARALLEL_SIZE_KEYS:
                if (data.get(key) or 1) > 1:
                    remedy = "axolotl gathers logits there; set logitless: false"
                    raise value_error(key, "1 if logitless is enabled", data[key], remedy)
        if data.get("logitless_fused_layers"):
            for key in LIGER_LAYER_KEYS:
                if data.get(key):
                    remedy = f"leave {key} out, as both replace the same layers"
                    raise value_error(key, "unset if logitless_fused_layers is enabled", data[key], remedy)
        return data


class LogitlessPlugin(BasePlugin):
    """Plugin for `plugins:` in an axolotl config."""

    def get_input_args(self) -> str:
        return "logitless.integrations.axolotl.LogitlessArgs"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Patch the model, and fuse its layers with `logitless_fused_layers`."""
        check_version("axolotl")
        if cfg.logitless is not False and cfg.rl:
            expected = "unset if logitless is enabled, because its trainers keep their own losses"
            warn(message("rl", expected, cfg.rl, "set logitless: false"), UserWarning)
        elif cfg.logitless is not False:
            patch_model(model, logits_budget=cfg.logitless_budget)
            log_replacement("axolotl", "loss of labelled calls", cfg.logitless_budget, logger=LOGGER)
        if cfg.logitless_fused_layers:
            fuse_layers(model)
