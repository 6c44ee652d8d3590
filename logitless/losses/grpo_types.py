"""The surrogates, trust regions, levels and means of `GRPOLoss`: dictionaries from names to functions."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.layout import SequenceLayout
from logitless.losses.numerics import LARGEST, bounded_exp

GRPOType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo"]
TrustRegion = Literal["clip", "binary_tv", "binary_kl", "absolute_tv"] | None
Level = Literal["token", "sequence", "sequence_token"]
AggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

# Bounds that VESPO applies to the log of a sequence's weight.
SMALLEST_LOG_WEIGHT = math.log(1e-8)
LARGEST_LOG_WEIGHT = 20.0
# Upper bound of log p in log(1 - p), so that p = 1 is finite.
LARGEST_LOGP = -1e-12


class GRPOOptions(Protocol):
    """The fields of `GRPOLoss` that the functions in this file use."""

    epsilon: float
    upper: float
    delta: float | None
    trust_region: TrustRegion
    cispo_min: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float


class PolicyRatios(NamedTuple):
    """What a surrogate is computed from, per token; in `RLOOLoss` per sequence."""

    logps: Tensor  # (n,) of the policy
    old_logps: Tensor  # (n,) of the old policy, without gradient
    advantages: Tensor  # (n,)
    token_log_ratio: Tensor  # (n,) logps - old_logps
    log_ratio: Tensor  # (n,) the log-ratio at the level of the loss
    ratio: Tensor  # (n,) exp(log_ratio), with log_ratio clamped to +-80
    batch: Batch


# (values of the surrogate, flags for the metrics by name)
Values = tuple[Tensor, dict[str, Tensor]]
Surrogate = Callable[[GRPOOptions, PolicyRatios], Values]


def by_sign(is_positive: Tensor, positive: float, negative: float) -> Tensor:
    """`positive` if `is_positive` is 1 and `negative` if it is 0, element by element."""
    return negative + (positive - negative) * is_positive


def clip_flags(low: Tensor, high: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    low, high = low.to(dtype), high.to(dtype)
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}


# Levels: (log-ratio of the tokens, logps, batch) -> the log-ratio from which the surrogate is computed.


def per_token(log_ratio: Tensor, logps: Tensor, batch: Batch) -> Tensor:
    return log_ratio


def per_sequence(log_ratio: Tensor, logps: Tensor, batch: Batch) -> Tensor:
    """GSPO: the mean over the tokens of the sequence, with the gradient of all of them."""
    return batch.spread(batch.sum_by_sequence(log_ratio) / batch.lengths.clamp(min=1))


def per_sequence_token(log_ratio: Tensor, logps: Tensor, batch: Batch) -> Tensor:
    """GSPO-token: the value of `per_sequence`, with the gradient of the token's own log-probability."""
    return per_sequence(log_ratio.detach(), logps, batch) + (logps - logps.detach())


LEVELS: Mapping[str, Callable[[Tensor, Tensor, Batch], Tensor]] = {
    "token": per_token,
    "sequence": per_sequence,
    "sequence_token": per_sequence_token,
}


# Regions that drop tokens: (options, ratios) -> (dropped below, dropped above), both bool.


def probability_difference(x: PolicyRatios) -> Tensor:
    """p - q without cancellation: sign(l) max(p, q) (1 - exp(-|l|)) with l = log p/q."""
    log_ratio = x.token_log_ratio.detach()
    larger = torch.maximum(x.logps.detach(), x.old_logps).exp()
    return -log_ratio.sign() * larger * torch.expm1(-log_ratio.abs())


def binary_tv(options: GRPOOptions, x: PolicyRatios) -> tuple[Tensor, Tensor]:
    difference = probability_difference(x)
    raised = x.advantages > 0
    return ~raised & (difference < -options.epsilon), raised & (difference > options.upper)


def absolute_tv(options: GRPOOptions, x: PolicyRatios) -> tuple[Tensor, Tensor]:
    difference = probability_difference(x)
    return difference < -options.epsilon, difference > options.upper


def binary_kl(options: GRPOOptions, x: PolicyRatios) -> tuple[Tensor, Tensor]:
    log_p, log_q = x.logps.detach().clamp(max=LARGEST_LOGP), x.old_logps.clamp(max=LARGEST_LOGP)
    log_ratio = (log_p - log_q).clamp(-LARGEST, LARGEST)
    # 1 - q is -expm1(log q).
    others = -torch.expm1(log_q)
    kl = others * (others.log() - torch.log(-torch.expm1(log_p))) - log_q.exp() * log_ratio
    raised = x.advantages > 0
    return (
        ~raised & (log_ratio < 0) & (kl > options.epsilon),
        raised & (log_ratio > 0) & (kl > options.upper),
    )


def whole_space(options: GRPOOptions, x: PolicyRatios) -> tuple[Tensor, Tensor]:
    nothing = torch.zeros_like(x.ratio, dtype=torch.bool)
    return nothing, nothing


def inside(region: Callable[[GRPOOptions, PolicyRatios], tuple[Tensor, Tensor]]) -> Surrogate:
    """The surrogate -min(r, delta) A of the tokens that the region keeps, 0 for all others.

    Its gradient is -min(r, delta) A d log r: `delta` truncates the weight, and does not stop the gradient.
    """

    def surrogate(options: GRPOOptions, x: PolicyRatios) -> Values:
        low, high = region(options, x)
        weight = x.ratio.detach()
        weight = weight if options.delta is None else weight.clamp(max=options.delta)
        log_ratio = x.log_ratio.clamp(-LARGEST, LARGEST)
        # The value of the last factor is 1.
        values = -weight * x.advantages * (1 + (log_ratio - log_ratio.detach()))
        return values.masked_fill(low | high, 0.0), clip_flags(low, high, weight.dtype)

    return surrogate


def clip(options: GRPOOptions, x: PolicyRatios) -> Values:
    ratio, advantages = x.ratio, x.advantages
    bounded = ratio.clamp(1 - options.epsilon, 1 + options.upper)
    if options.delta is not None:
        ratio = ratio.clamp(max=options.delta)
    low = (ratio < 1 - options.epsilon) & (advantages < 0)
    high = (ratio > 1 + options.upper) & (advantages > 0)
    return -torch.minimum(ratio * advantages, bounded * advantages), clip_flags(low, high, ratio.dtype)


TRUST_REGIONS: Mapping[str | None, Surrogate] = {
    "clip": clip,
    "binary_tv": inside(binary_tv),
    "binary_kl": inside(binary_kl),
    "absolute_tv": inside(absolute_tv),
    None: inside(whole_space),
}
# Regions of probabilities. They need a ratio per token.
OF_PROBABILITIES = ("binary_tv", "binary_kl", "absolute_tv")


# Surrogates of the loss types.


def bounded(options: GRPOOptions, x: PolicyRatios) -> Values:
    return TRUST_REGIONS[options.trust_region](options, x)


def cispo(options: GRPOOptions, x: PolicyRatios) -> Values:
    high = ((x.ratio > options.upper) & (x.advantages > 0)).to(x.ratio.dtype)
    weight = x.ratio.detach().clamp(options.cispo_min, options.upper)
    return -weight * x.advantages * x.logps, {"cispo_clip_ratio": high}


def sapo(options: GRPOOptions, x: PolicyRatios) -> Values:
    is_positive = (x.advantages > 0).to(x.logps.dtype)
    tau = by_sign(is_positive, options.sapo_temperature_pos, options.sapo_temperature_neg)
    return -4 / tau * (tau * (x.ratio - 1)).sigmoid() * x.advantages, {}


def vespo(options: GRPOOptions, x: PolicyRatios) -> Values:
    """-phi A logp with phi = w^k exp(lambda (1 - w)), w the product of the ratios of the sequence."""
    batch = x.batch
    log_ratio = x.token_log_ratio.detach().clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
    log_w = batch.sum_by_sequence(log_ratio)
    if batch.log_importance is not None:
        log_w = log_w + batch.sum_by_sequence(batch.log_importance)
    log_w = batch.spread(log_w.clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT))
    positive = (x.advantages >= 0).to(log_w.dtype)
    k = by_sign(positive, options.vespo_k_pos, options.vespo_k_neg)
    decay = by_sign(positive, max(options.vespo_lambda_pos, 1e-4), max(options.vespo_lambda_neg, 1e-4))
    phi = (k * log_w - decay * log_w.expm1()).exp()
    return -phi * x.advantages * x.logps, {"vespo/phi_seq_mean": phi}


def gmpo(options: GRPOOptions, x: PolicyRatios) -> Values:
    """-A exp(mean of c), c the log-ratio of a token, clipped on the side to which A pushes it."""
    batch, log_ratio = x.batch, x.token_log_ratio
    low, high = log_ratio < -options.epsilon, log_ratio > options.upper
    raised = x.advantages > 0
    clipped = torch.where(raised, log_ratio.clamp(max=options.upper), log_ratio.clamp(min=-options.epsilon))
    mean = batch.sum_by_sequence(clipped) / batch.lengths.clamp(min=1)
    values = -x.advantages * batch.spread(bounded_exp(mean))
    return values, clip_flags(low & (x.advantages < 0), high & raised, values.dtype)


class PolicyType(NamedTuple):
    """A `loss_type` of `GRPOLoss`."""

    surrogate: Surrogate
    agg_mode: str  # the mean, if `loss_agg_mode` is None
    metric_names: tuple[str, ...] = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")


TYPES: Mapping[str, PolicyType] = {
    "grpo": PolicyType(bounded, "seq-mean-token-mean"),
    "bnpo": PolicyType(bounded, "token-mean"),
    "dr_grpo": PolicyType(bounded, "seq-mean-token-sum-norm"),
    "dapo": PolicyType(bounded, "token-mean"),
    "cispo": PolicyType(cispo, "token-mean", ("cispo_clip_ratio",)),
    "sapo": PolicyType(sapo, "seq-mean-token-mean", ()),
    "luspo": PolicyType(bounded, "seq-mean-token-sum"),
    "vespo": PolicyType(vespo, "token-mean", ("vespo/phi_seq_mean",)),
    "gmpo": PolicyType(gmpo, "seq-mean-token-mean"),
}


class Aggregation(NamedTuple):
    """A mean over tokens, or over sequences of weighted sums of their tokens."""

    unit: str
    # (layout, max_completion_length) -> (B,) the weight of the tokens of each sequence; None: 1
    weights: Callable[[SequenceLayout, int | None], Tensor] | None = None


AGG_MODES: Mapping[str, Aggregation] = {
    "token-mean": Aggregation("tokens"),
    "seq-mean-token-mean": Aggregation("sequences", lambda layout, length: layout.shares),
    "seq-mean-token-sum": Aggregation("sequences"),
    "seq-mean-token-sum-norm": Aggregation(
        "sequences", lambda layout, length: torch.full_like(layout.lengths, 1 / length)
    ),
}
