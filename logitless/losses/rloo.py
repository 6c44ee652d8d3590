"""Policy gradients without a learned baseline: REINFORCE, and REINFORCE leave-one-out (RLOO)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.layout import SequenceLayout, per_token_shape
from logitless.engine.terms import Term
from logitless.errors import value_error
from logitless.losses.grpo_types import TYPES, PolicyRatios, clip
from logitless.losses.numerics import bounded_exp
from logitless.losses.policy import ClippedLoss, PolicyLoss, check_old_kl, old_kl, require_old_logps
from logitless.losses.sampler_correction import SequenceSums


@dataclass(frozen=True, kw_only=True)
class RLOOLoss(ClippedLoss):
    """REINFORCE leave-one-out (RLOO), with a clipped ratio per sequence.

        mean over the sequences of -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

    r = exp(sum logp - sum old_logp), with sums over the tokens of a sequence. The loss has no KL term:
    include a KL to a reference model in the rewards.

    Args:
        sampler_correction: as in `GRPOLoss`, with the levels "sequence" and "geometric".

    Inputs:
        hidden, weight, targets, sampling_mask, **arguments: as in `GRPOLoss`.
        advantages: (B,).
        old_logps: per token in targets' shape, or (B,) sums per sequence; None for on-policy data.
        sampling_logps: targets' shape, log-probabilities that the sampler returned.
        num_items: the number of sequences.

    Metrics: entropy, importance_ratio, clip_ratio/*.

    Reference: Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> out = RLOOLoss()(hidden, weight, targets, advantages=torch.tensor([1.0, -2.0]))
        >>> round(out.loss.item(), 4)
        0.5
    """

    # `clip` reads this option of GRPO. In RLOO, only the clip range bounds the ratio.
    delta: ClassVar = None

    scope: ClassVar = "group"
    unit: ClassVar = "sequences"
    sequence_inputs: ClassVar = ("sequence_advantages", "old_sums")
    token_inputs: ClassVar = ("old_logps", "sampling_logps")
    metric_names: ClassVar = ("entropy", "importance_ratio", *TYPES["grpo"].metric_names)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(correction.level == "token" for correction in self.corrections):
            raise value_error(
                "sampler_correction",
                "level='sequence' or 'geometric' for RLOOLoss",
                "'token'",
                "RLOO has one ratio per sequence",
            )

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
        log_ratio = (logps - old) * filled
        ratio = bounded_exp(log_ratio)
        ratios = PolicyRatios(logps, old, advantages * filled, log_ratio, log_ratio, ratio, batch)
        values, flags = clip(self, ratios)
        if self.sampler_correction is not None:
            values = values * self._sampler_weights(stats.logps.detach(), batch)
        metrics = {name: Term(flag, over="sequences") for name, flag in flags.items()}
        metrics |= {"entropy": Term(stats.entropy), "importance_ratio": Term(batch.spread(ratio))}
        return {"policy": Term(values, over="sequences")}, metrics

    def _sampler_weights(self, logps: Tensor, batch: Batch) -> Tensor:
        """(sequences,) the factor of each sequence."""
        sequences = SequenceSums(batch.sum_by_sequence, batch.lengths)
        if batch.old_sums is None:
            return self.sampler_weights(
                logps if batch.old_logps is None else batch.old_logps, batch.sampling_logps, sequences
            )
        sampled = batch.sum_by_sequence(batch.sampling_logps)
        return self.sampler_weights(batch.old_sums, sampled, SequenceSums(lambda x: x, batch.lengths))

    def laid_out(
        self,
        layout: SequenceLayout,
        advantages: Tensor,
        *,
        old_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        if tuple(advantages.shape) not in ((layout.sequences,), (layout.sequences, 1)):
            raise value_error(
                "advantages",
                f"shape ({layout.sequences},), one per sequence",
                tuple(advantages.shape),
                "pass one advantage per sequence",
            )
        inputs = {"sequence_advantages": layout.owned(advantages.detach().reshape(-1))}
        self.check_sampling(sampling_logps)
        if sampling_logps is not None:
            inputs["sampling_logps"] = layout.per_token("sampling_logps", sampling_logps)
        if old_logps is None:
            return inputs
        if layout.is_per_sequence("old_logps", old_logps, sums=True):
            if any(correction.measure != "ratio" for correction in self.corrections):
                expected = "log-probabilities per token, for a correction that measures 'k2' or 'k3'"
                raise value_error("old_logps", expected, "sums per sequence", "pass them per token")
            return inputs | {"old_sums": layout.owned(old_logps.detach().reshape(-1))}
        old_logps = per_token_shape(old_logps, layout.targets)
        return inputs | {"old_logps": layout.per_token("old_logps", old_logps)}


@dataclass(frozen=True, kw_only=True)
class REINFORCELoss(PolicyLoss):
    """REINFORCE: mean over the tokens of -A logp + old_kl_coef (logp - old_logp)^2 / 2.

    The advantages A are rewards minus a baseline, which the caller computes. With `old_kl_coef` the loss is
    DRO.

    Args:
        old_kl_coef: weight of the penalty on the log-ratio to the old policy. Needs `old_logps`.
        sampler_correction: as in `GRPOLoss`; a factor of -A logp. Needs `sampling_logps`.

    Inputs:
        hidden, weight, targets, sampling_mask, **arguments: as in `GRPOLoss`.
        advantages: (B,) per sequence, or per token in targets' shape.
        old_logps: targets' shape; None without `old_kl_coef` and for a correction from the policy itself.
        sampling_logps: targets' shape, log-probabilities that the sampler returned.
        num_items: the number of tokens.

    Metrics: entropy.

    References: Williams, 1992, https://doi.org/10.1007/BF00992696; Richemond et al. (DRO), 2024,
    https://arxiv.org/abs/2405.19107.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> out = REINFORCELoss()(hidden, weight, targets, advantages=torch.ones(2))
        >>> torch.allclose(out.loss, linear_cross_entropy(hidden, weight, targets), atol=1e-4)
        True
    """

    old_kl_coef: float = 0.0

    token_inputs: ClassVar = ("advantages", "old_logps", "sampling_logps")
    metric_names: ClassVar = ("entropy",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_old_kl(self.old_kl_coef)

    @property
    def scope(self) -> str:
        return "group" if self.sampler_correction is not None and self.corrects_sequences else "token"

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        values = -batch.advantages * stats.logps
        if self.sampler_correction is not None:
            old_logps = stats.logps.detach() if batch.old_logps is None else batch.old_logps
            values = values * self.sampler_weights(old_logps, batch.sampling_logps, batch)
        if self.old_kl_coef:
            values = values + old_kl(self.old_kl_coef, stats.logps - batch.old_logps)
        return {"policy": Term(values)}, {"entropy": Term(stats.entropy)}

    def laid_out(
        self,
        layout: SequenceLayout,
        advantages: Tensor,
        *,
        old_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        self.check_sampling(sampling_logps)
        if self.old_kl_coef:
            require_old_logps(old_logps)
        if old_logps is not None and not self.old_kl_coef and self.sampler_correction is None:
            remedy = "set old_kl_coef, pass sampler_correction, or take GRPOLoss for a ratio"
            raise value_error("old_logps", "None for a loss without ratio", tuple(old_logps.shape), remedy)
        inputs = {"old_logps": old_logps, "sampling_logps": sampling_logps}
        inputs = {name: layout.per_token(name, x) for name, x in inputs.items() if x is not None}
        return inputs | {"advantages": layout.per_token("advantages", advantages, per_sequence=True)}
