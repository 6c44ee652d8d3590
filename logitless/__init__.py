"""Post-training losses computed from hidden states and the LM head without building the full logits."""

import importlib
from typing import TYPE_CHECKING

from logitless import losses
from logitless._version import __version__
from logitless.losses import *  # noqa: F403
from logitless.losses.given_logits import cross_entropy

if TYPE_CHECKING:
    from logitless.tools.check import CheckReport, check
    from logitless.tools.estimate import Estimate, estimate

__all__ = ["CheckReport", "Estimate", "__version__", "check", "cross_entropy", "estimate"]
__all__ += losses.__all__  # a form that type checkers know

# Names that training does not need are imported on first use.
_LATER = {
    "CheckReport": "tools.check",
    "check": "tools.check",
    "Estimate": "tools.estimate",
    "estimate": "tools.estimate",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'logitless' has no attribute {name!r}")
    return getattr(importlib.import_module(f"logitless.{_LATER[name]}"), name)
