"""`SamplerCorrection`: the factor for the difference between the old policy and the sampler."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from logitless.errors import check_choice, check_number, type_error, value_error
from logitless.losses.framework_names import REMEDIES
from logitless.losses.numerics import bounded_exp

# Replaces an infinite log-ratio, so that a sum over a sequence is not NaN. Its exponential is clamped.
LARGEST_LOG_RATIO = 1e4


class Sequences(Protocol):
    """The sequences of per-token values; `Batch` is one."""

    @property
    def lengths(self) -> Tensor:
        """(sequences,) number of tokens."""

    def sum_by_sequence(self, x: Tensor) -> Tensor:
        """Per token -> per sequence."""

    def spread(self, x: Tensor) -> Tensor:
        """Per sequence -> per token."""


class SequenceSums(NamedTuple):
    """Sequences whose factors stay per sequence, for losses with one ratio per sequence."""

    sum_by_sequence: Callable[[Tensor], Tensor]
    lengths: Tensor

    def spread(self, x: Tensor) -> Tensor:
        return x


class PaddedSequences(NamedTuple):
    """Sequences in the rows of (B, T)."""

    mask: Tensor  # (B, T) bool

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(-1)

    def sum_by_sequence(self, x: Tensor) -> Tensor:
        return x.masked_fill(~self.mask, 0.0).sum(-1)

    def spread(self, x: Tensor) -> Tensor:
        return x[:, None].expand(self.mask.shape)


def log_weights(old_logps: Tensor, sampling_logps: Tensor) -> Tensor:
    """log p(old policy) / p(sampler); 0 if it is NaN, and finite."""
    weights = old_logps.detach() - sampling_logps
    return weights.nan_to_num(nan=0.0, posinf=LARGEST_LOG_RATIO, neginf=-LARGEST_LOG_RATIO)


# (values per token, sequences) -> values at this level
LEVELS: Mapping[str, Callable[[Tensor, Sequences], Tensor]] = {
    "token": lambda x, sequences: x,
    "sequence": lambda x, sequences: sequences.spread(sequences.sum_by_sequence(x)),
    "geometric": lambda x, sequences: sequences.spread(
        sequences.sum_by_sequence(x) / sequences.lengths.clamp(min=1)
    ),
}
# Functions of log w per token.
MEASURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ratio": lambda x: x,
    "k2": lambda x: x.square() / 2,
    "k3": lambda x: torch.expm1(x) - x,
}
# (correction, log w at the level, whether the measure is within the bounds) -> factor
ACTIONS: Mapping[str, Callable[["SamplerCorrection", Tensor, Tensor], Tensor]] = {
    "truncate": lambda correction, x, inside: correction.truncated(bounded_exp(x)),
    "mask": lambda correction, x, inside: bounded_exp(x) * inside,
    "reject": lambda correction, x, inside: inside.to(x.dtype),
}


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """The factor of a policy's surrogate for the difference between the old policy and the sampler.

    w = p(old policy) / p(sampler), from `old_logps` and `sampling_logps` of the call. Without `old_logps`,
    the old policy is the policy itself, without gradient. The factor has no gradient. It multiplies the
    surrogate alone, and not the KL, the penalty on the log-ratio or the entropy bonus. Rejected tokens count
    in the mean.

    Args:
        level: "token": one factor per token. "sequence": w is the product of the ratios of a sequence.
            "geometric": w is their geometric mean.
        action: "truncate": w clamped to [low, high] (TIS). "mask": w, and 0 if w is outside (IcePop).
            "reject": 1, and 0 if w is outside.
        low: lower bound of w. None: no bound.
        high: upper bound of w. None: no bound.
        measure: what the bounds of "reject" hold for. "ratio": w. "k2": (log w)^2 / 2, and "k3": w - 1 - log
            w, per token, and summed or averaged over the sequence according to `level`; they have `high`
            alone.

    If the sampler's log-probability is NaN, log w is 0. Infinite log-ratios are clamped.

    References: Yao et al. (TIS), 2025, https://fengyao.notion.site/off-policy-rl; IcePop, 2025,
    https://ringtech.notion.site/icepop.

    Examples:
        >>> icepop = SamplerCorrection(action="mask", low=0.5, high=5.0)
        >>> old_logps, sampling_logps = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -4.0]])
        >>> icepop.weights(old_logps, sampling_logps)
        tensor([[1., 0.]])
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    action: Literal["truncate", "mask", "reject"] = "truncate"
    low: float | None = None
    high: float | None = None
    measure: Literal["ratio", "k2", "k3"] = "ratio"

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS, REMEDIES["level"])
        check_choice("action", self.action, ACTIONS, REMEDIES["action"])
        check_choice("measure", self.measure, MEASURES, REMEDIES["measure"])
        low, high = self.low, self.high
        for name, bound in (("low", low), ("high", high)):
            if bound is None:
                continue
            check_number(name, bound, "a finite number or None")
            if bound <= 0:
                raise value_error(name, "a positive number or None", bound, "use None for no bound")
        if low is not None and high is not None and low > high:
            raise value_error("low", f"at most high={high}", low, "exchange the bounds")
        if self.measure != "ratio":
            if self.action != "reject":
                raise value_error(
                    "measure",
                    f"'ratio' for action={self.action!r}",
                    repr(self.measure),
                    "'k2' and 'k3' are bounds of action='reject'",
                )
            if low is not None:
                raise value_error("low", f"None for measure={self.measure!r}", low, "pass high alone")
        if self.action != "truncate" and low is None and high is None:
            remedy = "pass low, high or both"
            raise value_error("high", f"a bound for action={self.action!r}", None, remedy)

    def weights(self, old_logps: Tensor, sampling_logps: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the factor as (B, T), for a log, for `importance_weights`, or for a mask of rejected tokens.

        Args:
            old_logps: (B, T), log-probabilities under the old policy.
            sampling_logps: (B, T), log-probabilities that the sampler returned.
            mask: (B, T), the tokens that count. Other tokens are not read; their factor is that of log w = 0,
                or of their sequence.
        """
        for name, x in (("old_logps", old_logps), ("sampling_logps", sampling_logps), ("mask", mask)):
            if x is None and name == "mask":
                continue
            if not isinstance(x, Tensor):
                raise type_error(name, "a tensor (B, T)", type(x).__name__, "pass a tensor")
            if x.dim() != 2 or x.shape != old_logps.shape:
                expected = "shape (B, T)" if name == "old_logps" else f"shape {tuple(old_logps.shape)}"
                raise value_error(name, expected, tuple(x.shape), "pass padded sequences")
        mask = torch.ones_like(old_logps, dtype=torch.bool) if mask is None else mask.bool()
        weights = torch.where(mask, log_weights(old_logps, sampling_logps), 0.0)
        return self.factor(weights, PaddedSequences(mask))

    def factor(self, log_weights: Tensor, sequences: Sequences) -> Tensor:
        """The factor, from log w per token."""
        to_level = LEVELS[self.level]
        x = to_level(log_weights, sequences)
        measured = x if self.measure == "ratio" else to_level(MEASURES[self.measure](log_weights), sequences)
        return ACTIONS[self.action](self, x, self._inside(measured))

    def truncated(self, w: Tensor) -> Tensor:
        bounded = self.low is not None or self.high is not None
        return w.clamp(self.low, self.high) if bounded else w

    def _inside(self, measured: Tensor) -> Tensor:
        """Whether the measure is within the bounds; ratios are compared by their logarithms."""
        scale = math.log if self.measure == "ratio" else float
        inside = torch.ones_like(measured, dtype=torch.bool)
        if self.low is not None:
            inside = inside & (measured >= scale(self.low))
        if self.high is not None:
            inside = inside & (measured <= scale(self.high))
        return inside
