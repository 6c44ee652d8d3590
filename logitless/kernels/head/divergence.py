"""Divergences between the rows of two chunks of logits, student `[C, V]` and teacher `[C, V']`, and the
student's gradient in place.

With s and t the two distributions, d = log t - log s, and m = beta t + (1 - beta) s:

    jsd           beta KL(t||m) + (1 - beta) KL(s||m)     d z = s (score - sum s score)
                                                          with score = (1 - beta) log(s / m)
    reverse_kl    KL(s||t)                                d z = s (score - sum s score),  score = -d
    forward_kl    KL(t||s)                                d z = s - t

Every KL is summed as KL(p||q) = sum p phi(log q/p), phi(r) = exp(r) - 1 - r. No term is negative, so nothing
cancels where p and q are nearly equal, and equal ones give exactly 0. A plain sum of p log p/q would have no
correct digits there.

`fused_divergence` is the Triton kernel (`divergence_triton.py`): statistics, loss and gradient of a chunk in
one launch. The functions of log-probabilities here are its PyTorch twin, which `torch.func.grad_and_value`
differentiates wherever Triton does not run.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import TokenBuffers, allocate_stats, token_statistics
from logitless.kernels.head.transform import Head

# Log-probability of an id that is ruled out (-inf): exp() of it is 0 in every dtype, and unlike -inf it makes
# no NaN. It is below every finite log-probability, which stays as it is.
NOTHING = -1e30
FUSED = ("jsd", "forward_kl", "reverse_kl")


def kl_terms(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """p phi(r), r = log q/p, element by element."""
    near = r.clamp(max=1.0)
    # The right form does not overflow, the left one does not cancel.
    return torch.where(r < 1, p * (torch.expm1(near) - near), q - p - p * r)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p||q) of rows of log-probabilities."""
    logp, logq = logp.clamp(min=NOTHING), logq.clamp(min=NOTHING)
    return kl_terms(logp.exp(), logq.exp(), logq - logp).sum(-1)


def mixture(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log m/s and log m/t of m = beta t + (1 - beta) s with 0 < beta < 1, exactly 0 where s = t."""
    if beta > 0.5:
        to_teacher, to_student = mixture(teacher, student, 1 - beta)
        return to_student, to_teacher
    d = teacher - student
    # log m/s where t is not much larger, and log m/t where it is: neither sum cancels, however small beta is.
    near = torch.log1p(beta * torch.expm1(d.clamp(max=1)))
    far = torch.log(beta + (1 - beta) * torch.exp(-d.clamp(min=1)))
    is_near = d < 1
    return torch.where(is_near, near, far + d), torch.where(is_near, near - d, far)


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalized Jensen-Shannon divergence of rows of log-probabilities; at 0 and 1 the forward and the
    reverse KL."""
    if beta in (0.0, 1.0):
        return kl(student, teacher) if beta else kl(teacher, student)
    student, teacher = student.clamp(min=NOTHING), teacher.clamp(min=NOTHING)
    to_student, to_teacher = mixture(student, teacher, beta)
    s, t = student.exp(), teacher.exp()
    m = torch.lerp(s, t, beta)
    return ((1 - beta) * kl_terms(s, m, to_student) + beta * kl_terms(t, m, to_teacher)).sum(-1)


def skewed_kl(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """KL(t||alpha t + (1 - alpha) s); at 0 the forward KL, at 1 nothing."""
    if alpha == 0.0:
        return kl(teacher, student)
    student, teacher = student.clamp(min=NOTHING), teacher.clamp(min=NOTHING)
    if alpha == 1.0:
        return (0.0 * student).sum(-1)
    _, to_teacher = mixture(student, teacher, alpha)
    t = teacher.exp()
    return kl_terms(t, torch.lerp(student.exp(), t, alpha), to_teacher).sum(-1)


class DivergenceStats(NamedTuple):
    """Per-token statistics `[C]` of a chunk, fp32."""

    soft: Tensor  # the divergence
    hard: Tensor  # the student's cross-entropy at temperature 1; 0 without a label
    entropy: Tensor  # of the student, at the temperature
    is_top1: Tensor  # whether the student's best id is the label
    agreement: Tensor  # whether it is the teacher's best


def has_kernel(divergence: str, device: torch.device, dtype: torch.dtype) -> bool:
    return divergence in FUSED and uses_triton(device, dtype)


def fused_divergence(
    student: Tensor,  # (C, V) products with the head
    teacher: Tensor,  # (C, V')
    labels: Tensor | None,  # (C,) int64; outside [0, V) for none
    factors: Tensor
    | None,  # (C,) d loss / d (loss of the token), 0 for a token that does not count; None for no gradient
    *,
    gradient: Tensor | None,  # (C, V), written; may overlay `student`
    divergence: str,
    beta: float,
    hard_weight: float,
    head: Head,
    teacher_head: Head,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V',)
) -> DivergenceStats:
    """Statistics of a chunk and, given `factors`, the gradient with respect to the student's products of
    `factors * (hard_weight * hard + (1 - hard_weight) * soft)`.

    The divergence `soft` compares the ids that both vocabularies have; the cross-entropy `hard` is over all
    of the student's ids.
    """
    from logitless.kernels.head import divergence_triton

    return DivergenceStats(
        *divergence_triton.divergence_pass(
            student,
            teacher,
            labels,
            factors,
            gradient=gradient,
            divergence=divergence,
            beta=beta,
            hard_weight=hard_weight,
            head=head,
            teacher_head=teacher_head,
            bias=bias,
            teacher_bias=teacher_bias,
        )
    )


class Ranks(Protocol):
    """The part of a sharded vocabulary's interface that the divergence needs (`parallel/vocabulary.py`)."""

    width: int

    def combine(self, stats: TokenBuffers, columns: Tensor) -> object: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def best_id(self, values: Tensor, columns: Tensor) -> Tensor: ...


# Rows of logits whose arg-max is taken at a time, with the transform of the head.
ARG_MAX_ROWS = 64


def sharded_divergence(
    student: Tensor,  # (C, V_r) products with this rank's rows of the head
    teacher: Tensor,  # (C, V_r)
    labels: Tensor,  # (C,) columns, V_r for a label of another rank, negative for none
    factors: Tensor | None,
    *,
    ranks: Ranks,
    gradient: Tensor | None,
    divergence: str,
    beta: float,
    hard_weight: float,
    head: Head,
    teacher_head: Head,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
) -> DivergenceStats:
    """`fused_divergence` of a shard: the same three passes, with an all-reduce of the sums after each."""
    from logitless.kernels.head import divergence_shard_triton

    nowhere = torch.full_like(labels, ranks.width)
    targets = torch.where(labels < 0, nowhere, labels)

    def numbers(
        logits: Tensor, ids: Tensor, names: tuple[str, ...], head: Head, bias: Tensor | None
    ) -> TokenBuffers:
        found = allocate_stats(names, len(ids), torch.float32, logits.device)
        token_statistics(logits, ids, found, head=head, bias=bias, ignore_index=-1)
        ranks.combine(found, ids)
        return found

    cold = numbers(student, targets, ("entropy",), head, bias)
    taught = numbers(teacher, nowhere, (), teacher_head._replace(temperature=head.temperature), teacher_bias)
    plain = (
        cold
        if head.temperature == 1.0
        else numbers(student, targets, (), head._replace(temperature=1.0), bias)
    )
    known = torch.stack([x for found in (cold, taught, plain) for x in (found.lse, found.lse_residual)])

    def arg_max(logits: Tensor, head: Head, bias: Tensor | None) -> Tensor:
        found = [head.logits(x, bias)[0].max(-1) for x in logits.split(ARG_MAX_ROWS)]
        return ranks.best_id(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    best, favourite = arg_max(student, head, bias), arg_max(teacher, teacher_head, teacher_bias)
    options = {
        "divergence": divergence,
        "beta": beta,
        "hard_weight": hard_weight,
        "head": head,
        "teacher_head": teacher_head,
        "bias": bias,
        "teacher_bias": teacher_bias,
    }
    sums = torch.empty(2, len(labels), dtype=torch.float32, device=student.device)
    divergence_shard_triton.shard_pass(student, teacher, labels, None, known, sums, gradient=None, **options)
    ranks.all_reduce(sums)
    if factors is not None:
        divergence_shard_triton.shard_pass(
            student, teacher, labels, factors, known, sums, gradient=gradient, **options
        )
    hard = torch.where(labels < 0, 0.0, -plain.logps)
    return DivergenceStats(
        sums[0], hard, cold.entropy, torch.where(labels < 0, 0.0, cold.is_top1), (best == favourite).float()
    )
