"""Divergences between the rows of two chunks of logits, student (C, V) and teacher (C, V'), and the gradient
of the student's logits, in place.

Let s and t be the distributions of student and teacher, d = log t - log s, and m = beta t + (1 - beta) s:

    jsd           beta KL(t||m) + (1 - beta) KL(s||m)     d z = s (score - sum s score)
                                                          with score = (1 - beta) log(s / m)
    reverse_kl    KL(s||t)                                d z = s (score - sum s score),  score = -d
    forward_kl    KL(t||s)                                d z = s - t

The following divergences use the acceptance rate of speculative sampling, alpha = sum min(s, p). p is t or,
if the teacher has more ids than the student, the teacher's distribution over all of its ids:

    d alpha = s ([s < p] - sum s [s < p])
    total_variation       1 - alpha                       d z = -d alpha
    neg_log_acceptance    -log max(alpha, 1e-5)           d z = -d alpha / alpha, 0 below the bound
    lk_hybrid             lam KL(t||s) + (1 - lam) (1 - alpha), lam = exp(-lk_eta alpha) without its gradient

1 - alpha = sum max(s - p, 0). alpha is computed from the smaller of these two sums, so that 1 - alpha does
not cancel if s and p are nearly equal.

Every KL is computed as KL(p||q) = sum p phi(log q/p), phi(r) = exp(r) - 1 - r. No term is negative, so that
nothing cancels if p and q are nearly equal, and the KL of equal distributions is exactly 0. A plain sum of p
log p/q would have no correct digits in this case.

`fused_divergence` computes statistics, loss and gradient of a chunk, in one launch of the Triton kernel
(`divergence_triton.py`) or in its PyTorch twin. The functions of log-probabilities in this file are for
losses that `torch.func.grad_and_value` differentiates.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head import select
from logitless.kernels.head.cross_entropy import (
    TokenBuffers,
    allocate_stats,
    token_statistics,
    twin_bytes,
    twin_rows,
)
from logitless.kernels.head.transform import LogitTransform

# Replaces the log-probability -inf of an excluded id. Its exponential is 0 in every dtype and, unlike -inf,
# it does not produce NaN. No finite log-probability is below it.
MIN_LOGPROB = -1e30
# Divergences that are functions of the acceptance rate.
OF_ACCEPTANCE = ("total_variation", "neg_log_acceptance", "lk_hybrid")
FUSED = ("jsd", "forward_kl", "reverse_kl", *OF_ACCEPTANCE)
# Lower bound of the acceptance rate in "neg_log_acceptance". Below it, the gradient is 0.
LEAST = 1e-5


def kl_terms(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """p phi(r), r = log q/p, element by element."""
    near = r.clamp(max=1.0)
    # The first form does not cancel, the second form does not overflow.
    return torch.where(r < 1, p * (torch.expm1(near) - near), q - p - p * r)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p||q) of rows of log-probabilities."""
    logp, logq = logp.clamp(min=MIN_LOGPROB), logq.clamp(min=MIN_LOGPROB)
    return kl_terms(logp.exp(), logq.exp(), logq - logp).sum(-1)


def mixture(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log m/s and log m/t for m = beta t + (1 - beta) s with 0 < beta < 1; exactly 0 if s = t."""
    if beta > 0.5:
        to_teacher, to_student = mixture(teacher, student, 1 - beta)
        return to_student, to_teacher
    d = teacher - student
    # Compute log m/s if t is not much larger than s, and log m/t otherwise. Neither sum cancels, even for a
    # small beta.
    near = torch.log1p(beta * torch.expm1(d.clamp(max=1)))
    far = torch.log(beta + (1 - beta) * torch.exp(-d.clamp(min=1)))
    is_near = d < 1
    return torch.where(is_near, near, far + d), torch.where(is_near, near - d, far)


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalized Jensen-Shannon divergence of rows of log-probabilities.

    beta=0 is the forward KL, and beta=1 the reverse KL.
    """
    if beta in (0.0, 1.0):
        return kl(student, teacher) if beta else kl(teacher, student)
    student, teacher = student.clamp(min=MIN_LOGPROB), teacher.clamp(min=MIN_LOGPROB)
    to_student, to_teacher = mixture(student, teacher, beta)
    s, t = student.exp(), teacher.exp()
    m = torch.lerp(s, t, beta)
    return ((1 - beta) * kl_terms(s, m, to_student) + beta * kl_terms(t, m, to_teacher)).sum(-1)


def skewed_kl(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """KL(t||alpha t + (1 - alpha) s). alpha=0 is the forward KL; with alpha=1 it is 0."""
    if alpha == 0.0:
        return kl(teacher, student)
    student, teacher = student.clamp(min=MIN_LOGPROB), teacher.clamp(min=MIN_LOGPROB)
    if alpha == 1.0:
        # Either may be the one that is differentiated.
        return (0.0 * (student + teacher)).sum(-1)
    _, to_teacher = mixture(student, teacher, alpha)
    t = teacher.exp()
    return kl_terms(t, torch.lerp(student.exp(), t, alpha), to_teacher).sum(-1)


class DivergenceStats(NamedTuple):
    """Per-token statistics (C,) of a chunk, fp32."""

    soft: Tensor  # the divergence
    hard: Tensor  # the student's cross-entropy at temperature 1; 0 without a label
    entropy: Tensor  # of the student, at the temperature of the loss
    is_top1: Tensor  # whether the student's arg-max is the label
    agreement: Tensor  # whether student and teacher have the same arg-max
    acceptance: Tensor | None = None  # sum min(s, p), if requested


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
    transform: LogitTransform,
    teacher_transform: LogitTransform,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V',)
    overlap: bool = False,
    teacher_rows: Tensor | None = None,  # (C,) int64 row of `teacher` for each row; None: row i for row i
    teacher_lse: tuple[Tensor, Tensor]
    | None = None,  # of the teacher's rows: log-sum-exp over all ids of the teacher, and its rounding error
    lk_eta: float = 3.0,
) -> DivergenceStats:
    """Compute the statistics of a chunk and, with `factors`, the gradient with respect to the student's
    products.

    The gradient is that of `factors * (hard_weight * hard + (1 - hard_weight) * soft)`. The divergence `soft`
    is over the ids that both vocabularies have, and the cross-entropy `hard` is over all ids of the student.
    With `overlap`, or a divergence in `OF_ACCEPTANCE`, the statistics include the acceptance rate, for the
    teacher's distribution over the shared ids or, with `teacher_lse`, over all ids of the teacher.
    """
    options = {
        "gradient": gradient,
        "divergence": divergence,
        "beta": beta,
        "hard_weight": hard_weight,
        "transform": transform,
        "teacher_transform": teacher_transform,
        "bias": bias,
        "teacher_bias": teacher_bias,
        "overlap": overlap or divergence in OF_ACCEPTANCE,
        "teacher_rows": teacher_rows,
        "teacher_lse": teacher_lse,
        "lk_eta": lk_eta,
    }
    if not uses_triton(student.device, student.dtype):
        return _divergence_twin(student, teacher, labels, factors, **options)
    from logitless.kernels.head import divergence_triton

    return DivergenceStats(*divergence_triton.divergence_pass(student, teacher, labels, factors, **options))


def fixed_bytes(device: torch.device, dtype: torch.dtype, V: int, budget: int) -> int:
    """Bytes of the twin's temporaries for a chunk within the budget; 0 if the kernel runs."""
    # Twice as many bytes as the other twins.
    return 2 * twin_bytes(device, dtype, V, budget)


def _divergence_twin(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    factors: Tensor | None,
    *,
    gradient: Tensor | None,
    transform: LogitTransform,
    teacher_transform: LogitTransform,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    overlap: bool,
    teacher_rows: Tensor | None,
    teacher_lse: tuple[Tensor, Tensor] | None,
    hard_weight: float,
    **options,
) -> DivergenceStats:
    """`fused_divergence` with PyTorch operations, a few rows at a time."""
    C, V = student.shape
    common = min(V, teacher.shape[1])
    dtype = torch.promote_types(student.dtype, torch.float32)
    names = DivergenceStats._fields if overlap else DivergenceStats._fields[:-1]
    out = {name: torch.zeros(C, dtype=dtype, device=student.device) for name in names}
    taught = teacher_transform._replace(temperature=transform.temperature)
    step = max(1, twin_rows(student) // 2)
    for start in range(0, C, step):
        rows = slice(start, min(start + step, C))
        z, slope = transform.logits(student[rows], bias)
        teacher_index = rows if teacher_rows is None else teacher_rows[rows]
        t = taught.logits(
            teacher[teacher_index][:, :common], None if teacher_bias is None else teacher_bias[:common]
        )[0]
        out["agreement"][rows] = z[:, :common].argmax(1) == t.argmax(1)
        outside = 0.0
        if teacher_lse is not None:
            lse, residual = (x[teacher_index].to(dtype) for x in teacher_lse)
            top = t.amax(1)
            outside = ((top - lse) + ((t - top[:, None]).logsumexp(1) - residual)).clamp(max=0.0)[:, None]
        log_s = z[:, :common].log_softmax(1)
        soft, d_z, acceptance = _compared(log_s, t.log_softmax(1), outside, overlap=overlap, **options)
        del t
        out["soft"][rows] = soft
        if overlap:
            out["acceptance"][rows] = acceptance
        out["entropy"][rows] = -(log_s.clamp(min=MIN_LOGPROB).mul_(log_s.exp())).sum(1)
        del log_s
        if labels is not None:
            label = labels[rows]
            has_label = (label >= 0) & (label < V)
            column = torch.where(has_label, label, 0)[:, None]
            out["is_top1"][rows] = z.argmax(1) == label
            # Log-probabilities at temperature 1.
            log_p = (z * transform.temperature).log_softmax(1)
            out["hard"][rows] = torch.where(has_label, -log_p.gather(1, column)[:, 0], 0.0)
        del z
        if gradient is None:
            continue
        d_z *= 1 - hard_weight
        if common < V:
            d_z = torch.nn.functional.pad(d_z, (0, V - common))
        if labels is not None and hard_weight:
            p = log_p.exp_().scatter_add_(1, column, -torch.ones_like(column, dtype=dtype))
            d_z += p.mul_(hard_weight * transform.temperature).mul_(has_label[:, None])
        factor = factors[rows].to(dtype)[:, None]
        d_z *= factor * slope
        gradient[rows] = d_z.masked_fill_(factor == 0, 0.0)
    return DivergenceStats(**out)


def of_acceptance(
    shared: Tensor, excess: Tensor, kl: Tensor, divergence: str, lk_eta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (acceptance rate, divergence, a, b), each (n,), with d divergence / d logits = a (s - t) - b d
    alpha.

    Args:
        shared: sum min(s, p).
        excess: sum max(s - p, 0), which is 1 - shared.
        kl: KL(t||s) if the divergence is in `OF_ACCEPTANCE`, else the divergence.
        divergence: name of the divergence.
        lk_eta: as in `fused_divergence`.
    """
    is_near = excess < 0.5
    alpha = torch.where(is_near, 1 - excess, shared)
    tv = torch.where(is_near, excess, 1 - shared)
    none, one = torch.zeros_like(alpha), torch.ones_like(alpha)
    if divergence == "total_variation":
        return alpha, tv, none, one
    if divergence == "neg_log_acceptance":
        loss = torch.where(is_near, -torch.log1p(-excess), -alpha.clamp(min=LEAST).log())
        return alpha, loss, none, torch.where(alpha > LEAST, 1 / alpha.clamp(min=LEAST), 0.0)
    if divergence == "lk_hybrid":
        lam = (-lk_eta * alpha).exp()
        return alpha, lam * kl + (1 - lam) * tv, lam, 1 - lam
    return alpha, kl, one, none


def _compared(
    log_s: Tensor,
    log_t: Tensor,
    outside: Tensor | float,  # (n, 1) log of the teacher's probability of these ids together
    *,
    divergence: str,
    beta: float,
    lk_eta: float,
    overlap: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (divergence (n,), its gradient for the student's logits, acceptance rate (n,) or None)."""
    log_s, log_t = log_s.clamp(min=MIN_LOGPROB), log_t.clamp(min=MIN_LOGPROB)
    s, t = log_s.exp(), log_t.exp()
    shared = excess = None
    if overlap:
        p = t if isinstance(outside, float) else (log_t + outside).exp()
        shared = torch.minimum(s, p).sum(1)
        excess = (s - p).clamp(min=0.0).sum(1)
    if divergence in OF_ACCEPTANCE:
        hybrid = divergence == "lk_hybrid"
        kl = kl_terms(t, s, log_s - log_t).sum(1) if hybrid else shared
        alpha, soft, a, b = of_acceptance(shared, excess, kl, divergence, lk_eta)
        accepted = s * (s < p)
        d_z = (s * accepted.sum(1, keepdim=True)).sub_(accepted).mul_(b[:, None])
        return soft, d_z.add_((s - t).mul_(a[:, None])) if hybrid else d_z, alpha
    soft, score = _scored(log_s, log_t, s, t, divergence, beta)
    d_z = s - t if score is None else s * (score - (s * score).sum(1, keepdim=True))
    return soft, d_z, None if shared is None else of_acceptance(shared, excess, soft, divergence, lk_eta)[0]


def _scored(
    log_s: Tensor, log_t: Tensor, s: Tensor, t: Tensor, divergence: str, beta: float
) -> tuple[Tensor, Tensor | None]:
    """Return (divergence (n,), score) of rows or of a shard of their columns; no score for the forward KL."""
    if divergence == "jsd" and beta in (0.0, 1.0):
        divergence = "reverse_kl" if beta else "forward_kl"
    if divergence == "forward_kl":
        return kl_terms(t, s, log_s - log_t).sum(1), None
    if divergence == "reverse_kl":
        score = log_s - log_t
        return kl_terms(s, t, -score).sum(1), score
    to_student, to_teacher = mixture(log_s, log_t, beta)
    m = torch.lerp(s, t, beta)
    soft = ((1 - beta) * kl_terms(s, m, to_student) + beta * kl_terms(t, m, to_teacher)).sum(1)
    return soft, -(1 - beta) * to_student


class Ranks(Protocol):
    """The attributes and methods of `parallel.vocabulary.ShardedVocabulary` that the divergence needs."""

    width: int

    def merge_stats(self, stats: TokenBuffers, columns: Tensor) -> object: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def best_id(self, values: Tensor, columns: Tensor) -> Tensor: ...


def sharded_best(logits: Tensor, transform: LogitTransform, bias: Tensor | None, ranks: Ranks) -> Tensor:
    """(C,) ids of the largest logits of the whole vocabulary; `logits` are products with a shard."""
    columns = select.select(logits, 1, transform=transform, bias=bias)
    best_logits = select.compared(
        logits.gather(1, columns), transform, None if bias is None else bias[columns]
    )
    return ranks.best_id(best_logits[:, 0], columns[:, 0])


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
    transform: LogitTransform,
    teacher_transform: LogitTransform,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    overlap: bool = False,
    teacher_rows: Tensor | None = None,
    lk_eta: float = 3.0,
) -> DivergenceStats:
    """`fused_divergence` for a sharded vocabulary: the same three passes, with collectives between them."""
    overlap = overlap or divergence in OF_ACCEPTANCE
    dtype = torch.promote_types(student.dtype, torch.float32)
    nowhere = torch.full_like(labels, ranks.width)
    targets = torch.where(labels < 0, nowhere, labels)

    def statistics(
        logits: Tensor, ids: Tensor, names: tuple[str, ...], transform: LogitTransform, bias: Tensor | None
    ) -> TokenBuffers:
        stats = allocate_stats(names, len(ids), dtype, logits.device)
        token_statistics(logits, ids, stats, transform=transform, bias=bias, ignore_index=-1)
        ranks.merge_stats(stats, ids)
        return stats

    cold = statistics(student, targets, ("entropy",), transform, bias)
    # The statistics of each row of the teacher.
    elsewhere = labels.new_full((teacher.shape[0],), ranks.width)
    taught = statistics(
        teacher, elsewhere, (), teacher_transform._replace(temperature=transform.temperature), teacher_bias
    )
    taught = taught if teacher_rows is None else taught[teacher_rows]
    plain = (
        cold
        if transform.temperature == 1.0
        else statistics(student, targets, (), transform._replace(temperature=1.0), bias)
    )
    normalizers = torch.stack([x for stats in (cold, taught, plain) for x in (stats.lse, stats.lse_residual)])

    best, argmax_id = (
        sharded_best(logits, *given, ranks)
        for logits, given in ((student, (transform, bias)), (teacher, (teacher_transform, teacher_bias)))
    )
    argmax_id = argmax_id if teacher_rows is None else argmax_id[teacher_rows]
    options = {
        "divergence": divergence,
        "beta": beta,
        "hard_weight": hard_weight,
        "transform": transform,
        "teacher_transform": teacher_transform,
        "bias": bias,
        "teacher_bias": teacher_bias,
        "teacher_rows": teacher_rows,
    }
    shard_pass = _shard_pass_twin
    if uses_triton(student.device, student.dtype):
        from logitless.kernels.head import divergence_shard_triton

        shard_pass = divergence_shard_triton.shard_pass
    sums = torch.empty(4 if overlap else 2, len(labels), dtype=dtype, device=student.device)
    shard_pass(student, teacher, labels, None, normalizers, sums, gradient=None, **options)
    ranks.all_reduce(sums)
    soft = sums[0]
    acceptance = None
    if overlap:
        acceptance, soft, a, b = of_acceptance(sums[2], sums[3], sums[0], divergence, lk_eta)
        normalizers = torch.cat((normalizers, torch.stack((a, b))))
    if factors is not None:
        shard_pass(student, teacher, labels, factors, normalizers, sums, gradient=gradient, **options)
    hard = torch.where(labels < 0, 0.0, -plain.logps)
    top1 = torch.where(labels < 0, 0.0, cold.is_top1)
    agreement = (best == argmax_id).to(dtype)
    return DivergenceStats(soft, hard, cold.entropy, top1, agreement, acceptance)


def _shard_pass_twin(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    factors: Tensor | None,
    normalizers: Tensor,
    sums: Tensor,
    *,
    gradient: Tensor | None,
    divergence: str,
    beta: float,
    hard_weight: float,
    transform: LogitTransform,
    teacher_transform: LogitTransform,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    teacher_rows: Tensor | None,
) -> None:
    """`divergence_shard_triton.shard_pass` with PyTorch operations, a few rows at a time."""
    C, V = student.shape
    taught = teacher_transform._replace(temperature=transform.temperature)
    step = max(1, twin_rows(student) // 2)
    for start in range(0, C, step):
        rows = slice(start, min(start + step, C))
        z, slope = transform.logits(student[rows], bias)
        t = taught.logits(teacher[rows if teacher_rows is None else teacher_rows[rows]], teacher_bias)[0]
        lse_s, rest_s, lse_t, rest_t, lse_1, rest_1 = normalizers[:6, rows, None]
        log_s = ((z - lse_s) - rest_s).clamp(min=MIN_LOGPROB)
        log_t = ((t - lse_t) - rest_t).clamp(min=MIN_LOGPROB)
        del t
        s, p = log_s.exp(), log_t.exp()
        if gradient is None:
            if divergence in OF_ACCEPTANCE:
                sums[0, rows] = kl_terms(p, s, log_s - log_t).sum(1)
                sums[1, rows] = (s * (s < p)).sum(1)
            else:
                sums[0, rows], score = _scored(log_s, log_t, s, p, divergence, beta)
                sums[1, rows] = 0.0 if score is None else (s * score).sum(1)
            if sums.shape[0] > 2:
                sums[2, rows] = torch.minimum(s, p).sum(1)
                sums[3, rows] = (s - p).clamp(min=0.0).sum(1)
            continue
        mean = sums[1, rows, None]
        if divergence in OF_ACCEPTANCE:
            a, b = normalizers[6:, rows, None]
            d_z = a * (s - p) - b * (s * ((s < p).to(s.dtype) - mean))
        else:
            _, score = _scored(log_s, log_t, s, p, divergence, beta)
            d_z = s - p if score is None else s * (score - mean)
        del log_s, log_t, s, p
        d_z *= 1 - hard_weight
        if hard_weight:
            label = labels[rows, None]
            at_one = ((z * transform.temperature - lse_1) - rest_1).exp()
            inside = (label >= 0) & (label < V)
            at_one.scatter_add_(1, torch.where(inside, label, 0), -inside.to(at_one.dtype))
            d_z += at_one.mul_(hard_weight * transform.temperature).mul_(label >= 0)
        factor = factors[rows, None].to(d_z.dtype)
        d_z *= factor * slope
        gradient[rows] = d_z.masked_fill_(factor == 0, 0.0)
