"""Functions for Hugging Face models: loss without logits, and the LM head.

`patch`, with `logits` and `probes`, makes a call with labels compute its loss without logits. `heads`,
`views` and `peft_heads` read the LM head. The package re-exports `fuse_layers` of `logitless.layers` and
`fit_activations` of `logitless.activations`. Users and trainers call it. It imports transformers only, and
PEFT for a head with adapters.
"""

import importlib
from typing import Any

_MODULES = {
    "HeadView": "logitless.engine.head_view",
    "Patch": "logitless.models.patch",
    "check_trainer_arguments": "logitless.models.patch",
    "fit_activations": "logitless.activations.fit",
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
