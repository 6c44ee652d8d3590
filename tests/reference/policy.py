"""GRPO and its descendants, RLOO, PPO and REINFORCE, on full logits."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.reference.cross_entropy import token_logprobs
from tests.reference.sequences import padded, ratio_of

# exp of more is no fp32 number, and a clipped ratio of infinity has the gradient 0 * inf.
LOG_RATIO_BOUND = 80.0


class _Tokens(NamedTuple):
    """The tokens of a call, one sequence a row: zero where they do not count."""

    logps: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    counted: Tensor  # (B, T) bool
    cu_seqlens: Tensor | None  # (B + 1,) where the call is packed

    @property
    def mask(self) -> Tensor:
        return self.counted.to(self.logps.dtype)

    @property
    def lengths(self) -> Tensor:  # (B, 1), 1 for a sequence without tokens
        return self.mask.sum(1, keepdim=True).clamp(min=1)

    def per_token(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(B, T) or packed (N,) -> (B, T), `fill` where tokens do not count, whatever was there."""
        return padded(x.to(self.logps.dtype), self.cu_seqlens).masked_fill(~self.counted, fill)

    def per_sequence_or_token(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(B,) or (B, 1) -> (B, 1); any other shape as in `per_token`."""
        if x.numel() != self.counted.shape[0]:
            return self.per_token(x, fill)
        return x.to(self.logps.dtype).view(-1, 1).masked_fill(~self.counted.any(1, keepdim=True), fill)

    def as_given(self, x: Tensor) -> Tensor:
        """(B, T) -> the shape of the call's targets."""
        if self.cu_seqlens is None:
            return x
        return torch.cat([row[:length] for row, length in zip(x, self.cu_seqlens.diff().tolist())])


def _tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    ignore_index: int,
    **head,
) -> _Tokens:
    if mask is not None:
        targets = targets.masked_fill(~mask.bool(), ignore_index)
    hidden, targets = padded(hidden, cu_seqlens), padded(targets, cu_seqlens, ignore_index)
    logps, entropy, _ = token_logprobs(hidden, weight, targets, ignore_index=ignore_index, **head)
    return _Tokens(logps, entropy, targets != ignore_index, cu_seqlens)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over what counts, 0 where nothing does."""
    return ratio_of((x * mask).sum(), mask.sum())


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-min(min(r, δ) A, clip(r, 1 - ε, 1 + ε_high) A)` and where it is clipped."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    low = (ratio < 1 - epsilon) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return -torch.min(ratio * advantages, clipped * advantages), _clip_metrics(low, high)


def _clip_metrics(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


def _region(name: str | None, logps: Tensor, old_logps: Tensor, advantages: Tensor, low: float, high: float):
    """DPPO's `(dropped below, dropped above)` of `trust_region`, from the probabilities themselves."""
    p, q, raised = logps.detach().exp(), old_logps.exp(), advantages > 0
    if name is None:
        return torch.zeros_like(p, dtype=torch.bool), torch.zeros_like(p, dtype=torch.bool)
    if name == "absolute_tv":
        return p - q < -low, p - q > high
    if name == "binary_tv":
        return ~raised & (p - q < -low), raised & (p - q > high)
    p, q = p.clamp(max=1 - 1e-12), q.clamp(max=1 - 1e-12)
    kl = torch.xlogy(q, q / p) + (1 - q) * ((1 - q) / (1 - p)).log()
    return ~raised & (p < q) & (kl > low), raised & (p > q) & (kl > high)


def _policy_gradient(weight: Tensor, advantages: Tensor, log_ratio: Tensor) -> Tensor:
    """`-weight A`, with the gradient `-weight A ∇log_ratio` (0 where the ratio is not a number of fp32)."""
    weight = weight.detach()
    gradient = -weight * advantages * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return gradient - gradient.detach() - weight * advantages


# log w of a token that the sampler, or the old policy, never draws.
NEVER = 1e4


def sampler_weights(
    corrections,  # of `SamplerCorrection`s' fields
    old_logps: Tensor,  # (B, T)
    sampling_logps: Tensor,  # (B, T)
    mask: Tensor,  # (B, T) bool
) -> Tensor:
    """(B, T) or (B, 1): the product of the factors.

    `w = p(old) / p(sampler)` of a token, `Π_t w_t` of a sequence, `(Π_t w_t)^(1 / length)` its geometric
    mean. "truncate": `min(max(w, low), high)`; "mask": `w [low <= w <= high]`; "reject":
    `[low <= w <= high]`. With the measures "k2", `(log w)^2 / 2`, and "k3", `w - 1 - log w`, of each token,
    summed over a sequence or averaged, "reject" is `[measure <= high]`. Where the sampler's number is NaN, w
    is 1.
    """
    log_w = (old_logps.detach() - sampling_logps).masked_fill(~mask, 0.0)
    log_w = log_w.masked_fill(log_w.isnan(), 0.0).clamp(-NEVER, NEVER)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    product = log_w.new_ones(())
    for correction in corrections:
        measures = {"ratio": log_w, "k2": log_w**2 / 2, "k3": log_w.exp() - 1 - log_w}
        x, bounded = log_w, measures[correction.measure]
        if correction.level != "token":
            x, bounded = (y.sum(1, keepdim=True) for y in (x, bounded))
        if correction.level == "geometric":
            x, bounded = x / lengths, bounded / lengths
        bounded = bounded.exp() if correction.measure == "ratio" else bounded
        low = 0.0 if correction.low is None else correction.low
        high = math.inf if correction.high is None else correction.high
        inside = ((bounded >= low) & (bounded <= high)).to(x.dtype)
        w = _ratio(x)
        product = (
            product
            * {"truncate": w.clamp(low, high), "mask": w * inside, "reject": inside}[correction.action]
        )
    return product


def _given(corrections) -> tuple:
    """One correction, several, or none -> a tuple."""
    return () if corrections is None else corrections if isinstance(corrections, tuple) else (corrections,)


def _kl_estimate(name: str, d: Tensor, largest: float | None) -> Tensor:
    """Schulman's estimators of `d = ref_logp - logp`; with "+" the gradient is that of `k2`."""
    d_k3 = d.clamp(max=LOG_RATIO_BOUND)
    kinds = {"k1": -d, "k2": d**2 / 2, "k3": d_k3.exp() - d_k3 - 1, "abs": d.abs()}
    kl = kinds[name[:-1] if name.endswith("+") else name]
    kl = kl if largest is None else kl.clamp(-largest, largest)
    return kinds["k2"] - kinds["k2"].detach() + kl.detach() if name.endswith("+") else kl


def _where(condition: Tensor, x: float, y: float, like: Tensor) -> Tensor:
    """`torch.where` of two numbers; its own has the default dtype, which rounds them."""
    return torch.where(condition, like.new_tensor(x), like.new_tensor(y))


def _vespo_weight(log_ratio: Tensor, importance_weights: Tensor | None, k: Tensor, decay: Tensor) -> Tensor:
    """`φ(w) = w^k exp(λ (1 - w))`, with `λ` the decay and `w` the product of a sequence's ratios; (B, 1), or
    as `k`."""
    smallest, largest = math.log(1e-8), 20.0
    log_w = log_ratio.detach().clamp(-largest, largest).sum(1, keepdim=True)
    if importance_weights is not None:
        log_w = log_w + importance_weights.log().clamp(smallest, largest).sum(1, keepdim=True)
    log_w = log_w.clamp(smallest, largest)
    decay = decay.clamp(min=1e-4)
    return (decay + k * log_w - decay * log_w.exp()).exp()


def _drift(tokens: _Tokens, sampling_logps: Tensor) -> Tensor:
    """How much likelier the sampler found each sequence, per token: (B, 1). Tokens it has no number for show
    no drift."""
    return (sampling_logps - tokens.logps.detach()).nan_to_num(nan=0.0).sum(1, keepdim=True) / tokens.lengths


def _high_entropy(tokens: _Tokens, top_quantile: float) -> Tensor:
    """(B, T), 1 for the tokens that count and whose entropy is not below the `1 - top_quantile` quantile of
    all that count."""
    if top_quantile >= 1 or not tokens.counted.any():
        return tokens.mask
    entropy = tokens.entropy.detach()
    return tokens.mask * (entropy >= entropy[tokens.counted].quantile(1 - top_quantile))


def grpo(
    hidden: Tensor,  # (B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (B, T), or (N,) packed
    *,
    advantages: Tensor,  # (B,), or as targets
    mask: Tensor | None = None,  # as targets
    old_logps: Tensor | None = None,  # as targets
    ref_logps: Tensor | None = None,  # as targets
    sampling_logps: Tensor | None = None,  # as targets
    importance_weights: Tensor | None = None,  # (B,), (B, 1), or as targets
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    loss_type: str = "dapo",
    loss_agg_mode: str | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_max: float | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    trust_region: str | None = "clip",
    cispo_min: float = 0.0,
    importance_sampling_level: str = "token",
    old_kl_coef: float = 0.0,
    ref_advantage: float = 0.0,
    sampler_correction=None,
    entropy_coef: float = 0.0,
    use_bias_correction_kl: bool = True,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    max_completion_length: int | None = None,
    sapo_temperature_neg: float = 1.05,
    sapo_temperature_pos: float = 1.0,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    reduction: str = "mean",
    ignore_index: int = -100,
    **head,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Group relative policy optimization and its descendants: `(loss, metrics, logps)`.

    With `l = logp - old_logp` (`old_logps=None`: of this policy, detached), the ratio is `r = exp(l)`, or at
    the sequence level `r = exp(Σ_t l_t / length)`, one ratio for all tokens of a sequence, with the gradient
    of all of them; at "sequence_token", with the gradient of the token alone. The surrogate of a token with
    advantage `A` is

        grpo, bnpo, dr_grpo, dapo, luspo   s = -min(min(r, δ) A, clip(r, 1 - ε, 1 + ε_high) A)
                                           with another trust_region: -min(r, δ) A where it keeps the token,
                                           with the gradient -stop_gradient(min(r, δ)) A ∇log r
        cispo                              s = -stop_gradient(clip(r, cispo_min, ε_high)) A logp
        gmpo                               s = -A exp(Σ_t c_t / length),  c = min(l, clip(l, -ε, ε_high)) if
                                           A > 0 else max(l, clip(l, -ε, ε_high))
        sapo                               s = -4 / τ sigmoid(τ (r - 1)) A,  τ = τ_pos if A > 0 else τ_neg
        vespo                              s = -stop_gradient(φ) A logp,  φ = w^k exp(λ (1 - w)),
                                           w = exp(Σ_t l_t)

    where `(k, λ)` of vespo are the positive ones if `A >= 0`, and `w` includes `importance_weights`, which
    then are no factor of the loss; `w` is kept within `[1e-8, exp(20)]`, and so are its factors, `r` within
    `exp(±20)`. The loss of a token is

        loss = keep * high_entropy * importance_weight * sampler_weight * s + beta * kl + old_kl_coef l²/2
        kl   = exp(d) - d - 1,  d = ref_logp - logp;  times r with use_bias_correction_kl

    or another `kl_estimator`, and `A` is the advantage plus `ref_advantage * stop_gradient(d)`.

    * `keep` is 0 for tokens with `A < 0` of sequences whose mean of `sampling_logp - logp` exceeds
      `off_policy_mask_threshold` (`sampling_logps=None`: old_logps; NaN: no drift).
    * `high_entropy` is 0 for tokens whose entropy is below the `1 - top_entropy_quantile` quantile of all
      tokens that count.

    A mean is `Σ_units / number of units` (or `num_items`), where the unit of grpo, sapo and gmpo is a
    sequence (the mean of its tokens), of luspo a sequence (the sum of its tokens), of dr_grpo a sequence (the
    sum over `max_completion_length`), and of bnpo, dapo, cispo and vespo a token, unless `loss_agg_mode`
    names the mean. Tokens that a mask drops still count
    in it, and so do sequences without tokens. With `entropy_coef`, the mean loses `entropy_coef` times the
    mean entropy of the tokens with `high_entropy` 1, whatever the unit; a sum has the entropies' sum there.

    Log-ratios are clamped to ±80 before exp (`d` from above only, in both places), where their gradient is 0.

    Metrics are means over tokens (0 if none counts): entropy, importance_ratio, kl (as in the loss), and by
    loss type clip_ratio/low_mean, clip_ratio/high_mean and clip_ratio/region_mean; cispo_clip_ratio;
    vespo/phi_seq_mean. The last five are means over sequences where they are one number per sequence. The
    clip ratios see the ratio that delta bounds, importance_ratio the one it does not. `logps` are 0 where
    tokens do not count.

    References:
        Shao et al., "DeepSeekMath", 2024 (grpo). Liu et al., "Understanding R1-Zero-Like Training", 2025
        (dr_grpo). Yu et al., "DAPO", 2025. MiniMax, "MiniMax-M1", 2025 (cispo). "Soft Adaptive Policy
        Optimization", arXiv 2511.20347, 2025 (sapo). "Length-Unbiased Sequence Policy Optimization", arXiv
        2602.05261, 2026 (luspo). "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable
        Off-Policy LLM Training", arXiv 2602.10693, 2026 (vespo). bnpo is the loss of `ppo`. Zheng et al.,
        "Group Sequence Policy Optimization", 2025 (sequence level). Prime Intellect, "INTELLECT-2", 2025
        (delta). "Geometric-Mean Policy Optimization", arXiv 2507.20673, 2025 (gmpo). "Rethinking the
        Trust Region in LLM Reinforcement Learning", arXiv 2602.04879, 2026 (binary_tv, binary_kl). Schulman,
        "Approximating KL Divergence", 2020 (kl). DeepSeek-AI, "DeepSeek-V3.2", 2025
        (off-policy mask, bias-corrected kl). Wang et al., "Beyond the 80/20 Rule", 2025
        (top_entropy_quantile).
    """
    tokens = _tokens(hidden, weight, targets, mask, cu_seqlens, ignore_index, **head)
    logps, mask = tokens.logps, tokens.mask
    advantages = tokens.per_sequence_or_token(advantages)
    old_logps = logps.detach() if old_logps is None else tokens.per_token(old_logps)
    weights = None if importance_weights is None else tokens.per_sequence_or_token(importance_weights, 1.0)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high

    if ref_advantage:
        advantages = advantages + ref_advantage * (tokens.per_token(ref_logps) - logps.detach() * mask)
    log_ratio = logps - old_logps  # 0 where tokens do not count, as both are
    by_sequence = importance_sampling_level != "token"
    mean_log_ratio = log_ratio.sum(1, keepdim=True) / tokens.lengths
    level_log_ratio = {
        "token": log_ratio,
        "sequence": mean_log_ratio,
        "sequence_token": mean_log_ratio.detach() + logps - logps.detach(),
    }[importance_sampling_level]
    ratio = _ratio(level_log_ratio)  # (B, T) or (B, 1)

    match loss_type:
        case "grpo" | "bnpo" | "dr_grpo" | "dapo" | "luspo" if trust_region == "clip":
            surrogate, observed = _clipped_surrogate(ratio, advantages, epsilon, epsilon_high, delta)
        case "grpo" | "bnpo" | "dr_grpo" | "dapo" | "luspo":
            low, high = _region(trust_region, logps, old_logps, advantages, epsilon, epsilon_high)
            bounded = ratio if delta is None else ratio.clamp(max=delta)
            surrogate = _policy_gradient(bounded, advantages, level_log_ratio) * ~(low | high)
            observed = _clip_metrics(low, high)
        case "gmpo":
            bounded = log_ratio.clamp(-epsilon, epsilon_high)
            clipped = torch.where(
                advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded)
            )
            surrogate = -advantages * _ratio((clipped * mask).sum(1, keepdim=True) / tokens.lengths)
            observed = _clip_metrics(
                (log_ratio < -epsilon) & (advantages < 0), (log_ratio > epsilon_high) & (advantages > 0)
            )
        case "cispo":
            surrogate = -ratio.clamp(cispo_min, epsilon_high).detach() * advantages * logps
            observed = {"cispo_clip_ratio": (ratio > epsilon_high) & (advantages > 0)}
        case "sapo":
            tau = _where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg, logps)
            surrogate, observed = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, {}
        case "vespo":
            k = _where(advantages >= 0, vespo_k_pos, vespo_k_neg, logps)
            phi = _vespo_weight(
                log_ratio, weights, k, _where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg, logps)
            )
            surrogate, observed, weights = -phi * advantages * logps, {"vespo/phi_seq_mean": phi}, None
        case _:
            raise ValueError(f"loss_type: expected a name of the docstring, got {loss_type!r}; pick one.")

    high_entropy = _high_entropy(tokens, top_entropy_quantile)
    losses = surrogate * high_entropy
    if off_policy_mask_threshold is not None:
        sampled = old_logps if sampling_logps is None else tokens.per_token(sampling_logps)
        losses = losses * ((advantages >= 0) | (_drift(tokens, sampled) <= off_policy_mask_threshold))
    if weights is not None:
        losses = losses * weights
    if corrections := _given(sampler_correction):
        sampled = tokens.per_token(sampling_logps)
        losses = losses * sampler_weights(corrections, old_logps, sampled, tokens.counted)

    metrics = {"entropy": _mean(tokens.entropy, mask), "importance_ratio": _mean(ratio.expand_as(mask), mask)}
    if beta != 0:
        kl = _kl_estimate(kl_estimator, tokens.per_token(ref_logps) - logps, kl_max)
        kl = kl * ratio if use_bias_correction_kl else kl
        losses = losses + beta * kl * mask
        metrics["kl"] = _mean(kl, mask)
    losses = losses + old_kl_coef * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND) ** 2 / 2
    one_per_sequence = advantages.shape[1] == 1 and (by_sequence or loss_type == "vespo")
    for name, x in observed.items():
        x = x[:, :1] if one_per_sequence else x
        metrics[name] = _mean(x.to(mask.dtype), torch.ones_like(advantages) if one_per_sequence else mask)
    metrics = {name: x.detach() for name, x in metrics.items()}

    means = {
        "seq-mean-token-mean": tokens.lengths,
        "seq-mean-token-sum": 1,
        "seq-mean-token-sum-norm": max_completion_length,
    }
    of_type = {"dr_grpo": "seq-mean-token-sum-norm", "luspo": "seq-mean-token-sum"}
    of_type |= dict.fromkeys(("grpo", "sapo", "gmpo"), "seq-mean-token-mean")
    mode = loss_agg_mode or of_type.get(loss_type)
    bonus = entropy_coef * tokens.entropy * high_entropy if entropy_coef else torch.zeros_like(logps)
    losses = losses * mask
    if mode in means:
        losses, bonus = (losses / means[mode]).sum(1), bonus.sum(1)
        count = losses.numel()
    else:
        losses, bonus = tokens.as_given(losses), tokens.as_given(bonus)
        count = mask.sum()
    if reduction == "mean":
        loss = ratio_of(losses.sum(), count if num_items is None else num_items) - ratio_of(
            bonus.sum(), high_entropy.sum()
        )
    else:
        loss = (losses - bonus).sum() if reduction == "sum" else losses - bonus
    return loss, metrics, tokens.as_given(logps.detach())


def ppo(
    hidden: Tensor,  # (B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (B, T), or (N,) packed
    *,
    advantages: Tensor,  # as targets
    **options,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Proximal policy optimization with a clipped ratio and one advantage per token.

    `loss = 1 / M Σ_t -min(r_t A_t, clip(r_t, 1 - ε, 1 + ε) A_t)`, where the sum is over the `M` supervised
    tokens. The options and results are those of `grpo`, whose loss type "bnpo" is this loss.

    References:
        Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7.
    """
    return grpo(hidden, weight, targets, advantages=advantages, loss_type="bnpo", **options)


def rloo(
    hidden: Tensor,  # (B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (B, T), or (N,) packed
    *,
    advantages: Tensor,  # (B,)
    mask: Tensor | None = None,  # as targets
    old_logps: Tensor | None = None,  # (B,), or as targets
    sampling_logps: Tensor | None = None,  # as targets
    sampler_correction=None,
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    **head,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """REINFORCE leave-one-out with a clipped ratio of whole sequences: `(loss, metrics, logps)`.

    `loss = 1 / B Σ_i -min(r_i A_i, clip(r_i, 1 - ε, 1 + ε_high) A_i)`, `r = exp(Σ_t logp_t - Σ_t
    old_logp_t)`: a sum over the tokens of a sequence, where `grpo` has a mean. A sequence without tokens
    gives 0 and is one of the `B`. `old_logps` are per token, or summed over each sequence.

    References:
        Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human
        Feedback in LLMs", 2024. Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7
        (clip).
    """
    tokens = _tokens(hidden, weight, targets, mask, cu_seqlens, ignore_index, **head)
    advantages = tokens.per_sequence_or_token(advantages)
    old_logps = tokens.logps.detach() if old_logps is None else tokens.per_sequence_or_token(old_logps)

    ratio = _ratio(tokens.logps.sum(1, keepdim=True) - old_logps.sum(1, keepdim=True))  # (B, 1)
    losses, flags = _clipped_surrogate(
        ratio, advantages, epsilon, epsilon if epsilon_high is None else epsilon_high
    )
    if corrections := _given(sampler_correction):
        sampled, counted = tokens.per_token(sampling_logps), tokens.counted
        if old_logps.shape[1] == 1:  # sums
            sampled = (sampled * counted).sum(1, keepdim=True)
            one = counted.any(1, keepdim=True)
            length = tokens.lengths if corrections[0].level == "geometric" else 1
            weights = sampler_weights(corrections, old_logps / length, sampled / length, one)
        else:
            weights = sampler_weights(corrections, old_logps, sampled, counted)
        losses = losses * weights
    losses = losses.squeeze(1)

    metrics = {
        "entropy": _mean(tokens.entropy, tokens.mask),
        "importance_ratio": _mean(ratio.expand_as(tokens.mask), tokens.mask),
    }
    metrics |= {name: _mean(flag.to(ratio.dtype), torch.ones_like(ratio)) for name, flag in flags.items()}
    metrics = {name: x.detach() for name, x in metrics.items()}

    if reduction == "mean":
        losses = ratio_of(losses.sum(), losses.numel() if num_items is None else num_items)
    return losses.sum() if reduction == "sum" else losses, metrics, tokens.as_given(tokens.logps.detach())


def reinforce(
    hidden: Tensor,  # (B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (B, T), or (N,) packed
    *,
    advantages: Tensor,  # (B,), or as targets
    mask: Tensor | None = None,  # as targets
    old_logps: Tensor | None = None,  # as targets
    sampling_logps: Tensor | None = None,  # as targets
    old_kl_coef: float = 0.0,
    sampler_correction=None,
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    reduction: str = "mean",
    ignore_index: int = -100,
    **head,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The policy gradient's own loss, `1 / N Σ_t -A_t logp_t` over the `N` tokens that count:
    `(loss, metrics, logps)`. With `old_kl_coef`, DRO's, `+ old_kl_coef (logp - old_logp)² / 2`.

    References:
        Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
        1992.
    """
    tokens = _tokens(hidden, weight, targets, mask, cu_seqlens, ignore_index, **head)
    losses = -tokens.per_sequence_or_token(advantages) * tokens.logps
    old_logps = tokens.logps.detach() if old_logps is None else tokens.per_token(old_logps)
    if corrections := _given(sampler_correction):
        sampled = tokens.per_token(sampling_logps)
        losses = losses * sampler_weights(corrections, old_logps, sampled, tokens.counted)
    log_ratio = (tokens.logps - old_logps).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    losses = tokens.as_given(losses + old_kl_coef * log_ratio**2 / 2)

    if reduction == "mean":
        losses = ratio_of(losses.sum(), tokens.mask.sum() if num_items is None else num_items)
    metrics = {"entropy": _mean(tokens.entropy, tokens.mask).detach()}
    return losses.sum() if reduction == "sum" else losses, metrics, tokens.as_given(tokens.logps.detach())
