"""Logits of a head, log-probabilities and cross-entropy, on full logits."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def head_logits(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None = None,  # (V,)
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Logits of a language-model head, `(..., V)`, in fp32 or in the operands' dtype if that is wider.

    `z = softcap * tanh(logit_scale * (h·w + b) / softcap) / temperature`; without a soft cap
    `z = logit_scale * (h·w + b) / temperature`.

    References:
        Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, section 2 (soft cap).
    """
    products = F.linear(hidden, weight)
    logits = products.to(torch.promote_types(products.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias
    logits = logit_scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def shift_left(values: Tensor, fill: float) -> Tensor:
    """Aligns labels with the positions that predict them: `out[..., i] = values[..., i + 1]`, the last one
    `fill`."""
    return torch.cat([values[..., 1:], torch.full_like(values[..., :1], fill)], dim=-1)


def token_logprobs(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    **head,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(logps, entropy, lse)`, each of the shape of `targets`, 0 where ignored.

    `logp = z_y - lse`, `entropy = -Σ_v p_v log p_v`, `lse = log Σ_v exp(z_v)`, with `p = softmax(z)`; `head`
    are the options of `head_logits`.
    """
    logits = head_logits(hidden, weight, **head)
    logprobs = logits.log_softmax(-1)
    ignored = targets == ignore_index
    labels = targets.masked_fill(ignored, 0)

    logps = logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    lse = logits.logsumexp(-1)
    return logps.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0), lse.masked_fill(ignored, 0)


def cross_entropy(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,  # (V,)
    token_weights: Tensor | None = None,  # (...)
    dft: bool = False,
    shift: bool = False,
    num_items: float | Tensor | None = None,
    **head,
) -> Tensor:
    """Cross-entropy of a language-model head.

    Per supervised token, with class weights `c` (1 without), smoothing `ε`, token weight `a` (1 without) and
    `p = softmax(z)`:

        loss = a * ((1 - ε) * nll + ε / V * Σ_v -c_v log p_v + z_loss * lse²)
        nll  = -c_y log p_y,  or with dft  -c_y stop_gradient(p_y) log p_y

    The mean divides the sum by `num_items`, else by `Σ c_y` over the supervised tokens (their number without
    class weights). A normalizer of zero gives 0 where `torch.nn.functional.cross_entropy` gives NaN. With
    `shift`, position `i` predicts `targets[..., i + 1]`, and token weights move along. With reduction "none",
    one loss per target, 0 where ignored.

    References:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7 (label
        smoothing). de Brébisson and Vincent, "The Z-loss: a shift and scale invariant classification loss",
        2016; Chowdhery et al., "PaLM", 2022, section 5 (z-loss as used here).
        Wu et al., "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward
        Rectification", 2025 (dft).
    """
    if shift:
        targets = shift_left(targets, ignore_index)
        token_weights = None if token_weights is None else shift_left(token_weights, 0.0)

    logits = head_logits(hidden, weight, **head)
    logprobs = logits.log_softmax(-1)
    ignored = targets == ignore_index
    labels = targets.masked_fill(ignored, 0)
    weights = logits.new_ones(weight.shape[0]) if class_weights is None else class_weights.to(logits.dtype)
    target_weights = weights[labels].masked_fill(ignored, 0)

    logps = logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    nll = -target_weights * logps
    if dft:
        nll = nll * logps.detach().exp()
    smoothing = -(logprobs * weights).sum(-1) / weight.shape[0]

    losses = (
        (1 - label_smoothing) * nll + label_smoothing * smoothing + z_loss * logits.logsumexp(-1).square()
    )
    if token_weights is not None:
        losses = losses * token_weights.to(losses.dtype)
    losses = losses.masked_fill(ignored, 0)

    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    normalizer = target_weights.sum() if num_items is None else torch.as_tensor(num_items, dtype=losses.dtype)
    return losses.sum() / torch.where(normalizer == 0, 1, normalizer)


def multi_token(
    hiddens: Sequence[Tensor],  # (B, T, H) each
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (B, T)
    *,
    coefficients: Sequence[float] | None = None,
    ignore_index: int = -100,
    **options,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Multi-token prediction: `Σ_k coefficient_k * cross_entropy(hidden_k, token i + 1 + k)`.

    Args:
        hiddens: hidden states of each depth.
        targets: labels at their own positions.
        coefficients: 1 for the first and 0.3 for the others by default.
        options: as in `cross_entropy`.

    Returns:
        0-d loss, and by depth its loss and the accuracy of its best ids.

    References:
        Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", 2024;
        DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2.
    """
    coefficients = coefficients or (1.0, *[0.3] * (len(hiddens) - 1))
    head = {
        name: x for name, x in options.items() if name in ("bias", "softcap", "logit_scale", "temperature")
    }
    loss, metrics = torch.zeros((), dtype=weight.dtype), {}
    for k, (hidden, coefficient) in enumerate(zip(hiddens, coefficients, strict=True)):
        targets = shift_left(targets, ignore_index)
        depth = cross_entropy(hidden, weight, targets, ignore_index=ignore_index, **options)
        correct = (head_logits(hidden, weight, **head).argmax(-1) == targets) & (targets != ignore_index)
        count = (targets != ignore_index).sum().clamp(min=1)
        metrics |= {f"depth_{k}/loss": depth.detach(), f"depth_{k}/accuracy": correct.sum().double() / count}
        loss = loss + coefficient * depth
    return loss, metrics
