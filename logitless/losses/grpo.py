"""Group relative policy optimization (GRPO) and its variants, and PPO."""

import math
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.layout import SequenceLayout
from logitless.engine.terms import Term
from logitless.errors import check_choice, value_error
from logitless.losses.base import LossOutput
from logitless.losses.framework_names import REMEDIES
from logitless.losses.grpo_types import (
    AGG_MODES,
    LARGEST_LOG_WEIGHT,
    LEVELS,
    OF_PROBABILITIES,
    SMALLEST_LOG_WEIGHT,
    TRUST_REGIONS,
    TYPES,
    AggMode,
    GRPOType,
    Level,
    PolicyRatios,
    TrustRegion,
    bounded,
)
from logitless.losses.inputs import HeadWeight, RolloutInputs
from logitless.losses.kl_estimators import NAMES as KL_ESTIMATORS
from logitless.losses.kl_estimators import KLEstimator, estimated_kl
from logitless.losses.numerics import LARGEST, bounded_exp
from logitless.losses.policy import ClippedLoss, check_old_kl, old_kl, require_old_logps
from logitless.losses.reference_model import ComparedLoss

# Loss types whose surrogate depends on all tokens of a sequence.
OF_SEQUENCES = ("vespo", "gmpo")
# Options that gmpo does not have.
GMPO_DEFAULTS = {
    "importance_sampling_level": "token",
    "loss_agg_mode": None,
    "ref_advantage": 0.0,
    "top_entropy_quantile": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class GRPOLoss(ComparedLoss, ClippedLoss):
    """Group relative policy optimization (GRPO) and its variants.

    With the log-ratio l = logp - old_logp, the ratio r = exp(l), the advantage A and the stop-gradient sg,
    the loss of a token is

        cispo        -sg(clip(r, cispo_min, epsilon_high)) A logp
        sapo         -4/tau sigmoid(tau (r - 1)) A
        vespo        -sg(w^k exp(lambda (1 - w))) A logp,  w the product of the ratios of a sequence
        gmpo         -A exp(mean of c over the sequence),  c = min(l, epsilon_high) if A > 0,
                     else max(l, -epsilon)
        other types  -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)

    plus beta * kl and old_kl_coef * l^2 / 2, minus entropy_coef * entropy. With d = ref_logp - logp, kl is
    exp(d) - d - 1 (the k3 estimator), times r. bnpo, dapo, cispo and vespo average over the tokens of the
    call. The other types average over sequences: grpo, sapo and gmpo the mean of each sequence's tokens,
    luspo their sum, and dr_grpo their sum divided by `max_completion_length`.

    Args:
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo" (TRL's default), "cispo", "sapo", "luspo", "vespo" or
            "gmpo". "bnpo" with advantages per token is PPO-clip. "gmpo" takes advantages per sequence.
        loss_agg_mode: the mean, by verl's names: "token-mean"; "seq-mean-token-mean", "seq-mean-token-sum" or
            "seq-mean-token-sum-norm" (divided by `max_completion_length`). None: that of `loss_type`.
        epsilon_high: clip range above 1; None: `epsilon`. For "cispo" it is required, and is the upper bound
            of the ratio itself (such as 5.0). For "gmpo", both ranges bound the log-ratio; the paper
            recommends 0.4.
        cispo_min: lower bound of the ratio of "cispo".
        delta: upper bound of the unclipped ratio (INTELLECT-2, dual clip), for tokens with negative
            advantage; for a `trust_region` other than "clip", upper bound of the weight of every token. None:
            no bound.
        trust_region: which tokens are dropped, for loss types with clipped ratios. "clip": the loss above.
            Otherwise the loss of a token that is kept is -min(r, delta) A, with the gradient -sg(min(r,
            delta)) A d logp. With p and q the probabilities of the token under the policy and the old policy,
            "binary_tv" (DPPO) drops tokens with A > 0 and p - q > epsilon_high, or A <= 0 and p - q <
            -epsilon. "binary_kl" (DPPO) drops tokens with A > 0, p > q and K > epsilon_high, or A <= 0, p <
            q and K > epsilon, where K = q log(q / p) + (1 - q) log((1 - q) / (1 - p)). "absolute_tv" drops
            tokens with p - q > epsilon_high or p - q < -epsilon. None drops no token.
        importance_sampling_level: "token": one ratio per token. "sequence" (GSPO): one ratio per sequence,
            exp of the mean log-ratio of its tokens. "sequence_token" (GSPO-token): the same value, with the
            gradient of the token's own log-probability.
        beta: weight of the KL to the reference model. If it is not 0, pass `ref_logps` or `ref_hidden`.
        kl_estimator: "k3"; "k1": -d; "k2": d^2 / 2; "abs": |d|. With "+" ("k3+"), this value with the
            gradient of k2.
        kl_max: clamps the estimate of each token to [-kl_max, kl_max], outside of which its gradient is 0;
            with "+", only the value is clamped. None: no bound.
        use_bias_correction_kl: multiply the KL by the ratio. True is TRL's default; verl, NeMo-RL and
            ms-swift differ.
        old_kl_coef: weight of l^2 / 2, which is added for every token, dropped ones too. Needs `old_logps`.
        ref_advantage: adds ref_advantage * (ref_logp - sg(logp)) to A (on-policy distillation). Needs
            `ref_logps` or `ref_hidden`.
        sampler_correction: a `SamplerCorrection`, or a tuple of them: the factor of the surrogate for the
            difference between the old policy and the sampler. Needs `sampling_logps`.
        entropy_coef: weight of the entropy bonus. The bonus is the mean entropy of the call's tokens, and is
            differentiated.
        top_entropy_quantile: fraction of the tokens that the surrogate and the entropy bonus use: those with
            the highest entropy.
        off_policy_mask_threshold: drop a sequence with negative advantage if the mean of sampling_logp - logp
            over its tokens exceeds this threshold. None: drop no sequence.
        max_completion_length: the divisor of "dr_grpo" and "seq-mean-token-sum-norm".
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
        num_items: the divisor of the mean: the number of sequences for a mean over sequences, else the number
            of tokens.
        **arguments: mask and the other arguments of every loss, see `LinearLoss.__call__`.

    With `cu_seqlens`, an input of shape (N,) is refused if N equals B, because its shape does not tell
    whether it is per token or per sequence. Pass (1, N) for values per token, or (B, 1) for values per
    sequence. Log-ratios are clamped to [-80, 80] before exp.

    Metrics: entropy, importance_ratio, kl, clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/region_mean,
    cispo_clip_ratio and vespo/phi_seq_mean, if they apply to the options.

    References: Shao et al., 2024, https://arxiv.org/abs/2402.03300; Liu et al. (dr_grpo), 2025,
    https://arxiv.org/abs/2503.20783; Yu et al. (dapo), 2025, https://arxiv.org/abs/2503.14476; MiniMax
    (cispo), 2025, https://arxiv.org/abs/2506.13585; Zheng et al. (GSPO), 2025,
    https://arxiv.org/abs/2507.18071; sapo https://arxiv.org/abs/2511.20347; luspo
    https://arxiv.org/abs/2602.05261; vespo https://arxiv.org/abs/2602.10693; gmpo
    https://arxiv.org/abs/2507.20673; DPPO (binary_tv, binary_kl) https://arxiv.org/abs/2602.04879; Wang et
    al. (top_entropy_quantile), 2025, https://arxiv.org/abs/2506.01939.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> old_logps = linear_logprobs(hidden, weight, targets).logps
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> out = GRPOLoss()(hidden, weight, targets, advantages=advantages, old_logps=old_logps)
        >>> round(out.metrics["importance_ratio"].item(), 4)
        1.0
    """

    loss_type: GRPOType = "dapo"
    loss_agg_mode: AggMode | None = None
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_max: float | None = None
    use_bias_correction_kl: bool = True
    delta: float | None = None
    trust_region: TrustRegion = "clip"
    cispo_min: float = 0.0
    importance_sampling_level: Level = "token"
    old_kl_coef: float = 0.0
    ref_advantage: float = 0.0
    entropy_coef: float = 0.0
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

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, TYPES, REMEDIES["loss_type"])
        check_choice(
            "importance_sampling_level",
            self.importance_sampling_level,
            LEVELS,
            REMEDIES["importance_sampling_level"],
        )
        check_choice("trust_region", self.trust_region, TRUST_REGIONS, REMEDIES["trust_region"])
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS, REMEDIES["kl_estimator"])
        check_choice("loss_agg_mode", self.loss_agg_mode, (None, *AGG_MODES), REMEDIES["loss_agg_mode"])
        super().__post_init__()
        self._check_ratios()
        self._check_kl()
        quantile = self.top_entropy_quantile
        length = self.max_completion_length
        if not 0 <= quantile <= 1:
            raise value_error(
                "top_entropy_quantile", "a number in [0, 1]", quantile, "use 1.0 to keep every token"
            )
        if self.agg_mode == "seq-mean-token-sum-norm" and (length or 0) <= 0:
            raise value_error(
                "max_completion_length",
                f"a positive number for {self.loss_agg_mode or self.loss_type}",
                length,
                "it is the divisor of the sums",
            )
        check_old_kl(self.old_kl_coef)
        taus = (self.sapo_temperature_neg, self.sapo_temperature_pos)
        if min(taus) <= 0:
            raise value_error("sapo_temperature", "two positive numbers", taus, "TRL's are 1.05 and 1.0")
        if self.loss_type == "gmpo":
            self._check_gmpo()
        if self.loss_type == "vespo" and self.sampler_correction is not None:
            remedy = "pass importance_weights=correction.weights(...), which are factors of vespo's weight"
            raise value_error("sampler_correction", "None for vespo", self.sampler_correction, remedy)

    def _check_ratios(self) -> None:
        """Check the options that bound ratios or drop tokens."""
        kind = self.loss_type
        delta = self.delta
        region = self.trust_region
        clips = TYPES[kind].surrogate is bounded
        if kind == "cispo" and self.epsilon_high is None:
            raise value_error(
                "epsilon_high", "the ratio's upper bound for cispo", None, "pass a bound above 1, such as 5.0"
            )
        if delta is not None and delta <= 0:
            raise value_error("delta", "a positive number or None", delta, "use None for none")
        if delta is not None and not clips:
            raise value_error("delta", f"None for {kind}", delta, "only clipped loss types bound the ratio")
        if region != "clip" and not clips:
            types = ", ".join(repr(name) for name, x in TYPES.items() if x.surrogate is bounded)
            raise value_error(
                "trust_region", f"'clip' for {kind}", repr(region), f"take one of the loss types {types}"
            )
        if region in OF_PROBABILITIES and self.importance_sampling_level != "token":
            raise value_error(
                "trust_region",
                f"'clip' or None with importance_sampling_level={self.importance_sampling_level!r}",
                repr(region),
                "this region compares probabilities of tokens; use importance_sampling_level='token'",
            )
        if self.cispo_min and kind != "cispo":
            raise value_error("cispo_min", f"0.0 for {kind}", self.cispo_min, "use it with loss_type='cispo'")
        if kind == "cispo" and not 0 <= self.cispo_min <= self.upper:
            raise value_error(
                "cispo_min",
                f"a number in [0, epsilon_high = {self.upper}]",
                self.cispo_min,
                "it is the lower bound of the ratio",
            )

    def _check_kl(self) -> None:
        """Check the options of the KL to the reference model."""
        if self.beta < 0:
            raise value_error("beta", "a number >= 0", self.beta, "use 0.0 for none")
        if self.kl_max is None:
            return
        if self.kl_max <= 0:
            raise value_error("kl_max", "a positive number or None", self.kl_max, "use None for none")
        if self.kl_estimator == "k3" and self.use_bias_correction_kl:
            raise value_error(
                "kl_max",
                "None for the corrected 'k3'",
                self.kl_max,
                "set use_bias_correction_kl=False, as verl does, or leave kl_max out",
            )

    def _check_gmpo(self) -> None:
        """Check the options that have no meaning for one surrogate per sequence."""
        for name, default in GMPO_DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                raise value_error(
                    name,
                    f"{default!r} for gmpo",
                    repr(value),
                    "gmpo has one geometric mean of the ratios of all tokens per sequence",
                )
        if any(correction.level == "token" for correction in self.corrections):
            raise value_error(
                "sampler_correction",
                "level='sequence' or 'geometric' for gmpo",
                "'token'",
                "gmpo has one surrogate per sequence; verl multiplies it by the geometric mean",
            )

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0 or self.ref_advantage != 0

    @property
    def by_sequence(self) -> bool:
        """Whether there is one ratio per sequence."""
        return self.importance_sampling_level != "token"

    @property
    def scope(self) -> str:
        if self.top_entropy_quantile < 1:
            return "batch"
        whole = (
            self.by_sequence or self.loss_type in OF_SEQUENCES or self.off_policy_mask_threshold is not None
        )
        whole = whole or (self.sampler_correction is not None and self.corrects_sequences)
        return "group" if whole else "token"

    @property
    def agg_mode(self) -> str:
        return self.loss_agg_mode or TYPES[self.loss_type].agg_mode

    @property
    def unit(self) -> str:
        return AGG_MODES[self.loss_agg_mode or TYPES[self.loss_type].agg_mode].unit

    @property
    def differentiates(self) -> tuple[str, ...]:
        return ("logps", "entropy") if self.entropy_coef else ("logps",)

    @property
    def metric_names(self) -> tuple[str, ...]:
        kl = ("kl",) if self.beta else ()
        return ("entropy", "importance_ratio", *kl, *TYPES[self.loss_type].metric_names)

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps = stats.logps
        detached = logps.detach()
        old_logps = detached if batch.old_logps is None else batch.old_logps
        advantages = batch.advantages
        if self.ref_advantage:
            advantages = advantages + self.ref_advantage * (batch.ref_logps - detached)
        token_log_ratio = logps - old_logps
        log_ratio = LEVELS[self.importance_sampling_level](token_log_ratio, logps, batch)
        ratio = bounded_exp(log_ratio)
        ratios = PolicyRatios(logps, old_logps, advantages, token_log_ratio, log_ratio, ratio, batch)
        values, flags = TYPES[self.loss_type].surrogate(self, ratios)
        selected = self.top_entropy_mask(stats.entropy.detach(), batch)
        if selected is not None:
            values = values * selected
        if self.off_policy_mask_threshold is not None:
            sampling = batch.old_logps if batch.sampling_logps is None else batch.sampling_logps
            drift = batch.sum_by_sequence((sampling - detached).nan_to_num(nan=0.0))
            drift = drift / batch.lengths.clamp(min=1)
            values = values * ((advantages >= 0) | batch.spread(drift <= self.off_policy_mask_threshold))
        if batch.importance_weights is not None:
            values = values * batch.importance_weights
        if self.sampler_correction is not None:
            values = values * self.sampler_weights(old_logps, batch.sampling_logps, batch)
        metrics = {"entropy": Term(stats.entropy), "importance_ratio": Term(ratio)}
        metrics |= {name: self.flag(x, batch) for name, x in flags.items()}
        if self.beta:
            d = batch.ref_logps - logps
            kl = estimated_kl(self.kl_estimator, d, self.kl_max)
            kl = self.corrected_kl(kl, d, ratio, log_ratio, batch) if self.use_bias_correction_kl else kl
            values = values + self.beta * kl
            metrics["kl"] = Term(kl)
        if self.old_kl_coef:
            values = values + old_kl(self.old_kl_coef, token_log_ratio)
        if batch.unit_weights is not None:
            values = values * batch.unit_weights
        return self.with_bonus(values, stats.entropy, selected, batch), metrics

    def corrected_kl(self, kl: Tensor, d: Tensor, ratio: Tensor, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Return kl * ratio. For k3 with a ratio of the token's own gradient, its derivative with respect to
        logp is -d * ratio.

        Autograd would compute this derivative as (kl - expm1(d)) * ratio. kl and expm1(d) are both of the
        size of exp(d), so their difference -d would lose its digits by cancellation.
        """
        plain = (kl * ratio).clamp(max=math.exp(LARGEST))
        if self.kl_estimator != "k3":
            return plain
        exact = (d < LARGEST) & (log_ratio.abs() < LARGEST) & (plain < math.exp(LARGEST))
        if self.importance_sampling_level == "sequence":
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

    def top_entropy_mask(self, entropy: Tensor, batch: Batch) -> Tensor | None:
        """(n,) 1 for the tokens with the highest entropy, 0 for all others; None if all tokens are kept."""
        if self.top_entropy_quantile >= 1:
            return None
        counted = torch.where(batch.supervised, entropy, math.nan)
        all_tokens = batch.all_gather_tokens(counted)
        if not all_tokens.shape[0]:
            return None
        # The same tokens as `counted >= torch.nanquantile(...)`, which torch 2.11 cannot trace with symbolic
        # sizes. The rank is rounded in the dtype of the entropy, as there.
        ordered = all_tokens.sort().values  # NaN last
        last = (~ordered.isnan()).sum() - 1
        rank = ((1 - self.top_entropy_quantile) * last.to(ordered.dtype)).ceil().long()
        rank = torch.minimum(rank, last).clamp(min=0)  # fp32 rounds more than 2^24 tokens
        return (counted >= ordered.gather(0, rank.view(1))).to(entropy.dtype)

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
        **arguments: Unpack[RolloutInputs],
    ) -> LossOutput:
        return super().__call__(hidden, weight, targets, **arguments)

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
        if self.sampler_correction is not None:
            self.check_sampling(sampling_logps)
        if self.old_kl_coef:
            require_old_logps(old_logps)
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
        weights = AGG_MODES[self.agg_mode].weights
        if weights is not None:
            inputs["unit_weights"] = layout.spread(weights(layout, self.max_completion_length))
        inputs["entropy_weight"] = layout.share if self.entropy_coef else None
        if self.loss_type == "gmpo":
            for name, x in (("advantages", advantages), ("importance_weights", importance_weights)):
                if x is not None and not layout.is_per_sequence(name, x):
                    expected = f"shape ({layout.sequences},), one per sequence, for gmpo"
                    remedy = "gmpo has one surrogate per sequence"
                    raise value_error(name, expected, tuple(x.shape), remedy)
        # If all tokens of a sequence have the same flag, it counts once per sequence; None: once per token.
        whole = self.by_sequence or self.loss_type == "vespo"
        if whole and not self.ref_advantage and layout.is_per_sequence("advantages", advantages):
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
