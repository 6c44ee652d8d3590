"""Policy gradients without a learned baseline: REINFORCE, and REINFORCE leave-one-out (RLOO)."""

from dataclasses import dataclass
from typing import ClassVar, Unpack

from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.layout import SequenceLayout, per_token_shape
from logitless.engine.sampling_mask import SamplingMask
from logitless.engine.terms import Term
from logitless.errors import value_error
from logitless.losses.base import LossOutput
from logitless.losses.grpo_types import FLAGS, clipped
from logitless.losses.inputs import CallInputs, HeadWeight
from logitless.losses.numerics import bounded_exp
from logitless.losses.policy import ClippedLoss, PolicyLoss


@dataclass(frozen=True, kw_only=True)
class RLOOLoss(ClippedLoss):
    """REINFORCE leave-one-out (RLOO), with a clipped ratio per sequence.

        mean over the sequences of -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

    r = exp(sum logp - sum old_logp), with sums over the tokens of a sequence. The loss has no KL term:
    include a KL to a reference model in the rewards.

    Inputs:
        hidden, weight, targets, sampling_mask, **arguments: as in `GRPOLoss`.
        advantages: (B,).
        old_logps: per token in targets' shape, or (B,) sums per sequence; None for on-policy data.
        num_items: the number of sequences.

    Metrics: entropy, importance_ratio, clip_ratio/*.

    Reference: Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> out = RLOOLoss()(hidden, weight, targets, advantages=torch.tensor([1.0, -2.0]))
        >>> round(out.loss.item(), 4)
        0.5
    """

    # `clipped` reads this option of GRPO. In RLOO, only the clip range bounds the ratio.
    delta: ClassVar = None

    scope: ClassVar = "group"
    unit: ClassVar = "sequences"
    sequence_inputs: ClassVar = ("sequence_advantages", "old_sums")
    token_inputs: ClassVar = ("old_logps",)
    internal_inputs: ClassVar = ("sequence_advantages", "old_sums")
    metric_names: ClassVar = ("entropy", "importance_ratio", *FLAGS[clipped])

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps = batch.sum_by_sequence(stats.logps)
        advantages = batch.sequence_advantages
        old = logps.detach()
        if batch.old_sums is not None:
            old = batch.old_sums
        elif batch.old_logps is not None:
            old = batch.sum_by_sequence(batch.old_logps)
        # A sequence without supervised tokens has ratio 1 and loss 0.
        filled = (batch.lengths > 0).to(logps.dtype)
        ratio = bounded_exp((logps - old) * filled)
        values, flags = clipped(self, ratio, advantages * filled, logps, None)
        metrics = {name: Term(flag, over="sequences") for name, flag in flags.items()}
        metrics |= {"entropy": Term(stats.entropy), "importance_ratio": Term(batch.spread(ratio))}
        return {"policy": Term(values, over="sequences")}, metrics

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        advantages: Tensor,
        old_logps: Tensor | None = None,
        sampling_mask: SamplingMask | None = None,
        **arguments: Unpack[CallInputs],
    ) -> LossOutput:
        inputs = {"advantages": advantages, "old_logps": old_logps, "sampling_mask": sampling_mask}
        return self.solve(hidden, weight, targets, arguments, inputs)

    def laid_out(
        self, layout: SequenceLayout, advantages: Tensor, *, old_logps: Tensor | None = None
    ) -> dict[str, Tensor | None]:
        if tuple(advantages.shape) not in ((layout.sequences,), (layout.sequences, 1)):
            raise value_error(
                "advantages",
                f"shape ({layout.sequences},), one per sequence",
                tuple(advantages.shape),
                "pass one advantage per sequence",
            )
        inputs = {"sequence_advantages": advantages.detach().reshape(-1).to(layout.dtype)}
        if old_logps is None:
            return inputs
        if layout.is_per_sequence("old_logps", old_logps, sums=True):
            return inputs | {"old_sums": old_logps.detach().reshape(-1).to(layout.dtype)}
        old_logps = per_token_shape(old_logps, layout.targets)
        return inputs | {"old_logps": layout.per_token("old_logps", old_logps)}


@dataclass(frozen=True, kw_only=True)
class REINFORCELoss(PolicyLoss):
    """REINFORCE: mean over the tokens of -A logp.

    The advantages A are rewards minus a baseline, which the caller computes.

    Inputs:
        hidden, weight, targets, sampling_mask, **arguments: as in `GRPOLoss`.
        advantages: (B,) per sequence, or per token in targets' shape.
        num_items: the number of tokens.

    Metrics: entropy.

    Reference: Williams, 1992, https://doi.org/10.1007/BF00992696.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> out = REINFORCELoss()(hidden, weight, targets, advantages=torch.ones(2))
        >>> torch.allclose(out.loss, linear_cross_entropy(hidden, weight, targets), atol=1e-4)
        True
    """

    metric_names: ClassVar = ("entropy",)

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        return {"policy": Term(-batch.advantages * stats.logps)}, {"entropy": Term(stats.entropy)}

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        advantages: Tensor,
        sampling_mask: SamplingMask | None = None,
        **arguments: Unpack[CallInputs],
    ) -> LossOutput:
        inputs = {"advantages": advantages, "sampling_mask": sampling_mask}
        return self.solve(hidden, weight, targets, arguments, inputs)

    def laid_out(self, layout: SequenceLayout, advantages: Tensor) -> dict[str, Tensor | None]:
        return {"advantages": layout.per_token("advantages", advantages, per_sequence=True)}
