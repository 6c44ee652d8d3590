"""Group relative policy optimization (GRPO) and its variants, and PPO."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.layout import SequenceLayout
from logitless.engine.sampling_mask import SamplingMask
from logitless.engine.terms import Term
from logitless.errors import check_choice, value_error
from logitless.losses.base import LossOutput
from logitless.losses.grpo_types import (
    FLAGS,
    LEVELS,
    OTHER_NAMES,
    PER_SEQUENCE,
    SURROGATES,
    GRPOType,
    by_sign,
    clipped,
)
from logitless.losses.inputs import HeadWeight, RolloutInputs
from logitless.losses.numerics import LARGEST, bounded_exp
from logitless.losses.policy import ClippedLoss
from logitless.losses.reference_model import ComparedLoss

# Bounds that VESPO applies to the log of a sequence's weight.
SMALLEST_LOG_WEIGHT = math.log(1e-8)
LARGEST_LOG_WEIGHT = 20.0


@dataclass(frozen=True, kw_only=True)
class GRPOLoss(ComparedLoss, ClippedLoss):
    """Group relative policy optimization (GRPO) and its variants.

    With the ratio r = exp(logp - old_logp), the advantage A and the stop-gradient sg, the loss of a token is

        cispo        -sg(min(r, epsilon_high)) A logp
        sapo         -4/tau sigmoid(tau (r - 1)) A
        vespo        -sg(w^k exp(lambda (1 - w))) A logp,  w the product of the ratios of a sequence
        other types  -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

    plus beta * kl, where kl = exp(d) - d - 1 with d = ref_logp - logp (the k3 estimator), minus
    entropy_coef * entropy. bnpo, dapo, cispo and vespo average over the tokens of the call. The other types
    average over sequences: grpo and sapo the mean of each sequence's tokens, luspo their sum, and dr_grpo
    their sum divided by `max_completion_length`.

    Args:
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo" (TRL's default), "cispo", "sapo", "luspo" or "vespo".
            "bnpo" with advantages per token is PPO-clip.
        beta: weight of the KL to the reference model. If it is not 0, pass `ref_logps` or `ref_hidden`.
        epsilon_high: clip range above 1; None: `epsilon`. For "cispo" it is required, and is the upper bound
            of the ratio itself (such as 5.0).
        delta: upper bound of the unclipped ratio (INTELLECT-2), for tokens with negative advantage. None: no
            bound.
        importance_sampling_level: "token": one ratio per token. "sequence" (GSPO): one ratio per sequence,
            exp of the mean log-ratio of its tokens.
        entropy_coef: weight of the entropy bonus. The bonus is the mean entropy of the call's tokens, and is
            differentiated.
        use_bias_correction_kl: multiply the KL by the ratio.
        top_entropy_quantile: fraction of the tokens that the surrogate and the entropy bonus use: those with
            the highest entropy.
        off_policy_mask_threshold: drop a sequence with negative advantage if the mean of sampling_logp - logp
            over its tokens exceeds this threshold. None: drop no sequence.
        max_completion_length: the divisor of "dr_grpo".
        sapo_temperature_neg: tau of "sapo" for tokens whose advantage is 0 or negative.
        sapo_temperature_pos: tau of "sapo" for tokens whose advantage is positive.
        vespo_k_pos: k of "vespo" for tokens whose advantage is 0 or positive.
        vespo_lambda_pos: lambda of "vespo" for tokens whose advantage is 0 or positive.
        vespo_k_neg: k of "vespo" for tokens whose advantage is negative.
        vespo_lambda_neg: lambda of "vespo" for tokens whose advantage is negative.

    Inputs:
        hidden: (B, T, H), or (N, H) with `cu_seqlens` (B + 1,).
        weight: (V, H), or the LM head itself.
        targets: (B, T) int64, or (N,) with `cu_seqlens`.
        advantages: (B,) per sequence, or per token in targets' shape.
        old_logps: targets' shape, log-probabilities under the policy that generated the data. None for
            on-policy data: r = exp(logp - sg(logp)), whose value is 1 and whose gradient is that of logp.
        sampling_logps: targets' shape, log-probabilities that the sampler returned.
        ref_logps: targets' shape, log-probabilities under the reference model. They get no gradient.
        ref_hidden: (B, T, H'), hidden states of the reference model, as an alternative to `ref_logps`. They
            are projected in the same chunks, and get no gradient.
        ref_weight: (V, H'), the weight of the reference's head.
        ref_bias: (V,), the bias of the reference's head.
        importance_weights: ratio of the old policy's probability to the sampler's, in targets' shape or (B,).
        sampling_mask: a `SamplingMask` with the ids that the sampler's truncation kept. Log-probabilities,
            entropy, and the reference's log-probabilities from `ref_hidden` are normalized over these ids.
            `old_logps`, `ref_logps` and `sampling_logps` must already be normalized over the same ids.
        num_items: the divisor of the mean: the number of sequences if `loss_type` averages over sequences,
            else the number of tokens.
        **arguments: mask and the other arguments of every loss, see `CrossEntropyLoss`.

    With `cu_seqlens`, an input of shape (N,) is refused if N equals B, because its shape does not tell
    whether it is per token or per sequence. Pass (1, N) for values per token, or (B, 1) for values per
    sequence. Log-ratios are clamped to [-80, 80] before exp.

    Metrics: entropy, importance_ratio, kl, clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/region_mean,
    cispo_clip_ratio and vespo/phi_seq_mean, if they apply to the options.

    References: Shao et al., 2024, https://arxiv.org/abs/2402.03300; Liu et al. (dr_grpo), 2025,
    https://arxiv.org/abs/2503.20783; Yu et al. (dapo), 2025, https://arxiv.org/abs/2503.14476; MiniMax
    (cispo), 2025, https://arxiv.org/abs/2506.13585; Zheng et al. (GSPO), 2025,
    https://arxiv.org/abs/2507.18071; sapo https://arxiv.org/abs/2511.20347; luspo
    https://arxiv.org/abs/2602.05261; vespo https://arxiv.org/abs/2602.10693; Wang et al.
    (top_entropy_quantile), 2025, https://arxiv.org/abs/2506.01939.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> old_logps = linear_logprobs(hidden, weight, targets).logps
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> out = GRPOLoss()(hidden, weight, targets, advantages=advantages, old_logps=old_logps)
        >>> round(out.metrics["importance_ratio"].item(), 4)
        1.0
    """

    loss_type: GRPOType = "dapo"
    beta: float = 0.0
    delta: float | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    entropy_coef: float = 0.0
    use_bias_correction_kl: bool = False
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    max_completion_length: int | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    token_inputs: ClassVar = (
        "advantages",
        "old_logps",
        "ref_logps",
        "sampling_logps",
        "importance_weights",
        "log_importance",
        "unit_weights",
        "flag_weights",
    )
    shared_inputs: ClassVar = ("entropy_weight",)
    internal_inputs: ClassVar = ("log_importance", "unit_weights", "flag_weights", "entropy_weight")

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, SURROGATES, OTHER_NAMES)
        check_choice("importance_sampling_level", self.importance_sampling_level, LEVELS)
        super().__post_init__()
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise value_error(
                "epsilon_high", "the ratio's upper bound for cispo", None, "pass a bound above 1, such as 5.0"
            )
        delta = self.delta
        quantile = self.top_entropy_quantile
        length = self.max_completion_length
        if delta is not None and delta <= 0:
            raise value_error("delta", "a positive number or None", delta, "use None for none")
        if delta is not None and SURROGATES[self.loss_type] is not clipped:
            raise value_error(
                "delta", f"None for {self.loss_type}", delta, "only clipped loss types bound the ratio"
            )
        if self.beta < 0:
            raise value_error("beta", "a number >= 0", self.beta, "use 0.0 for none")
        if not 0 <= quantile <= 1:
            raise value_error(
                "top_entropy_quantile", "a number in [0, 1]", quantile, "use 1.0 to keep every token"
            )
        if self.loss_type == "dr_grpo" and (length or 0) <= 0:
            raise value_error(
                "max_completion_length",
                "a positive number for dr_grpo",
                length,
                "it is the divisor of the sums",
            )
        taus = (self.sapo_temperature_neg, self.sapo_temperature_pos)
        if min(taus) <= 0:
            raise value_error("sapo_temperature", "two positive numbers", taus, "TRL's are 1.05 and 1.0")

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def by_sequence(self) -> bool:
        """Whether there is one ratio per sequence."""
        return self.importance_sampling_level == "sequence"

    @property
    def scope(self) -> str:
        if self.top_entropy_quantile < 1:
            return "batch"
        whole = self.by_sequence or self.loss_type == "vespo" or self.off_policy_mask_threshold is not None
        return "group" if whole else "token"

    @property
    def unit(self) -> str:
        return "sequences" if self.loss_type in PER_SEQUENCE else "tokens"

    @property
    def differentiates(self) -> tuple[str, ...]:
        return ("logps", "entropy") if self.entropy_coef else ("logps",)

    @property
    def metric_names(self) -> tuple[str, ...]:
        kl = ("kl",) if self.beta else ()
        return ("entropy", "importance_ratio", *kl, *FLAGS[SURROGATES[self.loss_type]])

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps = stats.logps
        advantages = batch.advantages
        detached = stats.logps.detach()
        log_ratio = logps - (detached if batch.old_logps is None else batch.old_logps)
        if self.by_sequence:
            ratio = batch.spread(bounded_exp(batch.sum_by_sequence(log_ratio) / batch.lengths.clamp(min=1)))
        else:
            ratio = bounded_exp(log_ratio)
        phi = self.phi(log_ratio.detach(), batch) if self.loss_type == "vespo" else None
        values, flags = SURROGATES[self.loss_type](self, ratio, advantages, logps, phi)
        selected = self.kept(stats.entropy.detach(), batch)
        if selected is not None:
            values = values * selected
        if self.off_policy_mask_threshold is not None:
            sampling = batch.old_logps if batch.sampling_logps is None else batch.sampling_logps
            drift = batch.sum_by_sequence((sampling - detached).nan_to_num(nan=0.0))
            drift = drift / batch.lengths.clamp(min=1)
            values = values * ((advantages >= 0) | batch.spread(drift <= self.off_policy_mask_threshold))
        if batch.importance_weights is not None and phi is None:
            values = values * batch.importance_weights
        metrics = {"entropy": Term(stats.entropy), "importance_ratio": Term(ratio)}
        metrics |= {name: self.flag(x, batch) for name, x in flags.items()}
        if self.beta:
            d = (batch.ref_logps - logps).clamp(max=LARGEST)
            kl = torch.expm1(d) - d
            kl = self.corrected_kl(kl, d, ratio, log_ratio, batch) if self.use_bias_correction_kl else kl
            values = values + self.beta * kl
            metrics["kl"] = Term(kl)
        if batch.unit_weights is not None:
            values = values * batch.unit_weights
        return self.with_bonus(values, stats.entropy, selected, batch), metrics

    def phi(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """(n,) VESPO's weights w^k exp(lambda (1 - w)), without gradient.

        w is the product of the ratios of a sequence.
        """
        log_w = batch.sum_by_sequence(log_ratio.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT))
        if batch.log_importance is not None:
            log_w = log_w + batch.sum_by_sequence(batch.log_importance)
        log_w = batch.spread(log_w.clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT))
        positive = (batch.advantages >= 0).to(log_w.dtype)
        k = by_sign(positive, self.vespo_k_pos, self.vespo_k_neg)
        decay = by_sign(positive, max(self.vespo_lambda_pos, 1e-4), max(self.vespo_lambda_neg, 1e-4))
        return (k * log_w - decay * log_w.expm1()).exp()

    def corrected_kl(self, kl: Tensor, d: Tensor, ratio: Tensor, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Return kl * ratio. If there is one ratio per token, its derivative with respect to logp is -d *
        ratio.

        Autograd would compute this derivative as (kl - expm1(d)) * ratio. kl and expm1(d) are both of the
        size of exp(d), so their difference -d would lose its digits by cancellation.
        """
        plain = (kl * ratio).clamp(max=math.exp(LARGEST))
        exact = (d < LARGEST) & (log_ratio.abs() < LARGEST) & (plain < math.exp(LARGEST))
        if self.by_sequence:
            exact = exact & batch.spread(batch.lengths == 1)
        slope = torch.where(exact, -(d * ratio).detach(), 0.0)
        # d.detach() - d is 0, and its derivative with respect to logp is 1.
        return torch.where(exact, plain.detach() + slope * (d.detach() - d), plain)

    def flag(self, x: Tensor, batch: Batch) -> Term:
        """The mean of a flag over tokens, or over sequences if all tokens of a sequence share the flag."""
        if batch.flag_weights is None:
            return Term(x)
        x = x * batch.flag_weights
        if self.loss_type != "vespo":
            return Term(x, over=None)
        # For a sequence without supervised tokens phi is 1, as the product of no ratios; the other flags are
        # 0.
        return Term(batch.sum_by_sequence(x) + (batch.lengths == 0), over="sequences")

    def kept(self, entropy: Tensor, batch: Batch) -> Tensor | None:
        """(n,) 1 for the tokens with the highest entropy, 0 for all others; None if all tokens are kept."""
        if self.top_entropy_quantile >= 1:
            return None
        counted = torch.where(batch.supervised, entropy, math.nan)
        all_tokens = batch.all_gather_tokens(counted)
        if not all_tokens.shape[0]:
            return None
        return (counted >= torch.nanquantile(all_tokens, 1 - self.top_entropy_quantile)).to(entropy.dtype)

    def with_bonus(
        self, values: Tensor, entropy: Tensor, selected: Tensor | None, batch: Batch
    ) -> dict[str, Term]:
        """The terms of the loss: the surrogate and the entropy bonus, or their sum with reduction="none"."""
        entropy = entropy if selected is None else entropy * selected
        if self.reduction == "none":
            values = values - self.entropy_coef * entropy if self.entropy_coef else values
            values = batch.sum_by_sequence(values) if self.unit == "sequences" else values
            return {"policy": Term(values, over=self.unit)}
        of = "tokens"
        if self.cp_group is not None and self.scope != "token" and self.unit == "sequences":
            # With `cp_group`, a term over sequences has one value per sequence.
            values = batch.sum_by_sequence(values)
            of = "sequences"
        terms = {"policy": Term(values, over=self.unit, of=of)}
        if self.entropy_coef:
            weight = (
                batch.entropy_weight if selected is None else 1 / batch.total(selected.sum()).clamp(min=1)
            )
            weight = 1.0 if self.reduction == "sum" else weight
            terms["entropy"] = Term(-self.entropy_coef * weight * entropy, over=None)
        return terms

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        ref_logps: Tensor | None = None,
        ref_hidden: Tensor | None = None,
        ref_weight: HeadWeight | None = None,
        ref_bias: Tensor | None = None,
        sampling_mask: SamplingMask | None = None,
        **arguments: Unpack[RolloutInputs],
    ) -> LossOutput:
        inputs = {
            "sampling_mask": sampling_mask,
            "ref_logps": ref_logps,
            "ref_hidden": ref_hidden,
            "ref_weight": ref_weight,
            "ref_bias": ref_bias,
        }
        return self.solve(hidden, weight, targets, arguments, inputs)

    def laid_out(
        self,
        layout: SequenceLayout,
        advantages: Tensor,
        *,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        importance_weights: Tensor | None = None,
        **model: Tensor | None,  # ref_hidden, ref_weight and ref_bias, or nothing
    ) -> dict[str, Tensor | None]:
        if self.off_policy_mask_threshold is not None:
            name = "off_policy_mask_threshold"
            if old_logps is None and sampling_logps is None:
                raise value_error(
                    name, "old_logps or sampling_logps with this option", None, "pass one, or set it to None"
                )
        inputs = {"old_logps": old_logps, "ref_logps": ref_logps, "sampling_logps": sampling_logps}
        inputs = {name: layout.per_token(name, x) for name, x in inputs.items() if x is not None}
        inputs |= model
        inputs["advantages"] = layout.per_token("advantages", advantages, per_sequence=True)
        if self.loss_type in ("grpo", "sapo"):
            inputs["unit_weights"] = layout.spread(layout.shares)
        elif self.loss_type == "dr_grpo":
            weight = 1 / self.max_completion_length
            inputs["unit_weights"] = layout.spread(torch.full_like(layout.lengths, weight))
        inputs["entropy_weight"] = layout.share if self.entropy_coef else None
        # If all tokens of a sequence have the same flag, it counts once per sequence; None: once per token.
        whole = self.by_sequence or self.loss_type == "vespo"
        once = whole and layout.is_per_sequence("advantages", advantages)
        if once:
            share = layout.shares if self.loss_type == "vespo" else layout.shares / layout.sequences
            inputs["flag_weights"] = layout.spread(share)
        if importance_weights is None:
            return inputs
        name = "importance_weights"
        if self.loss_type != "vespo":
            return inputs | {name: layout.per_token(name, importance_weights, per_sequence=True)}
        logs = importance_weights.to(layout.dtype).log().clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        if layout.is_per_sequence(name, logs):
            # Divide the log of a sequence's weight evenly among its tokens.
            return inputs | {"log_importance": layout.spread(logs.detach().reshape(-1) * layout.shares)}
        return inputs | {"log_importance": layout.per_token(name, logs, per_sequence=True)}


@dataclass(frozen=True, kw_only=True)
class PPOLoss(GRPOLoss):
    """PPO-clip. Equal to `GRPOLoss(loss_type="bnpo")`.

        mean over the tokens of -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

    For advantages per token, pass `advantages` in the shape of `targets`. All options, inputs and metrics of
    `GRPOLoss` apply.

    Reference: Schulman et al., 2017, https://arxiv.org/abs/1707.06347.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> old_logps = linear_logprobs(hidden, weight, targets).logps
        >>> out = PPOLoss()(hidden, weight, targets, advantages=torch.ones(2, 5), old_logps=old_logps)
        >>> round(out.loss.item(), 4)
        -1.0
    """

    loss_type: GRPOType = "bnpo"
