"""Triton kernel of `divergence.py`. One program walks one row of both chunks, three times:

1. Exponentials of both rows are summed, each relative to a provisional shift as in `cross_entropy_triton.py`; both arg-maxes.
2. With the normalizers known, the divergence, the entropy, and the mean of the score.
3. With that mean known, the gradient is written over the student's logits. The forward KL needs no mean and does 2 and 3 at once.

Per pair of logits that is 7 accesses for the JSD (5 for the forward KL) and 9 evaluations of exp or log; on an H200 both take about as
long as each other. What a Taylor series can do (expm1, log1p and phi near 0) is done by multiplications, of which there is plenty.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.cross_entropy_triton import DRIFT

BLOCK, WARPS = 1024, 4
JSD, FORWARD, REVERSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MODES = {"jsd": 0, "forward_kl": 1, "reverse_kl": 2}
NOTHING = tl.constexpr(-1e4)


@triton.jit
def head_at_one(x, bias_ptr, cols, mask, scale, softcap, PLAIN: tl.constexpr):
    """Logits at temperature 1 and their derivative; a softcap of 0 is none."""
    x = x.to(tl.float32)
    if not PLAIN:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0)
    z = scale * x
    slope = scale + 0.0 * z
    if not PLAIN:
        if softcap > 0.0:
            squashed = 2.0 / (1.0 + tl.exp(-2.0 * z / softcap)) - 1.0
            z = softcap * squashed
            slope = scale * (1.0 - squashed * squashed)
    return z, slope


@triton.jit
def grow(z, shift, total):
    """Adds exp(z - shift) to the lanes of `total`; the shift rises where z drifts too far above it."""
    top = tl.max(z, 0)
    if top > shift + DRIFT:
        total *= tl.exp(shift - top)
        shift = top
    return shift, total + tl.exp(z - shift)


@triton.jit
def lead(z, cols, best, at):
    """Best logit of each lane so far, and where it stands."""
    better = z > best
    return tl.where(better, z, best), tl.where(better, cols, at)


@triton.jit
def first_best(best, at):
    """The first column of the largest logit."""
    return tl.min(tl.where(best == tl.max(best, 0), at, 2147483647), 0)


@triton.jit
def phi_terms(p, q, r):
    """p (exp(r) - 1 - r) where q = p exp(r)."""
    series = r * r * (0.5 + r * (0.16666667 + r * (0.041666668 + r * (0.008333334 + r * (0.0013888889 + r * 0.0001984127)))))
    return tl.where(tl.abs(r) < 0.5, p * series, q - p - p * r)


@triton.jit
def expm1_negative(x):
    """exp(x) - 1 for x <= 0."""
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * 0.0013888889)))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1.0)


@triton.jit
def log1p_negative(x):
    """log(1 + x) for -1 < x <= 0."""
    series = x * (1.0 + x * (-0.5 + x * (0.33333334 + x * (-0.25 + x * (0.2 + x * (-0.16666667 + x * 0.14285715))))))
    return tl.where(x > -0.1, series, tl.log(1.0 + x))


@triton.jit
def scored(log_s, log_t, beta, MODE: tl.constexpr):
    """(s, t, the divergence's terms, score, terms of the score's mean under s)."""
    s, t, d = tl.exp(log_s), tl.exp(log_t), log_t - log_s
    if MODE == JSD:
        above = d > 0.0
        shrunk = log1p_negative(tl.where(above, 1.0 - beta, beta) * expm1_negative(-tl.abs(d)))
        to_s = tl.where(above, shrunk + d, shrunk)  # log m/s
        m = beta * t + (1.0 - beta) * s
        ours = (1.0 - beta) * phi_terms(s, m, to_s)
        return s, t, ours + beta * phi_terms(t, m, to_s - d), -(1.0 - beta) * to_s, ours
    if MODE == FORWARD:
        terms = phi_terms(t, s, -d)
        return s, t, terms, d, terms
    terms = phi_terms(s, t, d)
    return s, t, terms, -d, terms


@triton.jit
def divergence_kernel(
    student_ptr, teacher_ptr, grad_ptr, labels_ptr, factors_ptr, bias_ptr, teacher_bias_ptr,
    soft_ptr, hard_ptr, entropy_ptr, is_top1_ptr, agreement_ptr,
    student_stride, teacher_stride, grad_stride, V, common, scale, softcap, teacher_scale, teacher_softcap, cold, beta, hard_weight, write,
    MODE: tl.constexpr, PLAIN: tl.constexpr, SPLIT: tl.constexpr, ALIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`cold` is 1 / temperature. SPLIT: the cross-entropy has a softmax of its own (another temperature, more ids)."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    grad_ptr += row * grad_stride
    lane = tl.arange(0, BLOCK)
    y = tl.load(labels_ptr + row)
    known = (y >= 0) & (y < V)
    z_y, slope_y = head_at_one(tl.load(student_ptr + y, mask=known, other=0.0), bias_ptr, y, known, scale, softcap, PLAIN)
    factor = tl.load(factors_ptr + row)
    # Nobody may store over the label's logit before everybody has read it.
    tl.debug_barrier()

    shift_s, shift_t, shift_1 = -1e30, -1e30, -1e30
    sum_s = tl.zeros([BLOCK], tl.float32)
    sum_t = tl.zeros([BLOCK], tl.float32)
    sum_1 = tl.zeros([BLOCK], tl.float32)
    best_s = tl.full([BLOCK], -float("inf"), tl.float32)
    best_t = tl.full([BLOCK], -float("inf"), tl.float32)
    best_1 = tl.full([BLOCK], -float("inf"), tl.float32)
    at_s = tl.zeros([BLOCK], tl.int32)
    at_t = tl.zeros([BLOCK], tl.int32)
    at_1 = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        cols = start + lane
        mask, shared = cols < V, cols < common
        z, _ = head_at_one(tl.load(student_ptr + cols, mask=mask, other=0.0), bias_ptr, cols, mask, scale, softcap, PLAIN)
        t, _ = head_at_one(
            tl.load(teacher_ptr + cols, mask=shared, other=0.0), teacher_bias_ptr, cols, shared, teacher_scale, teacher_softcap, PLAIN
        )
        if SPLIT:
            whole = tl.where(mask, z, -float("inf"))
            shift_1, sum_1 = grow(whole, shift_1, sum_1)
            best_1, at_1 = lead(whole, cols, best_1, at_1)
        z = tl.where(shared, z * cold, -float("inf"))
        t = tl.where(shared, t * cold, -float("inf"))
        shift_s, sum_s = grow(z, shift_s, sum_s)
        shift_t, sum_t = grow(t, shift_t, sum_t)
        best_s, at_s = lead(z, cols, best_s, at_s)
        best_t, at_t = lead(t, cols, best_t, at_t)
    log_sum_s, log_sum_t = tl.log(tl.sum(sum_s, 0)), tl.log(tl.sum(sum_t, 0))
    favourite = first_best(best_s, at_s)
    tl.store(agreement_ptr + row, (favourite == first_best(best_t, at_t)).to(tl.float32))
    if SPLIT:
        log_sum_1 = tl.log(tl.sum(sum_1, 0))
        favourite = first_best(best_1, at_1)
    else:
        shift_1, log_sum_1 = shift_s, log_sum_s
    tl.store(is_top1_ptr + row, (favourite == y).to(tl.float32))
    tl.store(hard_ptr + row, tl.where(known, log_sum_1 - (z_y - shift_1), 0.0))

    loss = tl.zeros([BLOCK], tl.float32)
    entropy = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    if (MODE != FORWARD) | (write == 0):
        for start in range(0, common, BLOCK):
            cols = start + lane
            shared = cols < common
            z, _ = head_at_one(tl.load(student_ptr + cols, mask=shared, other=0.0), bias_ptr, cols, shared, scale, softcap, PLAIN)
            t, _ = head_at_one(
                tl.load(teacher_ptr + cols, mask=shared, other=0.0), teacher_bias_ptr, cols, shared, teacher_scale, teacher_softcap, PLAIN
            )
            log_s = tl.maximum((z * cold - shift_s) - log_sum_s, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            log_t = tl.maximum((t * cold - shift_t) - log_sum_t, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            s, _, terms, _, means = scored(tl.where(shared, log_s, NOTHING), tl.where(shared, log_t, NOTHING), beta, MODE)
            loss += terms
            mean += means
            entropy -= tl.where(shared, s * log_s, 0.0)

    if write != 0:
        average = tl.sum(mean, 0)
        soft_factor = factor * (1.0 - hard_weight) * cold
        hard_factor = factor * hard_weight
        for start in range(0, V, BLOCK):
            cols = start + lane
            mask, shared = cols < V, cols < common
            z, slope = head_at_one(tl.load(student_ptr + cols, mask=mask, other=0.0), bias_ptr, cols, mask, scale, softcap, PLAIN)
            t, _ = head_at_one(
                tl.load(teacher_ptr + cols, mask=shared, other=0.0), teacher_bias_ptr, cols, shared, teacher_scale, teacher_softcap, PLAIN
            )
            log_s = tl.maximum((z * cold - shift_s) - log_sum_s, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            log_t = tl.maximum((t * cold - shift_t) - log_sum_t, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            s, t, terms, score, _ = scored(tl.where(shared, log_s, NOTHING), tl.where(shared, log_t, NOTHING), beta, MODE)
            if MODE == FORWARD:
                g = soft_factor * (s - t)
                loss += terms
                entropy -= tl.where(shared, s * log_s, 0.0)
            else:
                g = soft_factor * s * (score - average)
            if hard_weight > 0.0:
                p = tl.exp((z - shift_1) - log_sum_1)
                g += tl.where(known, hard_factor * (p - tl.where(cols == y, 1.0, 0.0)), 0.0)
            # A token that does not count is zeroed, whatever its logits hold.
            g = tl.where(factor == 0.0, 0.0, g * slope)
            if ALIAS:
                tl.debug_barrier()
            tl.store(grad_ptr + cols, g.to(grad_ptr.dtype.element_ty), mask=mask)
    tl.store(soft_ptr + row, tl.sum(loss, 0))
    tl.store(entropy_ptr + row, tl.sum(entropy, 0))


def divergence_pass(
    student: Tensor, teacher: Tensor, labels: Tensor | None, factors: Tensor | None, *, gradient: Tensor | None, divergence: str,
    beta: float, hard_weight: float, head, teacher_head, bias: Tensor | None, teacher_bias: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    (C, V), common = student.shape, min(student.shape[1], teacher.shape[1])
    found = [torch.empty(C, device=student.device) for _ in range(5)]
    plain = bias is None and teacher_bias is None and head.softcap is None and teacher_head.softcap is None
    biases = [found[0] if plain else torch.zeros(width, device=student.device) for width in (V, common)]
    biases = [zeros if given is None else given.float() for zeros, given in zip(biases, (bias, teacher_bias), strict=True)]
    if divergence == "jsd" and beta in (0.0, 1.0):
        divergence = "reverse_kl" if beta else "forward_kl"
    grad = student if gradient is None else gradient
    divergence_kernel[(C,)](
        student, teacher, grad, torch.full((C,), -1, device=student.device) if labels is None else labels,
        found[0] if factors is None else factors, *biases, *found,
        student.stride(0), teacher.stride(0), grad.stride(0), V, common, head.logit_scale, head.softcap or 0.0,
        teacher_head.logit_scale, teacher_head.softcap or 0.0, 1.0 / head.temperature, beta, hard_weight,
        int(gradient is not None),
        MODE=MODES[divergence], PLAIN=plain, SPLIT=head.temperature != 1.0 or common != V,
        ALIAS=grad.dtype != student.dtype, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return tuple(found)
