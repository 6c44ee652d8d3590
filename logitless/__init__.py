"""Post-training losses straight from hidden states and the LM head: the logits never exist."""

from logitless import losses
from logitless._version import __version__
from logitless.checking import CheckReport, check
from logitless.estimating import Estimate, estimate
from logitless.losses import *  # noqa: F403

__all__ = [*losses.__all__, "CheckReport", "Estimate", "__version__", "check", "estimate"]
