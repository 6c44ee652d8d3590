"""Arithmetic that several losses share."""

from torch import Tensor
from torch.nn.functional import logsigmoid

# Bound of log-ratios before exp. exp of a log-ratio above about 88 is infinite in fp32, and its gradient may
# be NaN.
LARGEST = 80.0


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), with x clamped to +-80."""
    return x.clamp(-LARGEST, LARGEST).exp()


def sigmoid(x: Tensor) -> Tensor:
    """sigma(x), with the gradient sigma(x) * sigma(-x), which is accurate even if sigma(x) rounds to 1."""
    return logsigmoid(x).exp()
