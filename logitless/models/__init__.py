"""Changes to a Hugging Face model: loss without logits, LM head for our losses, fused layers, activations.

`patch`, with `logits` and `probes`, makes a call with labels compute its loss without logits; `heads`,
`views` and `peft_heads` read the LM head. `fuse_layers` is that of `logitless.layers`. `activations` keeps
what decoder layers save within a budget: `activation_plan` chooses the level of each layer, `saved_tensors`
runs a layer at its level. Called by users and trainers. Imports transformers only, and PEFT for a head with
adapters.
"""

import importlib
from typing import Any

_HOMES = {
    "HeadView": "logitless.engine.head_view",
    "Patch": "logitless.models.patch",
    "check_trainer_arguments": "logitless.models.patch",
    "fit_activations": "logitless.models.activations",
    "fuse_layers": "logitless.layers.fuse",
    "head_of": "logitless.models.views",
    "patch_model": "logitless.models.patch",
}
__all__ = [
    "HeadView",
    "Patch",
    "check_trainer_arguments",
    "fit_activations",
    "fuse_layers",
    "head_of",
    "patch_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
