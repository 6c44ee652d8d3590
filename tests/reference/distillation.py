"""Distillation losses on full logits: divergences between a student and a teacher, whole or known by its best
k tokens alone."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference.cross_entropy import head_logits, token_logprobs

# Log-probability of what is not there. Its exponential is 0 in every dtype, and unlike -inf it makes no NaN
# in a gradient.
MIN_LOGPROB = -1e4


def distillation(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor | None = None,  # (...)
    *,
    teacher_hidden: Tensor | None = None,  # (..., H')
    teacher_weight: Tensor | None = None,  # (V', H')
    teacher_bias: Tensor | None = None,  # (V',)
    teacher_logprobs_topk: tuple[Tensor, Tensor] | None = None,  # (..., k) log-probabilities and (..., k) ids
    topk_mode: str = "tail",
    support: str | None = None,
    k: int | None = None,
    divergence: str = "jsd",
    beta: float = 0.5,
    skew_alpha: float = 0.1,
    hard_loss_weight: float = 0.0,
    mask: Tensor | None = None,  # (...)
    num_items: float | Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    **head,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence of a student from a teacher, with a share of cross-entropy: `(loss, metrics)`.

    `loss = w * nll + (1 - w) * soft` per token, with `w = hard_loss_weight`, `nll` the student's
    cross-entropy at temperature 1, `s` and `t` the two distributions at `temperature`, `KL(p||q) = Σ_v p_v
    log(p_v / q_v)`, `0 log 0 = 0`, and `soft` one of

        jsd              β KL(t||m) + (1 - β) KL(s||m),  m = β t + (1 - β) s;
                         β = 0: KL(t||s);  β = 1: KL(s||t)
        forward_kl       KL(t||s)
        reverse_kl       KL(s||t)
        skewed_kl        KL(t||m),  m = α t + (1 - α) s
        skewed_reverse_kl  KL(s||m),  m = α s + (1 - α) t
        total_variation  1/2 Σ_v |t_v - s_v|
        cosine           1 - cos(z_s, z_t), of the logits; the temperature cancels

    There is no factor `temperature²`. The teacher is a constant: no gradient reaches it.

    Vocabularies of different sizes are cut to the ids that both have, before the softmax. The entropy and the
    agreement look at the same cut distributions, the cross-entropy and the accuracy at the student's whole
    vocabulary.

    A teacher known by its k best ids, `teacher_logprobs_topk` at `temperature` and in any order, makes `s`
    and `t` distributions over these ids and one bucket for all others ("tail"), or over these ids alone,
    renormalized ("renormalize"); "partial" sums over these ids, and renormalizes nothing. A value of -inf
    marks an empty slot. The teacher's tail `1 - Σ exp(values)`
    is at least eps, fp32's for values in a narrower dtype: below it is rounding and may be negative.

    The metrics are means over the tokens that count: "soft_loss", "hard_loss" (nll), "entropy" of the student
    at `temperature`, "token_accuracy" (its best id is the target) and "agreement" (its best id is the
    teacher's). "hard_loss" and "token_accuracy" are 0 without targets.

    With a whole teacher, `support` ("teacher", "student", "union") takes the `k` best ids of each it names
    (of equal logits the lowest) in the place of those of `teacher_logprobs_topk`.

    References:
        Hinton et al., "Distilling the Knowledge in a Neural Network", 2015 (temperature, hard and soft loss).
        Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        2023 (generalized JSD). Ko et al., "DistiLLM: Towards Streamlined Distillation for Large Language
        Models", 2024 (skewed KL). Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge
        Distillation", 2023 (total variation).
    """
    logits = head_logits(hidden, weight, temperature=temperature, **head)
    student_best = student_best_shared = logits.argmax(-1)

    if teacher_logprobs_topk is None:
        teacher_head = {
            "softcap": teacher_softcap,
            "logit_scale": teacher_logit_scale,
            "temperature": temperature,
        }
        teacher_logits = head_logits(teacher_hidden, teacher_weight, teacher_bias, **teacher_head).detach()
        common = min(logits.shape[-1], teacher_logits.shape[-1])
        teacher_best = teacher_logits[..., :common].argmax(-1)
        if support is None:
            student_best_shared = logits[..., :common].argmax(-1)
            logits, teacher_logits = logits[..., :common], teacher_logits[..., :common]
            student, teacher = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        else:
            chosen = {
                "student": best_of(logits[..., :common], k),
                "teacher": best_of(teacher_logits[..., :common], k),
            }
            kept = chosen["student"] | chosen["teacher"] if support == "union" else chosen[support]
            student, teacher = (
                on_kept_ids(x.log_softmax(-1), kept, topk_mode) for x in (logits, teacher_logits)
            )
    else:
        values, ids = teacher_logprobs_topk
        student, teacher = on_best_ids(logits.log_softmax(-1), values.detach(), ids, topk_mode)
        teacher_best = ids.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1)

    soft = {
        "jsd": lambda: generalized_jsd(student, teacher, beta),
        "forward_kl": lambda: kl(teacher, student),
        "reverse_kl": lambda: kl(student, teacher),
        "skewed_kl": lambda: kl_to_mixture(teacher, student, 1 - skew_alpha),
        "skewed_reverse_kl": lambda: kl_to_mixture(student, teacher, 1 - skew_alpha),
        "total_variation": lambda: (teacher.exp() - student.exp()).abs().sum(-1) / 2,
        "cosine": lambda: cosine_distance(logits, teacher_logits),
    }[divergence]
    if topk_mode == "partial":
        p, q = (teacher, student) if divergence == "forward_kl" else (student, teacher)
        soft = (p.exp() * (p - q)).sum(-1)
    else:
        soft = soft()

    counted = torch.ones_like(soft, dtype=torch.bool) if mask is None else mask != 0
    hard, correct = torch.zeros_like(soft), torch.zeros_like(counted)
    if targets is not None:
        correct = student_best == targets
        counted = counted & (targets != ignore_index)
        hard = -token_logprobs(hidden, weight, targets, ignore_index=ignore_index, **head)[0]
    losses = (hard_loss_weight * hard + (1 - hard_loss_weight) * soft).masked_fill(~counted, 0)

    logprobs = logits.log_softmax(-1)
    per_token = {
        "soft_loss": soft,
        "hard_loss": hard,
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "token_accuracy": correct.to(soft),
        "agreement": (student_best_shared == teacher_best).to(soft),
    }
    count = counted.sum().clamp(min=1)
    metrics = {
        name: values.detach().masked_fill(~counted, 0).sum() / count for name, values in per_token.items()
    }

    if reduction == "none":
        return losses, metrics
    if reduction == "sum":
        return losses.sum(), metrics
    normalizer = count if num_items is None else torch.as_tensor(num_items, dtype=losses.dtype)
    return losses.sum() / torch.where(normalizer == 0, 1, normalizer), metrics


def on_best_ids(student: Tensor, values: Tensor, ids: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of student and teacher over the teacher's k ids.

    Args:
        student: (..., V) log-probabilities.
        values: (..., k) log-probabilities of the teacher; -inf marks an empty slot.
        ids: (..., k) the teacher's ids.
        mode: "renormalize": both are normalized over these ids, (..., k). "tail": both get one more entry for
            the remaining probability, (..., k + 1).
    """
    given = values > -math.inf
    rounding = torch.finfo(torch.promote_types(values.dtype, torch.float32)).eps
    teacher = values.to(student.dtype).masked_fill(~given, MIN_LOGPROB)
    picked = student.gather(-1, ids).masked_fill(~given, MIN_LOGPROB)
    if mode == "renormalize":
        return picked.log_softmax(-1), teacher.log_softmax(-1)
    if mode == "partial":
        return picked, teacher
    covered = torch.zeros_like(student).scatter_add(-1, ids, given.to(student.dtype)) > 0
    student_tail = student.masked_fill(covered, MIN_LOGPROB).logsumexp(-1, keepdim=True)
    teacher_tail = (-teacher.logsumexp(-1, keepdim=True).clamp(max=-rounding).expm1()).log()
    teacher_tail = teacher_tail.masked_fill(covered.all(-1, keepdim=True), MIN_LOGPROB)
    # Values that sum to more than 1 are brought back to it.
    return torch.cat([picked, student_tail], -1), torch.cat([teacher, teacher_tail], -1).log_softmax(-1)


def best_of(logits: Tensor, k: int) -> Tensor:
    """`(..., V)` bool, true for the `k` best ids."""
    ids = logits.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True)


def on_kept_ids(logprobs: Tensor, kept: Tensor, mode: str) -> Tensor:
    """Log-probabilities `(..., V)` over the kept ids `(..., V')`, as by `on_best_ids`; ids from `V'` on are
    others."""
    shared = logprobs[..., : kept.shape[-1]]
    chosen = shared.masked_fill(~kept, MIN_LOGPROB)
    if mode == "renormalize":
        return chosen.log_softmax(-1)
    if mode == "partial":
        return chosen
    others = torch.cat([shared.masked_fill(kept, MIN_LOGPROB), logprobs[..., kept.shape[-1] :]], -1)
    return torch.cat([chosen, others.logsumexp(-1, keepdim=True)], -1)


def kl(logp: Tensor, logq: Tensor, ratio: Tensor | None = None) -> Tensor:
    """`KL(p||q)` of log-probabilities `(..., V)` that sum to 1; `ratio` is `log q - log p`, for a caller that
    knows it better.

    The sum of `-p ratio` cancels: terms of the size of `ratio` make a sum of the size of its square. As `Σ p
    = Σ q`, it is also the sum of `q - p - p ratio = p (exp(ratio) - 1 - ratio)`, where no term is negative,
    and equal distributions give exactly 0.
    """
    p, q = logp.exp(), logq.exp()
    ratio = logq - logp if ratio is None else ratio
    near = ratio.clamp(-1, 1)
    # The left form is exact near 0, and the right one does not overflow far from it.
    return torch.where(ratio.abs() < 1, p * (near.expm1() - near), q - p - p * ratio).sum(-1)


def kl_to_mixture(logp: Tensor, logq: Tensor, share: float) -> Tensor:
    """`KL(p||m)` with `m = (1 - share) p + share q`."""
    if share in (0, 1):
        return kl(logp, logq if share else logp) + 0 * logq.exp().sum(-1)
    # log m - log p is log1p(share * expm1(x)), or what x > 0 needs not to overflow, x + log1p((1 - share) *
    # expm1(-x)). Unlike the difference of the two logarithms it is exactly 0 where p = q.
    x = logq - logp
    below, above = x.clamp(max=0), x.clamp(min=0)
    ratio = (share * below.expm1()).log1p() + above + ((1 - share) * (-above).expm1()).log1p()
    return kl(logp, torch.logaddexp(logp + math.log1p(-share), logq + math.log(share)), ratio)


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """`β KL(t||m) + (1 - β) KL(s||m)` with `m = β t + (1 - β) s`; at 0 and 1 the limits of its quotient by `β
    (1 - β)`."""
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    return beta * kl_to_mixture(teacher, student, 1 - beta) + (1 - beta) * kl_to_mixture(
        student, teacher, beta
    )


def cosine_distance(x: Tensor, y: Tensor) -> Tensor:
    """`1 - cos(x, y)` as half the squared distance of the two unit vectors, which is exact where they almost
    agree."""
    return (F.normalize(x, dim=-1) - F.normalize(y, dim=-1)).square().sum(-1) / 2
