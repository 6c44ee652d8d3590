"""Base class of the policy losses of reinforcement learning (GRPO, RLOO, REINFORCE).

Sequences are padded (B, T), or packed with `cu_seqlens`. A token is supervised if its target is not
`ignore_index` and its `mask` is not 0. Advantages have one entry per sequence or, except in `RLOOLoss`, per
token.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

from torch import Tensor

from logitless.engine.layout import SequenceLayout
from logitless.errors import type_error, value_error
from logitless.losses.arguments import CallArguments
from logitless.losses.base import LossOutput, TokenLoss
from logitless.losses.inputs import HeadWeight, PolicyInputs
from logitless.losses.numerics import LARGEST
from logitless.losses.sampler_correction import SamplerCorrection, Sequences, log_weights


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(TokenLoss):
    """Base class of losses with advantages.

    `laid_out` computes the declared inputs from the call's arguments.

    Args:
        sampler_correction: the factor of the surrogate for the difference between the old policy and the
            sampler, or a tuple of factors, which are multiplied.
    """

    sampler_correction: SamplerCorrection | tuple[SamplerCorrection, ...] | None = None

    token_inputs: ClassVar = ("advantages",)
    observes: ClassVar = ("entropy",)
    context_parallel: ClassVar = True
    sampled_logps: ClassVar = ("old_logps", "sampling_logps")

    def __post_init__(self) -> None:
        if not all(isinstance(x, SamplerCorrection) for x in self.corrections):
            raise type_error(
                "sampler_correction",
                "a SamplerCorrection, a tuple of them, or None",
                repr(self.sampler_correction),
                "TIS is SamplerCorrection(high=2.0), IcePop SamplerCorrection(action='mask', low=0.5, "
                "high=5.0)",
            )
        super().__post_init__()

    @property
    def corrections(self) -> tuple[SamplerCorrection, ...]:
        given = self.sampler_correction
        return () if given is None else given if isinstance(given, tuple) else (given,)

    @property
    def corrects_sequences(self) -> bool:
        """Whether a factor depends on all tokens of a sequence."""
        return any(correction.level != "token" for correction in self.corrections)

    def sampler_weights(self, old_logps: Tensor, sampling_logps: Tensor, sequences: Sequences) -> Tensor:
        """The product of the factors of `sampler_correction`, without gradient."""
        weights = log_weights(old_logps, sampling_logps)
        return math.prod([x.factor(weights, sequences) for x in self.corrections])

    def check_sampling(self, sampling_logps: Tensor | None) -> None:
        """Raise ValueError unless `sampling_logps` are passed if and only if there is a correction."""
        if self.sampler_correction is not None and sampling_logps is None:
            raise value_error(
                "sampling_logps",
                "the sampler's log-probabilities, for sampler_correction",
                None,
                "pass them, or leave sampler_correction out",
            )
        if self.sampler_correction is None and sampling_logps is not None:
            remedy = "set sampler_correction, or leave sampling_logps out"
            raise value_error(
                "sampling_logps", "None without sampler_correction", tuple(sampling_logps.shape), remedy
            )

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        **arguments: Unpack[PolicyInputs],
    ) -> LossOutput:
        return super().__call__(hidden, weight, targets, **arguments)

    def laid_out(
        self, layout: SequenceLayout, advantages: Tensor, **given: Tensor | None
    ) -> dict[str, Tensor | None]:
        """Compute the declared inputs from the advantages and the other keyword arguments of the loss."""
        raise NotImplementedError

    def prepare(self, call: CallArguments) -> None:
        super().prepare(call)
        inputs = {name: x for name, x in call.inputs.items() if x is not None}
        if "advantages" not in inputs:
            raise type_error("advantages", "a tensor", None, "pass one per sequence or per token")
        layout = call.layout()
        call.inputs = self.laid_out(layout, **inputs)
        # The layout has shifted the targets and the inputs per token.
        call.targets = layout.targets
        call.shift = False


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """Base class of policy losses that clip the ratio r = p(policy) / p(old policy) to [1 - epsilon, 1 +
    epsilon_high].

    Args:
        epsilon: clip range below 1. None: 0.2.
        epsilon_low: another name of `epsilon`.
        epsilon_high: clip range above 1. None: `epsilon`.
    """

    epsilon: float | None = None
    epsilon_low: float | None = None
    epsilon_high: float | None = None

    def __post_init__(self) -> None:
        clip_ranges = [x for x in (self.epsilon, self.epsilon_low) if x is not None]
        if len(set(clip_ranges)) >= 2:
            raise value_error(
                "epsilon_low",
                "the value of epsilon, or None",
                f"{self.epsilon_low} with epsilon={self.epsilon}",
                "both are names of the lower clip range",
            )
        object.__setattr__(self, "epsilon", clip_ranges[0] if clip_ranges else 0.2)
        super().__post_init__()
        if self.epsilon < 0:
            raise value_error("epsilon", "a number >= 0", self.epsilon, "TRL's default is 0.2")
        if self.upper < 0:
            raise value_error(
                "epsilon_high", "a number >= 0 or None", self.epsilon_high, "set it to None to use epsilon"
            )

    @property
    def upper(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def check_old_kl(coef: float) -> None:
    if coef < 0:
        raise value_error("old_kl_coef", "a number >= 0", coef, "use 0.0 for none")


def require_old_logps(old_logps: Tensor | None) -> None:
    """Raise ValueError without `old_logps`, for a penalty on the log-ratio to the old policy."""
    if old_logps is None:
        remedy = "pass them; without them the penalty and its gradient are 0"
        raise value_error("old_logps", "log-probabilities, for old_kl_coef", None, remedy)


def old_kl(coef: float, log_ratio: Tensor) -> Tensor:
    """coef * l^2 / 2, with l clamped to +-80."""
    return (coef / 2) * log_ratio.clamp(-LARGEST, LARGEST).square()
