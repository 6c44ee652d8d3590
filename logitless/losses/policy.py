"""Policy losses of reinforcement learning: the GRPO family, RLOO, PPO and REINFORCE, token by token.

They take sequences, padded `(B, T)` or packed with `cu_seqlens`, of which the tokens count whose target is not `ignore_index` and whose
`mask` is on. Advantages come per sequence or per token.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from logitless.kernels.cross_entropy import TokenStats
from logitless.losses.arguments import shifted
from logitless.losses.base import LossOutput, TokenLoss
from logitless.losses.batch import Batch, Term
from logitless.losses.checks import check_choice, expect
from logitless.losses.paired import LARGEST, bounded_exp

# VESPO's bounds on the log of a sequence's weight.
SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT = math.log(1e-8), 20.0


class Layout:
    """Where a call's tokens and sequences lie: spreads what comes per sequence over its tokens."""

    def __init__(self, hidden: Tensor, targets: Tensor, ignore_index: int, cu_seqlens: Tensor | None, shift: bool):
        self.shift, self.packed = shift, cu_seqlens is not None
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.targets = shifted(targets, ignore_index) if shift else targets
        self.counted = self.targets != ignore_index
        expect(self.packed or targets.dim() == 2, "targets", "shape (B, T)", tuple(targets.shape), "or pass flat tokens with cu_seqlens")
        self.sequences = cu_seqlens.shape[0] - 1 if self.packed else targets.shape[0]
        if self.packed:
            positions = torch.arange(targets.shape[0], device=targets.device)
            self.number = torch.searchsorted(cu_seqlens[1:].to(targets.device), positions, right=True).clamp(max=self.sequences - 1)

    def is_per_sequence(self, x: Tensor) -> bool:
        return x.shape in ((self.sequences,), (self.sequences, 1)) and (x.dim() == 1 or self.targets.shape != x.shape)

    def spread(self, x: Tensor) -> Tensor:
        """(B,) -> targets' shape."""
        return x.reshape(-1)[self.number] if self.packed else x.reshape(-1, 1).expand(self.targets.shape)

    def per_token(self, name: str, x: Tensor, *, per_sequence: bool = False, fill: float = 0.0) -> Tensor:
        """In targets' shape, `fill` where a token does not count, whatever was there."""
        if per_sequence and self.is_per_sequence(x):
            x = self.spread(x)
        else:
            # One f-string: Dynamo concatenates no strings that depend on a dynamic shape.
            either = f"{tuple(self.targets.shape)} or ({self.sequences},)" if per_sequence else f"{tuple(self.targets.shape)}"
            expected = f"targets' shape {either}"
            expect(x.shape == self.targets.shape, name, expected, tuple(x.shape), "align it with the targets")
            x = shifted(x, fill) if self.shift else x
        return torch.where(self.counted, x.detach().to(self.dtype), fill)

    def lengths(self) -> Tensor:
        """(B,) counted tokens of each sequence, at least 1."""
        counted = self.counted.to(self.dtype)
        if self.packed:
            lengths = counted.new_zeros(self.sequences).index_add_(0, self.number, counted)
        else:
            lengths = counted.sum(1)
        return lengths.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(TokenLoss):
    """What policy losses share: who counts, and what comes per sequence."""

    token_inputs: ClassVar = ("advantages",)
    observes: ClassVar = ("entropy",)

    def laid_out(self, layout: Layout, advantages: Tensor, **given: Tensor | None) -> dict[str, Tensor | None]:
        """The declared inputs from those of the call."""
        raise NotImplementedError

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, advantages: Tensor, mask: Tensor | None = None,
        num_items: float | Tensor | None = None, bias: Tensor | None = None, cu_seqlens: Tensor | None = None, shift: bool = False,
        accumulate_into: Tensor | None = None, grad_scale: float = 1.0, **given: Tensor | None,
    ) -> LossOutput:  # fmt: skip
        if mask is not None:
            expect(mask.shape == targets.shape, "mask", f"targets' shape {tuple(targets.shape)}", tuple(mask.shape), "one entry per target")
            targets = torch.where(mask.bool(), targets, self.ignore_index)
        layout = Layout(hidden, targets, self.ignore_index, cu_seqlens, shift)
        inputs = self.laid_out(layout, advantages, **given)
        return super().__call__(
            hidden, weight, layout.targets, num_items=num_items, bias=bias, cu_seqlens=cu_seqlens, accumulate_into=accumulate_into,
            grad_scale=grad_scale, **inputs,
        )  # fmt: skip


# -- Surrogates of a token, by TRL's name: (loss, ratio, advantages, logps, phi) -> (surrogate, what to count)


def clipped(loss: "GRPOLoss", ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
    bounded = ratio.clamp(1 - loss.epsilon, 1 + loss.upper)
    if loss.delta is not None:
        ratio = ratio.clamp(max=loss.delta)
    low = ((ratio < 1 - loss.epsilon) & (advantages < 0)).to(ratio.dtype)
    high = ((ratio > 1 + loss.upper) & (advantages > 0)).to(ratio.dtype)
    flags = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    return -torch.minimum(ratio * advantages, bounded * advantages), flags


def cispo(loss: "GRPOLoss", ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
    clipped = {"cispo_clip_ratio": (ratio > loss.upper) & (advantages > 0)}
    return -ratio.detach().clamp(max=loss.upper) * advantages * logps, clipped


def sapo(loss: "GRPOLoss", ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
    tau = by_sign(advantages > 0, loss.sapo_temperature_pos, loss.sapo_temperature_neg, logps)
    return -4 / tau * (tau * (ratio - 1)).sigmoid() * advantages, {}


def vespo(loss: "GRPOLoss", ratio: Tensor, advantages: Tensor, logps: Tensor, phi: Tensor | None):
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
FLAGS = {
    clipped: ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    cispo: ("cispo_clip_ratio",),
    sapo: (),
    vespo: ("vespo/phi_seq_mean",),
}
PER_SEQUENCE = ("grpo", "sapo", "luspo", "dr_grpo")
LEVELS = ("token", "sequence")


def by_sign(condition: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    """`torch.where` of two numbers in the dtype of `like`."""
    return negative + (positive - negative) * condition.to(like.dtype)


@dataclass(frozen=True, kw_only=True)
class GRPOLoss(PolicyLoss):
    """Group relative policy optimization and its descendants. With r = exp(logp - old_logp), per token:

        grpo, bnpo, dr_grpo, dapo, luspo   -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)
        cispo                              -sg(min(r, epsilon_high)) A logp
        sapo                               -4/tau sigmoid(tau (r - 1)) A
        vespo                              -sg(w^k exp(lambda (1 - w))) A logp,  w the product of a sequence's ratios

    plus beta * kl, kl = exp(d) - d - 1 with d = ref_logp - logp (k3), minus entropy_coef * entropy. The mean is over sequences of means
    of their tokens (grpo, sapo), of sums (luspo) or of sums over max_completion_length (dr_grpo), or over tokens (the others).

    Args:
        loss_type: one of these; TRL's default is "dapo". "bnpo" with advantages per token is PPO-clip.
        beta: weight of the KL to the reference, which then must come as `ref_logps`.
        epsilon, epsilon_high: clip range of the ratio; `epsilon_high` defaults to `epsilon`. cispo bounds the ratio itself by
            `epsilon_high`, which should be above 1.
        delta: upper bound of the ratio where the advantage is negative (INTELLECT-2); None for none.
        importance_sampling_level: "token", or "sequence" for one ratio per sequence, exp of the mean of its log-ratios (GSPO).
        entropy_coef: weight of the entropy bonus, a mean over the call's tokens, differentiated.
        use_bias_correction_kl: multiply the KL by the ratio.
        top_entropy_quantile: share of the tokens, those of highest entropy, that the surrogate and the bonus keep.
        off_policy_mask_threshold: drop sequences of negative advantage whose tokens the sampler found likelier than this, on average.
        max_completion_length: of dr_grpo.
        sapo_temperature_neg, sapo_temperature_pos: tau by the sign of the advantage.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: k and lambda by the sign of the advantage.

    The call takes hidden (B, T, H), targets (B, T), or packed, and by keyword `advantages` (B,) or like targets; `mask`, `old_logps`
    (None: on policy, r = 1 with the right gradient), `ref_logps` and `sampling_logps` like targets; `importance_weights` (old over
    sampler's probability) like targets or (B,); `num_items`, in tokens or sequences as the loss type has it. Log-ratios are clamped to
    +-80 before exp.

    Metrics: entropy, importance_ratio, kl, clip_ratio/low_mean, clip_ratio/high_mean, clip_ratio/region_mean, cispo_clip_ratio,
    vespo/phi_seq_mean, as they apply. `return_logps=True` hands the log-probabilities back, so that a trainer need not compute them.

    References: Shao et al., 2024, https://arxiv.org/abs/2402.03300; Liu et al. (dr_grpo), 2025, https://arxiv.org/abs/2503.20783; Yu et
    al. (dapo), 2025, https://arxiv.org/abs/2503.14476; MiniMax (cispo), 2025, https://arxiv.org/abs/2506.13585; Zheng et al. (GSPO),
    2025, https://arxiv.org/abs/2507.18071; sapo https://arxiv.org/abs/2511.20347; luspo https://arxiv.org/abs/2602.05261; vespo
    https://arxiv.org/abs/2602.10693; Wang et al. (top_entropy_quantile), 2025, https://arxiv.org/abs/2506.01939.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
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
        "advantages", "old_logps", "ref_logps", "sampling_logps", "importance_weights", "log_importance", "unit_weights", "flag_weights",
    )  # fmt: skip
    shared_inputs: ClassVar = ("entropy_weight",)

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, SURROGATES)
        check_choice("importance_sampling_level", self.importance_sampling_level, LEVELS)
        super().__post_init__()
        expect(self.epsilon >= 0, "epsilon", "a number >= 0", self.epsilon, "TRL's default is 0.2")
        expect(self.upper >= 0, "epsilon_high", "a number >= 0 or None", self.epsilon_high, "leave it None for epsilon")
        expect(self.delta is None or self.delta > 0, "delta", "a positive number or None", self.delta, "use None for none")
        bounded = self.delta is None or SURROGATES[self.loss_type] is clipped
        expect(bounded, "delta", f"None for {self.loss_type}", self.delta, "it bounds the ratio of the clipped types alone")
        expect(self.beta >= 0, "beta", "a number >= 0", self.beta, "use 0.0 for none")
        quantile = 0 <= self.top_entropy_quantile <= 1
        expect(quantile, "top_entropy_quantile", "a number in [0, 1]", self.top_entropy_quantile, "use 1.0 to keep every token")
        limited = self.loss_type != "dr_grpo" or (self.max_completion_length or 0) > 0
        expect(
            limited, "max_completion_length", "a positive number for dr_grpo", self.max_completion_length, "it is the divisor of its sums"
        )
        positive = self.sapo_temperature_neg > 0 and self.sapo_temperature_pos > 0
        got = (self.sapo_temperature_neg, self.sapo_temperature_pos)
        expect(positive, "sapo_temperature", "two positive numbers", got, "TRL's are 1.05 and 1.0")

    @property
    def upper(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def by_sequence(self) -> bool:
        """Whether one ratio serves a whole sequence."""
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
        logps, advantages, detached = stats.logps, batch.advantages, stats.logps.detach()
        log_ratio = logps - (detached if batch.old_logps is None else batch.old_logps)
        if self.by_sequence:
            ratio = batch.spread(bounded_exp(batch.sum_by_sequence(log_ratio) / batch.lengths.clamp(min=1)))
        else:
            ratio = bounded_exp(log_ratio)
        phi = self.phi(log_ratio.detach(), batch) if self.loss_type == "vespo" else None
        values, flags = SURROGATES[self.loss_type](self, ratio, advantages, logps, phi)

        kept = self.kept(stats.entropy.detach(), batch)
        if kept is not None:
            values = values * kept
        if self.off_policy_mask_threshold is not None:
            sampling = batch.old_logps if batch.sampling_logps is None else batch.sampling_logps
            drift = batch.sum_by_sequence((sampling - detached).nan_to_num(nan=0.0)) / batch.lengths.clamp(min=1)
            values = values * ((advantages >= 0) | batch.spread(drift <= self.off_policy_mask_threshold))
        if batch.importance_weights is not None and phi is None:
            values = values * batch.importance_weights
        metrics = {"entropy": Term(stats.entropy), "importance_ratio": Term(ratio)}
        metrics |= {name: Term(x * batch.flag_weights, over=None) for name, x in flags.items()}
        if self.beta:
            d = (batch.ref_logps - logps).clamp(max=LARGEST)
            kl = torch.expm1(d) - d
            kl = (kl * ratio).clamp(max=math.exp(LARGEST)) if self.use_bias_correction_kl else kl
            values = values + self.beta * kl
            metrics["kl"] = Term(kl)
        if batch.unit_weights is not None:
            values = values * batch.unit_weights
        return self.with_bonus(values, stats.entropy, kept, batch), metrics

    def phi(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """VESPO's weight of a token, from the product of its sequence's ratios; without gradient."""
        log_w = batch.sum_by_sequence(log_ratio.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT))
        if batch.log_importance is not None:
            log_w = log_w + batch.sum_by_sequence(batch.log_importance)
        log_w = batch.spread(log_w.clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT))
        positive = batch.advantages >= 0
        k = by_sign(positive, self.vespo_k_pos, self.vespo_k_neg, log_w)
        decay = by_sign(positive, self.vespo_lambda_pos, self.vespo_lambda_neg, log_w).clamp(min=1e-4)
        return (decay + k * log_w - decay * log_w.exp()).exp()

    def kept(self, entropy: Tensor, batch: Batch) -> Tensor | None:
        """1 for the tokens of highest entropy, 0 for the others; None to keep all."""
        if self.top_entropy_quantile >= 1 or not entropy.shape[0]:
            return None
        counted = torch.where(batch.supervised, entropy, math.nan)
        return (counted >= torch.nanquantile(counted, 1 - self.top_entropy_quantile)).to(entropy.dtype)

    def with_bonus(self, values: Tensor, entropy: Tensor, kept: Tensor | None, batch: Batch) -> dict[str, Term]:
        """The loss's terms: one value per unit if nothing is to be reduced, else the surrogate and the entropy's mean apart."""
        entropy = entropy if kept is None else entropy * kept
        if self.reduction == "none":
            values = values - self.entropy_coef * entropy if self.entropy_coef else values
            return {"policy": Term(batch.sum_by_sequence(values) if self.unit == "sequences" else values, over=self.unit)}
        terms = {"policy": Term(values, over=self.unit)}
        if self.entropy_coef:
            weight = 1.0 if self.reduction == "sum" else batch.entropy_weight if kept is None else 1 / kept.sum().clamp(min=1)
            terms["entropy"] = Term(-self.entropy_coef * weight * entropy, over=None)
        return terms

    def laid_out(
        self, layout: Layout, advantages: Tensor, *, old_logps: Tensor | None = None, ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None, importance_weights: Tensor | None = None,
    ) -> dict[str, Tensor | None]:  # fmt: skip
        if self.beta:
            expect(ref_logps is not None, "ref_logps", "log-probabilities (beta > 0)", None, "pass them, or beta=0.0")
        if self.off_policy_mask_threshold is not None:
            known = old_logps is not None or sampling_logps is not None
            expect(known, "off_policy_mask_threshold", "old_logps or sampling_logps beside it", None, "pass one, or leave it None")
        inputs = {"old_logps": old_logps, "ref_logps": ref_logps, "sampling_logps": sampling_logps}
        inputs = {name: layout.per_token(name, x) for name, x in inputs.items() if x is not None}
        inputs["advantages"] = layout.per_token("advantages", advantages, per_sequence=True)
        lengths = layout.lengths()
        inputs["entropy_weight"] = 1 / layout.counted.sum().clamp(min=1).to(layout.dtype)
        if self.loss_type in ("grpo", "sapo"):
            inputs["unit_weights"] = layout.spread(1 / lengths)
        elif self.loss_type == "dr_grpo":
            inputs["unit_weights"] = layout.spread(torch.full_like(lengths, 1 / self.max_completion_length))
        # A number that a whole sequence shares is counted once.
        once = layout.is_per_sequence(advantages) and (self.by_sequence or self.loss_type == "vespo")
        share = 1 / (lengths * layout.sequences) if once else inputs["entropy_weight"].expand(layout.sequences)
        inputs["flag_weights"] = layout.spread(share)
        if importance_weights is None:
            return inputs
        if self.loss_type != "vespo":
            return inputs | {"importance_weights": layout.per_token("importance_weights", importance_weights, per_sequence=True)}
        logs = importance_weights.to(layout.dtype).log().clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        # One factor of a sequence, which its tokens share.
        logs = logs.reshape(-1) / lengths if layout.is_per_sequence(logs) else logs
        return inputs | {"log_importance": layout.per_token("importance_weights", logs, per_sequence=True)}


@dataclass(frozen=True, kw_only=True)
class PPOLoss(GRPOLoss):
    """PPO-clip: `GRPOLoss` of type "bnpo", with advantages per token.

        mean of -min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) over the tokens

    Reference: Schulman et al., 2017, https://arxiv.org/abs/1707.06347.
    """

    loss_type: str = "bnpo"


@dataclass(frozen=True, kw_only=True)
class RLOOLoss(PolicyLoss):
    """REINFORCE leave-one-out, with a clipped ratio of whole sequences: r = exp(sum logp - sum old_logp).

        mean of -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) over the sequences

    Args:
        epsilon, epsilon_high: clip range; `epsilon_high` defaults to `epsilon`.

    The call takes what `GRPOLoss` takes, of which it uses `advantages` (B,), `mask`, `old_logps` (like targets, or (B,) sums) and
    `num_items`, in sequences. A KL to a reference belongs into the reward. Metrics: entropy, importance_ratio, clip_ratio/*.

    Reference: Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None

    delta: ClassVar = None
    scope: ClassVar = "group"
    unit: ClassVar = "sequences"
    sequence_inputs: ClassVar = ("sequence_advantages", "old_sums")
    token_inputs: ClassVar = ("old_logps",)
    metric_names: ClassVar = ("entropy", "importance_ratio", *FLAGS[clipped])

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.epsilon >= 0, "epsilon", "a number >= 0", self.epsilon, "TRL's default is 0.2")
        expect(self.upper >= 0, "epsilon_high", "a number >= 0 or None", self.epsilon_high, "leave it None for epsilon")

    upper = GRPOLoss.upper

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps, advantages = batch.sum_by_sequence(stats.logps), batch.sequence_advantages
        old = logps.detach()
        if batch.old_sums is not None:
            old = batch.old_sums
        elif batch.old_logps is not None:
            old = batch.sum_by_sequence(batch.old_logps)
        # An empty sequence has neither a ratio nor a loss.
        filled = (batch.lengths > 0).to(logps.dtype)
        ratio = bounded_exp((logps - old) * filled)
        values, flags = clipped(self, ratio, advantages * filled, logps, None)
        metrics = {name: Term(flag, over="sequences") for name, flag in flags.items()}
        metrics |= {"entropy": Term(stats.entropy), "importance_ratio": Term(batch.spread(ratio))}
        return {"policy": Term(values, over="sequences")}, metrics

    def laid_out(self, layout: Layout, advantages: Tensor, *, old_logps: Tensor | None = None) -> dict[str, Tensor | None]:
        whole = layout.is_per_sequence(advantages)
        expect(whole, "advantages", f"shape ({layout.sequences},), one per sequence", tuple(advantages.shape), "rewards are of sequences")
        inputs = {"sequence_advantages": advantages.detach().reshape(-1).to(layout.dtype)}
        if old_logps is None:
            return inputs
        if layout.is_per_sequence(old_logps):
            return inputs | {"old_sums": old_logps.detach().reshape(-1).to(layout.dtype)}
        return inputs | {"old_logps": layout.per_token("old_logps", old_logps)}


@dataclass(frozen=True, kw_only=True)
class REINFORCELoss(PolicyLoss):
    """The policy gradient's own loss: mean of -A logp over the tokens. Subtract the baseline from the advantages.

    The call takes `advantages` (B,) or like targets, `mask` and `num_items`, in tokens. Metric: entropy.

    Reference: Williams, 1992, https://doi.org/10.1007/BF00992696.
    """

    metric_names: ClassVar = ("entropy",)

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        return {"policy": Term(-batch.advantages * stats.logps)}, {"entropy": Term(stats.entropy)}

    def laid_out(self, layout: Layout, advantages: Tensor) -> dict[str, Tensor | None]:
        return {"advantages": layout.per_token("advantages", advantages, per_sequence=True)}
