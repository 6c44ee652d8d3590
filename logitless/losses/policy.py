"""Base class of the policy losses of reinforcement learning (GRPO, RLOO, REINFORCE).

Sequences are padded (B, T), or packed with `cu_seqlens`. A token is supervised if its target is not
`ignore_index` and its `mask` is not 0. Advantages have one entry per sequence or, except in `RLOOLoss`, per
token.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from logitless.engine.layout import SequenceLayout
from logitless.errors import type_error, value_error
from logitless.losses.arguments import CallArguments
from logitless.losses.base import TokenLoss


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(TokenLoss):
    """Base class of losses with advantages.

    `laid_out` computes the declared inputs from the call's arguments.
    """

    token_inputs: ClassVar = ("advantages",)
    observes: ClassVar = ("entropy",)
    context_parallel: ClassVar = True
    sampled_logps: ClassVar = ("old_logps", "sampling_logps")

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
