"""Arithmetic that several losses share."""

from torch import Tensor

# exp() of a log-ratio beyond this is infinite in fp32, and its gradient not a number.
LARGEST = 80.0


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x), with x clamped to +-80."""
    return x.clamp(-LARGEST, LARGEST).exp()
