"""The surrogates of `GRPOLoss` by TRL's names, as functions of the ratio and the advantage of a token."""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

GRPOType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


class GRPOOptions(Protocol):
    """The fields of `GRPOLoss` that the functions in this file use."""

    epsilon: float
    upper: float
    delta: float | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float


def by_sign(is_positive: Tensor, positive: float, negative: float) -> Tensor:
    """`positive` if `is_positive` is 1 and `negative` if it is 0, element by element."""
    return negative + (positive - negative) * is_positive


# Each surrogate takes (loss, ratio, advantages, logps, phi), and returns its values and the flags for its
# metrics.


def clipped(loss: GRPOOptions, ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
    bounded = ratio.clamp(1 - loss.epsilon, 1 + loss.upper)
    if loss.delta is not None:
        ratio = ratio.clamp(max=loss.delta)
    low = ((ratio < 1 - loss.epsilon) & (advantages < 0)).to(ratio.dtype)
    high = ((ratio > 1 + loss.upper) & (advantages > 0)).to(ratio.dtype)
    flags = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    return -torch.minimum(ratio * advantages, bounded * advantages), flags


def cispo(loss: GRPOOptions, ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
    high = ((ratio > loss.upper) & (advantages > 0)).to(ratio.dtype)
    return -ratio.detach().clamp(max=loss.upper) * advantages * logps, {"cispo_clip_ratio": high}


def sapo(loss: GRPOOptions, ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
    is_positive = (advantages > 0).to(logps.dtype)
    tau = by_sign(is_positive, loss.sapo_temperature_pos, loss.sapo_temperature_neg)
    return -4 / tau * (tau * (ratio - 1)).sigmoid() * advantages, {}


def vespo(loss: GRPOOptions, ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
    return -phi * advantages * logps, {"vespo/phi_seq_mean": phi}


SURROGATES: Mapping[str, Callable] = {
    "grpo": clipped,
    "bnpo": clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "luspo": clipped,
    "vespo": vespo,
}
# Remedies for names that are not loss types.
OTHER_NAMES = {
    "gspo": "GSPO is importance_sampling_level='sequence' with loss_type='grpo'",
    "ppo": "take PPOLoss",
    "rloo": "take RLOOLoss",
    "reinforce": "take REINFORCELoss",
}
FLAGS = {
    clipped: ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    cispo: ("cispo_clip_ratio",),
    sapo: (),
    vespo: ("vespo/phi_seq_mean",),
}
# Loss types that average over sequences; the other types average over tokens.
PER_SEQUENCE = ("grpo", "sapo", "luspo", "dr_grpo")
# Values of `importance_sampling_level`.
LEVELS = ("token", "sequence")
