"""Preference losses on full logits: DPO and its relatives, ORPO, CPO, SimPO and KTO.

Sequences come padded, `hidden (S, T, H)` and `targets (S, T)`, or packed, `hidden (N, H)`, `targets (N,)` and
the bounds `cu_seqlens (S + 1,)`. Where they form pairs, `S = 2B` and the chosen ones come first. Targets are
aligned with the hidden states. `|y|` is the number of supervised tokens of a sequence; one that has none has
a log-probability of 0, summed or averaged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference.cross_entropy import head_logits, token_logprobs
from tests.reference.sequences import padded, ratio_of

# fp32 overflows at exp(88.7).
MAX_EXPONENT = 80.0
# The odds of a mean log-probability of 0 are infinite; those of -1e-7 are 1e7.
MAX_MEAN_LOGP = -1e-7


@dataclass(frozen=True)
class _Tokens:
    """Numbers of each token, all (S, T) and 0 where ignored."""

    mask: Tensor
    logps: Tensor
    entropy: Tensor
    mean_logits: Tensor
    log_sum_sq_probs: Tensor
    is_top1: Tensor

    def sequence_sums(self, logps: Tensor, ld_alpha: float | None = None) -> Tensor:
        """Sums (S, T) by sequence; those past the length of the shorter sequence of the pair weigh
        `ld_alpha`."""
        logps = logps.masked_fill(~self.mask, 0)
        total = logps.sum(1)
        if ld_alpha is None:
            return total
        shorter = torch.minimum(*_halves(self.mask.sum(1))).repeat(2)
        shared = (logps * (self.mask.cumsum(1) <= shorter.unsqueeze(1))).sum(1)
        return shared + ld_alpha * (total - shared)

    def sequence_means(self, values: Tensor) -> Tensor:
        return ratio_of(values.sum(1), self.mask.sum(1))


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen and the rejected half."""
    return values[: len(values) // 2], values[len(values) // 2 :]


def _reduce(values: Tensor, reduction: str, count: Tensor | float) -> Tensor:
    return {
        "none": lambda: values,
        "sum": lambda: values.sum(),
        "mean": lambda: ratio_of(values.sum(), count),
    }[reduction]()


def _tokens(
    hidden: Tensor,  # (S, T, H) or (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (S, T) or (N,)
    cu_seqlens: Tensor | None,
    ignore_index: int,
    **head,
) -> _Tokens:
    hidden, targets = padded(hidden, cu_seqlens, 0), padded(targets, cu_seqlens, ignore_index)
    mask = targets != ignore_index
    logps, entropy, _ = token_logprobs(hidden, weight, targets, ignore_index=ignore_index, **head)
    with torch.no_grad():
        logits = head_logits(hidden, weight, **head)
        log_sum_sq_probs = (2 * logits.log_softmax(-1)).logsumexp(-1)
        others = (logits.mean(-1), log_sum_sq_probs, logits.argmax(-1) == targets)
    return _Tokens(mask, logps, entropy.detach(), *(numbers.masked_fill(~mask, 0) for numbers in others))


def _reference_sums(
    tokens: _Tokens,
    targets: Tensor,  # (S, T) or (N,)
    cu_seqlens: Tensor | None,
    ignore_index: int,
    ref_logps: Tensor | None,  # (S,), or like targets
    ref_hidden: Tensor | None,  # (S, T, H') or (N, H')
    ref_weight: Tensor | None,  # (V, H')
    ld_alpha: float | None = None,
    **ref_head,
) -> Tensor:  # (S,)
    """Log-probability of each sequence under the reference; given sums are taken as they are."""
    if ref_hidden is not None:
        ref_logps = token_logprobs(ref_hidden, ref_weight, targets, ignore_index=ignore_index, **ref_head)[0]
    ref_logps = ref_logps.detach().to(tokens.logps.dtype)
    if ref_logps.shape == tokens.mask.shape[:1]:
        return ref_logps
    return tokens.sequence_sums(padded(ref_logps, cu_seqlens), ld_alpha)


def _metrics(tokens: _Tokens, logps: Tensor, rewards: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """Means over the sequences of each side, given as a mask (S,), and over their tokens."""
    logps, rewards = logps.detach(), rewards.detach()
    metrics = {}
    for side, rows in {"chosen": chosen, "rejected": ~chosen}.items():
        metrics[f"rewards/{side}"] = ratio_of(rewards[rows].sum(), rows.sum())
        metrics[f"logps/{side}"] = ratio_of(logps[rows].sum(), rows.sum())
        metrics[f"logits/{side}"] = ratio_of(tokens.mean_logits[rows].sum(), tokens.mask[rows].sum())
    margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    metrics["rewards/margins"] = margin if chosen.any() and not chosen.all() else torch.zeros_like(margin)
    metrics["entropy"] = ratio_of(tokens.entropy.sum(), tokens.mask.sum())
    return metrics


def _pair_metrics(tokens: _Tokens, logps: Tensor, rewards: Tensor, nll: Tensor) -> dict[str, Tensor]:
    """`_metrics` of pairs and those that only pairs have; `nll` is the mean over the chosen tokens."""
    is_top1, mask = _halves(tokens.is_top1)[0], _halves(tokens.mask)[0]
    chosen_rewards, rejected_rewards = _halves(rewards.detach())
    wins = (chosen_rewards > rejected_rewards).to(rewards.dtype)
    return _metrics(tokens, logps, rewards, torch.arange(len(rewards), device=rewards.device) < len(wins)) | {
        "rewards/accuracies": ratio_of(wins.sum(), len(wins)),
        "mean_token_accuracy": ratio_of(is_top1.sum().to(rewards.dtype), mask.sum()),
        "nll_loss": nll.detach(),
    }


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of preferring the chosen one with probability `sigmoid(margin)` when labels flip at the
    rate `smoothing`."""
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _power_score(ratios: Tensor, power: float) -> Tensor:
    """`(t^power - 1) / power` with `ratios = log t`, whose limit at 0 is `log t`."""
    return ratios if abs(power) < 1e-6 else torch.expm1((power * ratios).clamp(max=MAX_EXPONENT)) / power


# f'(t) as a function of log t and of the coefficient of the alpha divergence.
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratios, alpha: ratios,
    "forward_kl": lambda ratios, alpha: _power_score(ratios, -1.0),
    "js_divergence": lambda ratios, alpha: math.log(2) + F.logsigmoid(ratios),
    "alpha_divergence": lambda ratios, alpha: _power_score(ratios, alpha - 1),
}


def _dpo_losses(
    logps: Tensor,  # (2B,)
    ref_logps: Tensor,  # (2B,)
    scores: Tensor,  # (2B,)
    tokens: _Tokens,
    beta: float,
    smoothing: float,
    tau: float,
    average: bool | None,
) -> dict[str, Callable[[], Tensor]]:
    """Loss types by name, each giving one number per pair."""
    lengths = tokens.mask.sum(1)
    if average:
        logps, ref_logps, scores = (ratio_of(x, lengths) for x in (logps, ref_logps, scores))
    chosen, rejected = _halves(logps - ref_logps)
    chosen_score, rejected_score = _halves(scores)
    means = ratio_of(scores, lengths) if average is None else scores
    chosen_mean_score, rejected_mean_score = _halves(means)
    delta, mean_delta = chosen_score - rejected_score, chosen_mean_score - rejected_mean_score

    def exo_pair() -> Tensor:
        # KL from the policy's preference to the smoothed label.
        win, lose = F.logsigmoid(beta * delta), F.logsigmoid(-beta * delta)
        return win.exp() * (win - math.log1p(-smoothing)) + lose.exp() * (lose - math.log(smoothing))

    def aot() -> Tensor:
        (chosen_logps, rejected_logps), (ref_chosen, ref_rejected) = _halves(logps), _halves(ref_logps)
        return _smoothed(
            beta
            * ((chosen_logps - rejected_logps).sort().values - (ref_chosen - ref_rejected).sort().values),
            smoothing,
        )

    def discopop() -> Tensor:
        blend = torch.sigmoid(beta * delta / tau)
        return (
            -F.logsigmoid(beta * delta) * (1 - blend) + (-beta * delta).clamp(max=MAX_EXPONENT).exp() * blend
        )

    return {
        "sigmoid": lambda: _smoothed(beta * delta, smoothing),
        "hinge": lambda: F.relu(1 - beta * delta),
        "ipo": lambda: (mean_delta - 1 / (2 * beta)) ** 2,
        "exo_pair": exo_pair,
        "nca_pair": lambda: (
            -F.logsigmoid(beta * chosen) - (F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected)) / 2
        ),
        "robust": lambda: (
            ((smoothing - 1) * F.logsigmoid(beta * delta) + smoothing * F.logsigmoid(-beta * delta))
            / (1 - 2 * smoothing)
        ),
        "bco_pair": lambda: -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected),
        "sppo_hard": lambda: (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2,
        "aot": aot,
        "aot_unpaired": lambda: _smoothed(beta * (chosen.sort().values - rejected.sort().values), smoothing),
        "apo_zero": lambda: torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected),
        "apo_down": lambda: torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected)),
        "discopop": discopop,
        "sft": lambda: -_halves(tokens.logps)[0].sum(1),
        "sigmoid_norm": lambda: -F.logsigmoid(beta * mean_delta),
    }


def dpo(
    hidden: Tensor,  # (2B, T, H) or (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (2B, T) or (N,)
    *,
    ref_logps: Tensor | None = None,  # (2B,), or like targets
    ref_hidden: Tensor | None = None,  # (2B, T, H') or (N, H')
    ref_weight: Tensor | None = None,  # (V, H')
    ref_bias: Tensor | None = None,  # (V,)
    cu_seqlens: Tensor | None = None,  # (2B + 1,)
    beta: float = 0.1,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    average_logps: bool | None = None,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    discopop_tau: float = 0.05,
    reference_free: bool = False,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    ref_softcap: float | None = None,
    ref_logit_scale: float = 1.0,
    **head,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimization and the losses of its family.

    `_dpo_losses` has the loss types, by pair: `chosen` and `rejected` are the log-ratios `π(y) - π_ref(y)` of
    `π(y) = Σ_t logp_t`; the scores are `f'(exp(log-ratio))`, with the difference `delta`, or `mean_delta` of
    the scores divided by `|y|`. exo_pair needs a smoothing above 0, robust one below 1/2.

    The mean divides by `num_items`, else by the number of pairs; that of sft divides by the number of chosen
    tokens, unless `num_items` is given for sft alone. A list of types gives the weighted sum of their
    reductions. Exponents are bounded by 80. A pair with empty sequences counts. `average_logps=True` divides
    `π`, `π_ref` and the scores by `|y|` in every type, False in none (`mean_delta` is `delta`).

    `f'(t)` is of reverse_kl `log t`, of forward_kl `1 - 1 / t`, of js_divergence `log(2t / (1 + t))`, of
    alpha_divergence `(t^(α - 1) - 1) / (α - 1)`; it acts on the losses of `delta` or `mean_delta`. `ld_alpha`
    weighs the log-probabilities past the length of the shorter sequence of the pair; sums given as
    `ref_logps` have it already. `use_weighting` multiplies the loss of each pair, sft included, by `w(y_c)
    w(y_r)`, not differentiated, with `w(y) = exp(Σ_t (logp_t - log Σ_v p_v²) / |y|)`.

    Metrics: rewards `βc` and `βr` as "rewards/chosen", "rewards/rejected", their "rewards/margins" and how
    often the first is larger, "rewards/accuracies"; `π` as "logps/chosen", "logps/rejected"; the mean logit
    of the completion tokens, "logits/chosen", "logits/rejected"; "entropy" over all supervised tokens;
    "mean_token_accuracy" and "nll_loss" over the chosen ones. 0 where there is nothing to average.

    References:
        Rafailov et al., "Direct Preference Optimization", 2023, equation 7 (sigmoid); Mitchell, "A note on
        DPO with noisy preferences & relationship to IPO", 2023 (its smoothing); Zhao et al., "SLiC-HF", 2023
        (hinge); Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences",
        2023, equation 17 (ipo, per token); Ji et al., "Towards Efficient Exact Optimization of Language Model
        Alignment", 2024, equation 16 (exo_pair); Chen et al., "Noise Contrastive Alignment of Language Models
        with Explicit Rewards", 2024 (nca_pair); Chowdhury et al., "Provably Robust DPO", 2024 (robust); Jung
        et al., "Binary Classifier Optimization for LLM Alignment", 2024 (bco_pair); Wu et al., "Self-Play
        Preference Optimization", 2024, equation 4.7 (sppo_hard); Melnyk et al., "Distributional Preference
        Alignment of LLMs via Optimal Transport", 2024 (aot); D'Oosterlinck et al., "Anchored Preference
        Optimization", 2024, equations 7 and 8 (apo); Lu et al., "Discovering Preference Optimization
        Algorithms with and for LLMs", 2024, equation 5 (discopop); Lambert et al., "Tülu 3", 2024
        (sigmoid_norm). Wang et al., "Beyond Reverse KL", 2023 (f-divergences); Liu et al., "Length
        Desensitization in DPO", 2024 (ld_alpha); Zhou et al., "WPO: Enhancing RLHF with Weighted Preference
        Optimization", 2024, equation 2 (use_weighting).
    """
    tokens = _tokens(hidden, weight, targets, cu_seqlens, ignore_index, temperature=temperature, **head)
    logps = tokens.sequence_sums(tokens.logps, ld_alpha)
    if reference_free:
        ref = torch.zeros_like(logps)
    else:
        ref_head = {
            "bias": ref_bias,
            "softcap": ref_softcap,
            "logit_scale": ref_logit_scale,
            "temperature": temperature,
        }
        ref = _reference_sums(
            tokens, targets, cu_seqlens, ignore_index, ref_logps, ref_hidden, ref_weight, ld_alpha, **ref_head
        )
    scores = F_DIVERGENCES[f_divergence_type](logps - ref, f_alpha_divergence_coef)

    pair_weights = 1.0
    if use_weighting:
        chosen_weights, rejected_weights = _halves(
            tokens.sequence_means(tokens.logps.detach() - tokens.log_sum_sq_probs).exp()
        )
        pair_weights = chosen_weights * rejected_weights

    names = [loss_type] if isinstance(loss_type, str) else loss_type
    losses = _dpo_losses(logps, ref, scores, tokens, beta, label_smoothing, discopop_tau, average_logps)
    chosen_tokens = _halves(tokens.mask)[0].sum()
    pairs = len(logps) // 2 if num_items is None else num_items
    alone = set(names) == {"sft"} and num_items is not None
    loss = logps.new_zeros(())
    for name, factor in zip(names, loss_weights or [1.0] * len(names), strict=True):
        values = losses[name]() * pair_weights
        count = chosen_tokens if name == "sft" and not alone else pairs
        loss = loss + factor * _reduce(values, reduction, count)
    return loss, _pair_metrics(
        tokens, logps, beta * (logps - ref), ratio_of(losses["sft"]().sum(), chosen_tokens)
    )


def orpo(
    hidden: Tensor,  # (2B, T, H) or (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (2B, T) or (N,)
    *,
    cu_seqlens: Tensor | None = None,  # (2B + 1,)
    nll_targets: Tensor | None = None,  # like targets
    beta: float = 0.1,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    **head,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Odds-ratio preference optimization.

    With the mean log-probability `m(y) = Σ_t logp_t / |y|`:

        loss = nll - β log σ(logit_c - logit_r),  logit(y) = m(y) - log(1 - exp(m(y)))

    `nll` is that of `nll_targets`, reduced over the chosen tokens, the second term over pairs. An `m` above
    -1e-7 counts as -1e-7 in the odds, without a gradient: their logarithm is infinite at 0, where `d m / d
    hidden` is 0 as well. Metrics of `dpo`, with `m` for `π` and rewards `βm`, and the means over pairs
    "log_odds_chosen" of `logit_c - logit_r` and "log_odds_ratio" of `log σ(logit_c - logit_r)`.

    References:
        Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model", 2024, equations 4 to
        7.
    """
    tokens = _tokens(hidden, weight, targets, cu_seqlens, ignore_index, **head)
    nll_tokens = (
        tokens
        if nll_targets is None
        else _tokens(hidden, weight, nll_targets, cu_seqlens, ignore_index, **head)
    )
    nlls, nll_count = -_halves(nll_tokens.logps)[0], _halves(nll_tokens.mask)[0].sum()

    mean_logps = tokens.sequence_means(tokens.logps)
    bounded = mean_logps.clamp(max=MAX_MEAN_LOGP)
    chosen, rejected = _halves(bounded - torch.log(-torch.expm1(bounded)))
    log_odds = chosen - rejected
    ratios = F.logsigmoid(log_odds)

    pairs = len(log_odds) if num_items is None else num_items
    loss = _reduce(nlls, reduction, nll_count) - beta * _reduce(ratios, reduction, pairs)
    return loss, _pair_metrics(tokens, mean_logps, beta * mean_logps, ratio_of(nlls.sum(), nll_count)) | {
        "log_odds_ratio": ratio_of(ratios.detach().sum(), len(ratios)),
        "log_odds_chosen": ratio_of(log_odds.detach().sum(), len(log_odds)),
    }


def cpo(
    hidden: Tensor,  # (2B, T, H) or (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (2B, T) or (N,)
    *,
    cu_seqlens: Tensor | None = None,  # (2B + 1,)
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
    average_logps: bool | None = None,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    **head,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Contrastive preference optimization, also with the reward shape of AlphaPO.

    With `π(y) = Σ_t logp_t`, for ipo and simpo divided by `|y|`, the reward `ρ = π`, or `(1 - exp(-α π)) / α`
    with `α ≠ 0`, `Δ = ρ(y_c) - ρ(y_r)` and smoothing `ε`, the loss is `cpo_alpha * nll` over chosen tokens
    plus, per pair:

        sigmoid  -(1 - ε) log σ(βΔ) - ε log σ(-βΔ)
        simpo    the same of βΔ - γ
        hinge    max(0, 1 - βΔ)
        ipo      (Δ - 1 / 2β)²

    Exponents are bounded by 80. Metrics of `dpo`, with rewards `βρ` and `π` as above.

    References:
        Xu et al., "Contrastive Preference Optimization", 2024, equation 3; Meng et al., "SimPO", 2024,
        equation 6; Gupta et al., "AlphaPO: Reward Shape Matters for LLM Alignment", 2025; hinge and ipo as in
        `dpo`.
    """
    tokens = _tokens(hidden, weight, targets, cu_seqlens, ignore_index, **head)
    means = loss_type in ("ipo", "simpo") if average_logps is None else average_logps
    logps = tokens.sequence_means(tokens.logps) if means else tokens.logps.sum(1)
    rewards = _power_score(logps, -alpha)
    chosen, rejected = _halves(rewards)
    delta = chosen - rejected
    losses = {
        "sigmoid": lambda: _smoothed(beta * delta, label_smoothing),
        "simpo": lambda: _smoothed(beta * delta - simpo_gamma, label_smoothing),
        "hinge": lambda: F.relu(1 - beta * delta),
        "ipo": lambda: (delta - 1 / (2 * beta)) ** 2,
    }[loss_type]()

    nlls, nll_count = -_halves(tokens.logps)[0], _halves(tokens.mask)[0].sum()
    pairs = len(delta) if num_items is None else num_items
    loss = _reduce(losses, reduction, pairs)
    if cpo_alpha:
        loss = loss + cpo_alpha * _reduce(nlls, reduction, nll_count)
    return loss, _pair_metrics(tokens, logps, beta * rewards, ratio_of(nlls.sum(), nll_count))


def simpo(
    hidden: Tensor,  # (2B, T, H) or (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (2B, T) or (N,)
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    **options,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Simple preference optimization.

    With the mean log-probability `m(y) = Σ_t logp_t / |y|`, per pair:

        loss = -log σ(β (m(y_c) - m(y_r)) - γ)

    References:
        Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024, equation 6.
    """
    return cpo(
        hidden, weight, targets, beta=beta, loss_type="simpo", cpo_alpha=0.0, simpo_gamma=gamma, **options
    )


def kto(
    hidden: Tensor,  # (B, T, H) or (N, H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (B, T) or (N,)
    *,
    labels: Tensor,  # (B,) bool
    kl: float | Tensor = 0.0,
    ref_logps: Tensor | None = None,  # (B,), or like targets
    ref_hidden: Tensor | None = None,  # (B, T, H') or (N, H')
    ref_weight: Tensor | None = None,  # (V, H')
    ref_bias: Tensor | None = None,  # (V,)
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    ref_softcap: float | None = None,
    ref_logit_scale: float = 1.0,
    **head,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Kahneman-Tversky optimization.

    With the log-ratio `r = π(y) - π_ref(y)` of `π(y) = Σ_t logp_t`, and `z = max(kl, 0)` for kto, 0 for
    apo_zero_unpaired:

        desirable    desirable_weight * σ(-β (r - z))
        undesirable  undesirable_weight * σ(β (r - z))

    The mean divides by `num_items`, else by the number of sequences.

    References:
        Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024, equations 7 and 8;
        D'Oosterlinck et al., "Anchored Preference Optimization", 2024, equation 7 (apo_zero_unpaired).
    """
    tokens = _tokens(hidden, weight, targets, cu_seqlens, ignore_index, temperature=temperature, **head)
    ref_head = {
        "bias": ref_bias,
        "softcap": ref_softcap,
        "logit_scale": ref_logit_scale,
        "temperature": temperature,
    }
    logps = tokens.logps.sum(1)
    ratios = logps - _reference_sums(
        tokens, targets, cu_seqlens, ignore_index, ref_logps, ref_hidden, ref_weight, **ref_head
    )

    kl = torch.as_tensor(kl, dtype=ratios.dtype, device=ratios.device).detach().clamp(min=0)
    z = {"kto": kl, "apo_zero_unpaired": torch.zeros_like(kl)}[loss_type]
    losses = torch.where(
        labels,
        desirable_weight * torch.sigmoid(-beta * (ratios - z)),
        undesirable_weight * torch.sigmoid(beta * (ratios - z)),
    )
    loss = _reduce(losses, reduction, len(losses) if num_items is None else num_items)
    return loss, _metrics(tokens, logps, beta * ratios, labels) | {"kl": z if len(losses) else 0 * z}
