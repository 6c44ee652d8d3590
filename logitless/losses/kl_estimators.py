"""Estimators of the KL to a reference model, from the log-probabilities of the sampled tokens."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from logitless.losses.numerics import LARGEST

KLEstimator = Literal["k3", "k1", "k2", "abs", "k3+", "k1+", "k2+", "abs+"]


def k3(d: Tensor) -> Tensor:
    d = d.clamp(max=LARGEST)
    return torch.expm1(d) - d


# Functions of d = ref_logp - logp.
ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k3": k3,
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "abs": torch.abs,
}
# With "+", the value of the estimator and the gradient of k2.
NAMES = (*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS))


def estimated_kl(name: str, d: Tensor, largest: float | None) -> Tensor:
    """(n,) the estimate of the KL, clamped to +-largest.

    The gradient of a clamped estimate is 0; with "+" it is that of k2, clamped or not.
    """
    kl = ESTIMATORS[name.removesuffix("+")](d)
    kl = kl if largest is None else kl.clamp(-largest, largest)
    if not name.endswith("+"):
        return kl
    # The value of the second summand is 0.
    return kl.detach() + d.detach() * (d - d.detach())
