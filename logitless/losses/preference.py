"""Preference losses: DPO and its family, ORPO, CPO, SimPO and KTO, from the log-probabilities of whole sequences.

All but KTO take pairs: B chosen sequences first, then the B rejected ones, padded `(2B, T)` or packed with `cu_seqlens`. Prompts and
padding are masked by `ignore_index` in the targets. Log-probabilities of a sequence are sums over its supervised tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from logitless.kernels.cross_entropy import TokenStats
from logitless.losses.arguments import resolved
from logitless.losses.base import LossOutput
from logitless.losses.batch import Batch, Term
from logitless.losses.checks import check_choice, expect
from logitless.losses.logprobs import linear_logprobs
from logitless.losses.paired import (
    PairedLoss,
    ReferencedLoss,
    UnreferencedLoss,
    bounded_exp,
    check_reference,
    pair_metrics,
    preference_metrics,
)

# Below any mean log-probability that fp32 can tell from 0: the odds p / (1 - p) stay finite.
CERTAIN = -1e-7


def smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """-log sigma(x), where a share of the labels may be flipped."""
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


# -- DPO and its family


class Pairs(NamedTuple):
    """Numbers (pairs,) of each pair: policy, reference, their log-ratios, the f-divergence scores of these, and lengths."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    @property
    def chosen(self) -> Tensor:
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected(self) -> Tensor:
        return self.rejected_logps - self.ref_rejected_logps

    @property
    def delta(self) -> Tensor:
        return self.chosen_scores - self.rejected_scores

    @property
    def mean_delta(self) -> Tensor:
        return self.chosen_scores / self.chosen_lengths - self.rejected_scores / self.rejected_lengths


def exo_pair(loss: "DPOLoss", p: Pairs) -> Tensor:
    x, epsilon = loss.beta * p.delta, loss.label_smoothing
    better = x.sigmoid() * (logsigmoid(x) - math.log1p(-epsilon))
    return better + (-x).sigmoid() * (logsigmoid(-x) - math.log(epsilon))


def nca_pair(loss: "DPOLoss", p: Pairs) -> Tensor:
    better, worse = loss.beta * p.chosen, loss.beta * p.rejected
    return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)


def robust(loss: "DPOLoss", p: Pairs) -> Tensor:
    x, epsilon = loss.beta * p.delta, loss.label_smoothing
    return (epsilon * logsigmoid(-x) - (1 - epsilon) * logsigmoid(x)) / (1 - 2 * epsilon)


def aot(loss: "DPOLoss", p: Pairs) -> Tensor:
    policy, reference = p.chosen_logps - p.rejected_logps, p.ref_chosen_logps - p.ref_rejected_logps
    return smoothed(loss.beta * (policy.sort().values - reference.sort().values), loss.label_smoothing)


def aot_unpaired(loss: "DPOLoss", p: Pairs) -> Tensor:
    return smoothed(loss.beta * (p.chosen.sort().values - p.rejected.sort().values), loss.label_smoothing)


def discopop(loss: "DPOLoss", p: Pairs) -> Tensor:
    x = loss.beta * p.delta
    gate = (x / loss.discopop_tau).sigmoid()
    return (gate - 1) * logsigmoid(x) + gate * bounded_exp(-x)


# Losses of a pair by TRL's name. "sft" is counted in tokens and stands apart in `DPOLoss.terms`.
DPO_LOSSES: Mapping[str, Callable[["DPOLoss", Pairs], Tensor]] = {
    "sigmoid": lambda loss, p: smoothed(loss.beta * p.delta, loss.label_smoothing),
    "hinge": lambda loss, p: relu(1 - loss.beta * p.delta),
    "ipo": lambda loss, p: (p.mean_delta - 0.5 / loss.beta).square(),
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": lambda loss, p: -logsigmoid(loss.beta * p.chosen) - logsigmoid(-loss.beta * p.rejected),
    "sppo_hard": lambda loss, p: (p.chosen - 0.5 / loss.beta).square() + (p.rejected + 0.5 / loss.beta).square(),
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": lambda loss, p: (-loss.beta * p.chosen).sigmoid() + (loss.beta * p.rejected).sigmoid(),
    "apo_down": lambda loss, p: (loss.beta * p.chosen).sigmoid() + (loss.beta * (p.rejected - p.chosen)).sigmoid(),
    "discopop": discopop,
    "sigmoid_norm": lambda loss, p: -logsigmoid(loss.beta * p.mean_delta),
}
DPO_TYPES = (*DPO_LOSSES, "sft")
# Those that sort over the batch.
SORTED = {"aot", "aot_unpaired"}
# The partition function of a divergence other than reverse KL cancels in the difference of the two scores alone.
DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")


def alpha_divergence(loss: "DPOLoss", ratios: Tensor) -> Tensor:
    power = loss.f_alpha_divergence_coef - 1
    return ratios if abs(power) < 1e-6 else (bounded_exp(power * ratios) - 1) / power


# f'(t) of each divergence at t = exp(log-ratio).
DIVERGENCES: Mapping[str, Callable[["DPOLoss", Tensor], Tensor]] = {
    "reverse_kl": lambda loss, ratios: ratios,
    "forward_kl": lambda loss, ratios: 1 - bounded_exp(-ratios),
    "js_divergence": lambda loss, ratios: math.log(2) + logsigmoid(ratios),
    "alpha_divergence": alpha_divergence,
}


@dataclass(frozen=True, kw_only=True)
class DPOLoss(ReferencedLoss, PairedLoss):
    """Direct preference optimization and its family: pairs of a chosen and a rejected sequence, beside a reference model.

        sigmoid: -log sigma(beta * ((log p_c - log p_c^ref) - (log p_r - log p_r^ref)))

    Args:
        beta: strength of the pull towards the reference.
        loss_type: one of TRL's names, or several that are summed with `loss_weights` (default 1 each): sigmoid, hinge (SLiC), ipo,
            exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sigmoid_norm, and sft, the
            mean NLL of the chosen tokens.
        label_smoothing: share of flipped labels; cDPO for "sigmoid", and the parameter of exo_pair, robust, aot and aot_unpaired.
        f_divergence_type, f_alpha_divergence_coef: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence" (f-DPO).
        ld_alpha: weight of the tokens beyond the shorter sequence of a pair (LD-DPO); None for 1.
        use_weighting: weigh pairs by the policy's own probability of them (WPO).
        discopop_tau: temperature of discopop's gate.
        reference_free: take the reference's log-probabilities as 0.

    The call takes hidden (2B, T, H), targets (2B, T), the chosen sequences first; or hidden (N, H), targets (N,) and `cu_seqlens`
    (2B + 1,). Besides those of every loss it takes one of `ref_logps` ((2B,) per sequence, with `ld_alpha` already weighted; or per
    token, in targets' shape) and `ref_hidden` with `ref_weight` (V, H') and `ref_bias` (V,), which get no gradient. `num_items` is the
    number of pairs. Metrics carry TRL's names: rewards/*, logps/* (sums), logits/* (over completion tokens), entropy,
    mean_token_accuracy and nll_loss (chosen tokens).

    References: Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; the others at TRL's `DPOConfig.loss_type`.
    """

    beta: float = 0.1
    loss_type: str | Sequence[str] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False
    discopop_tau: float = 0.05
    reference_free: bool = False

    def __post_init__(self) -> None:
        names = (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)
        expect(len(names) > 0, "loss_type", "at least one name", names, f"pick among {', '.join(DPO_TYPES)}")
        for name in names:
            check_choice("loss_type", name, DPO_TYPES)
        weights = (1.0,) * len(names) if self.loss_weights is None else tuple(map(float, self.loss_weights))
        expect(len(weights) == len(names), "loss_weights", f"{len(names)} numbers, one per loss_type", len(weights), "give each its weight")
        object.__setattr__(self, "loss_type", names)
        object.__setattr__(self, "loss_weights", weights)
        super().__post_init__()
        check_choice("f_divergence_type", self.f_divergence_type, DIVERGENCES)
        expect(self.beta > 0, "beta", "a positive number", self.beta, "TRL's default is 0.1")
        expect(0 <= self.label_smoothing <= 1, "label_smoothing", "a number in [0, 1]", self.label_smoothing, "use 0.0 for none")
        expect(self.discopop_tau > 0, "discopop_tau", "a positive number", self.discopop_tau, "the paper's is 0.05")
        expect(self.ld_alpha is None or 0 <= self.ld_alpha <= 1, "ld_alpha", "a number in [0, 1] or None", self.ld_alpha, "use None for 1")
        if "exo_pair" in names:
            fits = 0 < self.label_smoothing < 1
            expect(fits, "label_smoothing", "a number in (0, 1) for exo_pair", self.label_smoothing, "the paper's is 1e-3")
        if "robust" in names:
            expect(self.label_smoothing < 0.5, "label_smoothing", "less than 0.5 for robust", self.label_smoothing, "the paper's is 0.1")
        unfit = [name for name in names if name not in DIFFERENCES] if self.f_divergence_type != "reverse_kl" else []
        expect(not unfit, "f_divergence_type", f"'reverse_kl' for {unfit}", repr(self.f_divergence_type), "others fit differences alone")
        unfit = sorted(SORTED & set(names)) if self.use_weighting else []
        expect(not unfit, "use_weighting", f"False for {unfit}", True, "a sorted loss belongs to no pair that could be weighed")

    @property
    def scope(self) -> str:
        return "batch" if SORTED & set(self.loss_type) else "group"

    @property
    def observes(self) -> tuple[str, ...]:
        return (*super().observes, "log_sum_sq_probs") if self.use_weighting else super().observes

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        pairs = self.pairs(stats, batch)
        values = sum(
            weight * DPO_LOSSES[name](self, pairs) for name, weight in zip(self.loss_type, self.loss_weights, strict=True) if name != "sft"
        )
        factor = self.pair_weights(stats, batch)
        terms = {"dpo": Term(values * factor, over="pairs")} if isinstance(values, Tensor) else {}
        if "sft" in self.loss_type:
            weight = sum(weight for name, weight in zip(self.loss_type, self.loss_weights, strict=True) if name == "sft")
            factor = batch.spread(torch.cat((factor, factor))) if self.use_weighting else 1.0
            terms["sft"] = Term(-weight * factor * stats.logps * batch.is_chosen, over="chosen_tokens")
        rewards = self.beta * pairs.chosen, self.beta * pairs.rejected
        metrics = pair_metrics((pairs.chosen_logps, pairs.rejected_logps), rewards)
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen)

    def pairs(self, stats: TokenStats, batch: Batch) -> Pairs:
        weights = None
        if self.ld_alpha is not None:
            shared = torch.minimum(*batch.lengths.chunk(2))
            beyond = batch.positions >= batch.spread(torch.cat((shared, shared)))
            weights = 1 - (1 - self.ld_alpha) * beyond.to(stats.logps.dtype)
        policy = batch.sum_by_sequence(stats.logps if weights is None else stats.logps * weights)
        reference = self.sequence_ref_logps(batch, weights) if self.needs_reference else torch.zeros_like(policy)
        scores = DIVERGENCES[self.f_divergence_type](self, policy - reference)
        lengths = batch.lengths.clamp(min=1).to(policy.dtype)
        return Pairs(*policy.chunk(2), *reference.chunk(2), *scores.chunk(2), *lengths.chunk(2))

    def pair_weights(self, stats: TokenStats, batch: Batch) -> Tensor | float:
        """WPO's weight of each pair: exp of the mean of log p - log sum p^2, over either sequence."""
        if not self.use_weighting:
            return 1.0
        aligned = batch.sum_by_sequence(stats.logps.detach() - stats.log_sum_sq_probs)
        chosen, rejected = (aligned / batch.lengths.clamp(min=1)).chunk(2)
        return bounded_exp(chosen + rejected)


# -- Losses without a reference


@dataclass(frozen=True, kw_only=True)
class ORPOLoss(UnreferencedLoss):
    """Odds-ratio preference optimization: NLL of the chosen tokens, and the odds of the chosen sequence against the rejected one.

        NLL - beta * log sigma(log odds_c - log odds_r),    odds = p / (1 - p),  log p the mean log-probability of a sequence

    Args:
        beta: weight of the odds ratio (lambda in the paper).

    The call takes what `DPOLoss` takes, without a reference, and `nll_targets`, in targets' shape: the labels of the NLL where they are
    more than the completion (TRL's ORPO counts the prompt as well); they must hold the completion's own. `num_items` is the number of
    pairs; the NLL is a mean over the chosen tokens of the call. A mean log-probability closer to 0 than 1e-7 counts as -1e-7.

    Metrics: as `DPOLoss` (logps/* are means), log_odds_ratio and log_odds_chosen.

    Reference: Hong et al., 2024, https://arxiv.org/abs/2403.07691.
    """

    beta: float = 0.1

    token_inputs: ClassVar = ("completion",)
    metric_names: ClassVar = (*PairedLoss.metric_names, "log_odds_ratio", "log_odds_chosen")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps, lengths = stats.logps, batch.lengths
        if batch.completion is not None:
            logps, lengths = logps * batch.completion, batch.sum_by_sequence(batch.completion.to(logps.dtype))
        means = batch.sum_by_sequence(logps) / lengths.clamp(min=1)
        chosen, rejected = means.chunk(2)
        certain = means.clamp(max=CERTAIN)
        log_odds = torch.sub(*(certain - torch.log(-torch.expm1(certain))).chunk(2))
        ratio = logsigmoid(log_odds)
        terms = {
            "nll": Term(-stats.logps * batch.is_chosen, over="chosen_tokens"),
            "odds_ratio": Term(-self.beta * ratio, over="pairs"),
        }
        metrics = pair_metrics((chosen, rejected), (self.beta * chosen, self.beta * rejected))
        metrics |= {"log_odds_ratio": Term(ratio, over="pairs"), "log_odds_chosen": Term(log_odds, over="pairs")}
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen, batch.completion)

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, nll_targets: Tensor | None = None, shift: bool = False, **arguments
    ) -> LossOutput:
        completion = None
        if nll_targets is not None:
            expect(
                nll_targets.shape == targets.shape, "nll_targets", f"targets' shape {tuple(targets.shape)}", tuple(nll_targets.shape),
                "give a label or ignore_index per token",
            )  # fmt: skip
            completion = targets != self.ignore_index
            # Rejected sequences have no NLL, so that their prompts need no logits.
            first = torch.arange(targets.shape[0], device=targets.device) < _first_rejected(targets, arguments.get("cu_seqlens"))
            more = torch.where(first.view(-1, *[1] * (targets.dim() - 1)), nll_targets, self.ignore_index)
            targets = torch.where(completion, targets, more)
        return super().__call__(hidden, weight, targets, completion=completion, shift=shift, **arguments)


def _first_rejected(targets: Tensor, cu_seqlens: Tensor | None) -> int | Tensor:
    """Where the rejected half starts along the first dimension."""
    return targets.shape[0] // 2 if cu_seqlens is None else cu_seqlens[cu_seqlens.shape[0] // 2]


CPO_LOSSES: Mapping[str, Callable[["CPOLoss", Tensor], Tensor]] = {
    "sigmoid": lambda loss, delta: smoothed(loss.beta * delta, loss.label_smoothing),
    "hinge": lambda loss, delta: relu(1 - loss.beta * delta),
    "ipo": lambda loss, delta: (delta - 0.5 / loss.beta).square(),
    "simpo": lambda loss, delta: smoothed(loss.beta * delta - loss.simpo_gamma, loss.label_smoothing),
}


@dataclass(frozen=True, kw_only=True)
class CPOLoss(UnreferencedLoss):
    """Contrastive preference optimization: a preference loss without a reference, and the NLL of the chosen tokens.

        loss(log p_c - log p_r) + cpo_alpha * NLL

    Args:
        beta: scale of the difference.
        loss_type: "sigmoid", "hinge", "ipo" or "simpo"; the last two take mean log-probabilities instead of sums.
        label_smoothing: share of flipped labels, for "sigmoid" and "simpo".
        cpo_alpha: weight of the NLL.
        simpo_gamma: target margin of "simpo".
        alpha: AlphaPO's reward (1 - p^-alpha) / alpha in place of log p; 0 for log p.

    The call takes what `DPOLoss` takes, without a reference; the metrics are the same.

    References: Xu et al., 2024, https://arxiv.org/abs/2401.08417; SimPO, Meng et al., 2024, https://arxiv.org/abs/2405.14734; AlphaPO,
    Gupta et al., 2025, https://arxiv.org/abs/2501.03884.
    """

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5
    alpha: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss_type", self.loss_type, CPO_LOSSES)
        expect(self.beta > 0, "beta", "a positive number", self.beta, "TRL's default is 0.1")
        expect(0 <= self.label_smoothing <= 1, "label_smoothing", "a number in [0, 1]", self.label_smoothing, "use 0.0 for none")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps = batch.sum_by_sequence(stats.logps)
        if self.loss_type in ("ipo", "simpo"):
            logps = logps / batch.lengths.clamp(min=1)
        rewards = (1 - bounded_exp(-self.alpha * logps)) / self.alpha if self.alpha else logps
        better, worse = rewards.chunk(2)
        terms = {"cpo": Term(CPO_LOSSES[self.loss_type](self, better - worse), over="pairs")}
        if self.cpo_alpha:
            terms["nll"] = Term(-self.cpo_alpha * stats.logps * batch.is_chosen, over="chosen_tokens")
        metrics = pair_metrics(logps.chunk(2), (self.beta * better, self.beta * worse))
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen)


@dataclass(frozen=True, kw_only=True)
class SimPOLoss(UnreferencedLoss):
    """Simple preference optimization: -log sigma(beta * (mean log p_c - mean log p_r) - gamma).

    Args:
        beta: scale of the difference of mean log-probabilities.
        gamma: target margin.

    The call takes what `DPOLoss` takes, without a reference; the metrics are the same (logps/* are means).

    Reference: Meng et al., 2024, https://arxiv.org/abs/2405.14734.
    """

    beta: float = 2.0
    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.beta > 0, "beta", "a positive number", self.beta, "the paper's are 2.0 to 2.5")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        chosen, rejected = (batch.sum_by_sequence(stats.logps) / batch.lengths.clamp(min=1)).chunk(2)
        terms = {"simpo": Term(-logsigmoid(self.beta * (chosen - rejected) - self.gamma), over="pairs")}
        metrics = pair_metrics((chosen, rejected), (self.beta * chosen, self.beta * rejected))
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen)


# -- KTO

# Losses of (desirable, undesirable) sequences, of the reward beta * log-ratio and beta * KL.
KTO_LOSSES: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "kto": lambda reward, kl: ((kl - reward).sigmoid(), (reward - kl).sigmoid()),
    "apo_zero_unpaired": lambda reward, kl: ((-reward).sigmoid(), reward.sigmoid()),
}


@dataclass(frozen=True, kw_only=True)
class KTOLoss(ReferencedLoss):
    """Kahneman-Tversky optimization: single sequences that are desirable or not.

        w_d * (1 - sigma(beta * (log-ratio - KL)))   or   w_u * (1 - sigma(beta * (KL - log-ratio)))

    Args:
        beta: strength of the pull towards the reference.
        loss_type: "kto", or "apo_zero_unpaired" (without the KL).
        desirable_weight, undesirable_weight: w_d, w_u.

    The call takes hidden (B, T, H) or packed, targets, `labels` (B,) bool (True: desirable), a reference as `DPOLoss` does, and `kl`:
    0-d, the mean log-ratio of unrelated completions, detached and clamped at 0 (average it over ranks before the call); or a mapping
    with kl_hidden (B', T', H), kl_targets (B', T') and either ref_logps (as above, of those sequences) or ref_hidden, from which it is
    computed, without gradient, by two more walks (`ref_weight` and `ref_bias` are the call's). `num_items` is the number of sequences.

    Metrics: rewards/chosen, rewards/rejected, rewards/margins (means over the desirable and undesirable ones), logps/*, logits/*,
    entropy, kl. Margins are 0 unless the call has sequences of both kinds.

    Reference: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306.
    """

    beta: float = 0.1
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    scope: ClassVar = "group"
    unit: ClassVar = "sequences"
    context_parallel: ClassVar = True
    sequence_inputs: ClassVar = (*ReferencedLoss.sequence_inputs, "labels")
    shared_inputs: ClassVar = ("kl",)
    observes: ClassVar = PairedLoss.observes
    metric_names: ClassVar = (
        "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "entropy", "kl",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss_type", self.loss_type, KTO_LOSSES)
        expect(self.beta > 0, "beta", "a positive number", self.beta, "TRL's default is 0.1")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps, labels = batch.sum_by_sequence(stats.logps), batch.labels
        reward = self.beta * (logps - self.sequence_ref_logps(batch))
        desirable, undesirable = KTO_LOSSES[self.loss_type](reward, self.beta * batch.kl)
        losses = torch.where(labels, self.desirable_weight * desirable, self.undesirable_weight * undesirable)
        metrics = {"kl": Term(batch.kl.expand(len(logps)), over="sequences"), "entropy": Term(stats.entropy)}
        mean_logits, tokens = stats.sum_logits / batch.V, batch.spread(labels)
        for side, these, those in (("chosen", labels, tokens), ("rejected", ~labels, ~tokens)):
            metrics[f"rewards/{side}"] = Term(reward * these, over=these.to(logps.dtype))
            metrics[f"logps/{side}"] = Term(logps * these, over=these.to(logps.dtype))
            metrics[f"logits/{side}"] = Term(mean_logits * those, over=those.to(logps.dtype))
        return {"kto": Term(losses, over="sequences")}, metrics

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, labels: Tensor, kl: Tensor | float | Mapping | None = None,
        bias: Tensor | None = None, **arguments,
    ) -> LossOutput:  # fmt: skip
        expect(labels.dim() == 1, "labels", "shape (B,), one bool per sequence", tuple(labels.shape), "True for a desirable sequence")
        wanted = "a number, a 0-d tensor or a mapping" if self.loss_type == "kto" else f"None for {self.loss_type}"
        expect((kl is not None) == (self.loss_type == "kto"), "kl", wanted, kl, "it is the reference point of 'kto' alone")
        if isinstance(kl, Mapping):
            kl = resolved(self, weight)._kl(weight, bias, kl, arguments.get("ref_weight"), arguments.get("ref_bias"))
        options = {"dtype": torch.promote_types(hidden.dtype, torch.float32), "device": hidden.device}
        kl = kl.detach().to(**options).reshape(()) if isinstance(kl, Tensor) else torch.full((), kl or 0.0, **options)
        out = super().__call__(hidden, weight, targets, bias=bias, labels=labels.bool(), kl=kl, **arguments)
        margin = out.metrics["rewards/chosen"] - out.metrics["rewards/rejected"]
        out.metrics["rewards/margins"] = torch.where(labels.any() & ~labels.all(), margin, 0.0)
        return out

    def _kl(self, weight: Tensor, bias: Tensor | None, kl: Mapping, ref_weight: Tensor | None, ref_bias: Tensor | None) -> Tensor:
        """The mean log-ratio of unrelated completions, at least 0."""
        known = {"kl_hidden", "kl_targets", "ref_logps", "ref_hidden"}
        complete = {"kl_hidden", "kl_targets"} <= set(kl) <= known and ("ref_logps" in kl) != ("ref_hidden" in kl)
        expect(complete, "kl", "kl_hidden, kl_targets and one of ref_logps and ref_hidden", sorted(kl), "pass exactly these")
        targets = kl["kl_targets"]
        with torch.no_grad():
            policy = linear_logprobs(kl["kl_hidden"], weight, targets, bias=bias, **self.head._asdict(), **self.walk_options).logps
            reference = kl.get("ref_logps")
            per_token = reference is None or reference.shape == targets.shape
            if reference is not None and per_token:
                reference = torch.where(targets == self.ignore_index, 0.0, reference)
            if reference is None:
                check_reference(kl["ref_hidden"], ref_weight, ref_bias, weight, targets)
                reference = linear_logprobs(
                    kl["ref_hidden"], ref_weight, targets, bias=ref_bias, **self.ref_head._asdict(), **self.walk_options
                ).logps
            sums = policy.sum(), reference.sum()
            if self.cp_group is not None:
                sums = self.slices.sum(sums[0]), self.slices.sum(sums[1]) if per_token else sums[1]
            return ((sums[0] - sums[1]) / targets.shape[0]).clamp(min=0)
