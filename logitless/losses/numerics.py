"""Arithmetic that several losses share."""

from torch import Tensor
from torch.nn.functional import logsigmoid

# exp() of a log-ratio beyond this is infinite in fp32, and its gradient not a number.
LARGEST = 80.0


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), with x clamped to +-80."""
    return x.clamp(-LARGEST, LARGEST).exp()


def sigmoid(x: Tensor) -> Tensor:
    """sigma(x), whose gradient sigma(x) * sigma(-x) keeps its digits where sigma(x) rounds to 1."""
    return logsigmoid(x).exp()
