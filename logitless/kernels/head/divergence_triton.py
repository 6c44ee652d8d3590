"""Triton kernel of `divergence.py`. One program makes three passes over one row of both chunks:

1. Sum the exponentials of both rows relative to a shift, the maximum of the first block. Each lane keeps its
   maximum. If a row exceeds the shift by more than DRIFT, it is summed again relative to its maximum.
2. With the normalizers of pass 1, compute the divergence, the entropy, and the mean of the score.
3. With the mean of pass 2, overwrite the student's logits with the gradient. The forward KL does not need the
   mean, so passes 2 and 3 are combined.

With OVERLAP, pass 2 also computes the acceptance rate sum min(s, p). p is the teacher's distribution t or,
with MASS, the teacher's probabilities of these ids in a larger vocabulary. TV and NLA are functions of the
acceptance rate, LK of the acceptance rate and the forward KL. The gradient of all three is
a (s - t) - b s ([s < p] - sum s [s < p]), with factors a and b per row.

A pair of logits takes 7 memory accesses for the JSD, and 5 for the forward KL. On an H200 the arithmetic took
longer than the memory accesses. Therefore logarithms are to the base 2, constant factors are applied to sums
where possible, and the loops over the blocks keep a maximum per lane.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, dense

BLOCK, WARPS = 1024, 4
# EVEN is the JSD with beta = 1/2.
JSD, FORWARD, REVERSE, EVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# Functions of the acceptance rate: total variation, negative log acceptance, and the hybrid of total
# variation and KL.
TV, NLA, LK = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
MODES = {
    "jsd": JSD.value,
    "forward_kl": FORWARD.value,
    "reverse_kl": REVERSE.value,
    "total_variation": TV.value,
    "neg_log_acceptance": NLA.value,
    "lk_hybrid": LK.value,
}
# Lower bound of the acceptance rate in NLA. Below it, the gradient is 0.
LEAST = tl.constexpr(1e-5)
# To the base 2: the logarithm of a probability of 0, and the largest difference between a row and its shift.
MIN_LOGPROB = tl.constexpr(-1e30)
DRIFT = tl.constexpr(80.0)
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def head_at_one(x, bias_ptr, cols, mask, scale, softcap, PLAIN: tl.constexpr):
    """Logits at temperature 1 and their derivative. A softcap of 0 means no softcap."""
    x = x.to(tl.float32)
    if not PLAIN:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0)
    z = scale * x
    slope = scale
    if not PLAIN:
        slope = tl.where(z > 0.0, scale, scale)  # the scale in z's shape; finite even if a bias makes z -inf
        if softcap > 0.0:
            squashed = 2.0 / (1.0 + tl.exp(-2.0 * z / softcap)) - 1.0
            z = softcap * squashed
            slope = scale * (1.0 - squashed * squashed)
    return z, slope


@triton.jit
def values(ptr, cols, mask, bias_ptr, scale, softcap, PLAIN: tl.constexpr):
    """Logits at temperature 1 (with PLAIN: without the factor `scale`), -inf if masked; their derivative."""
    x = tl.load(ptr + cols, mask=mask, other=-float("inf"))
    if PLAIN:
        z = x.to(tl.float32)
        slope = 1.0
    else:
        z, slope = head_at_one(x, bias_ptr, cols, mask, scale, softcap, PLAIN)
        z = tl.where(mask, z, -float("inf"))
    return z, slope


@triton.jit
def added(z, rate, start, shift, total, best, best_start):
    """Add 2^(rate z - shift) to the lanes of `total`.

    Each lane keeps its maximum and the block with its first maximum.
    """
    better = z > best
    total += tl.exp2(tl.fma(z, rate, -shift))
    return total, tl.where(better, z, best), tl.where(better, start, best_start)


@triton.jit
def first_best(best, best_start, lane):
    """The maximum over all lanes, and the first column with this value."""
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_start + lane, 2147483647), 0)


@triton.jit
def log2_probability(z, rate, shift, log_sum):
    return tl.maximum(tl.fma(z, rate, -shift) - log_sum, MIN_LOGPROB, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log2_of_one_and(u):
    """log2(1 + u) for -1/2 <= u <= 0, to a relative error of 1.5e-7, in 9 instructions; tl.log2 takes 26."""
    p = tl.full(u.shape, 2.0790517330169678, tl.float32)
    p = tl.fma(p, u, 2.4464845657348633)
    p = tl.fma(p, u, 1.8143893480300903)
    p = tl.fma(p, u, 0.29362577199935913)
    p = tl.fma(p, u, 0.38896456360816956)
    p = tl.fma(p, u, -0.35029423236846924)
    p = tl.fma(p, u, 0.4814281761646271)
    p = tl.fma(p, u, -0.7213371992111206)
    return u * tl.fma(p, u, 1.4426950216293335)


@triton.jit
def scored(log_s, log_t, beta, MODE: tl.constexpr):
    """Return (s, t, terms of the divergence, score, terms of the mean of the score under s), given log2 s and
    log2 t.

    The last three must be multiplied by `unit_of`. They are exactly 0 if log_s = log_t, except for the last
    one in FORWARD, TV, NLA and LK: these modes do not use the mean, and return s. Differences of logarithms
    are computed before any logarithm of m, so that they are accurate if s and t are close.
    """
    d = log_t - log_s
    if (MODE == JSD) | (MODE == EVEN):
        above = d > 0.0
        ratio = tl.exp2(-tl.abs(d))
        more = tl.exp2(tl.maximum(log_s, log_t))
        less = more * ratio
        s, t = tl.where(above, less, more), tl.where(above, more, less)
        if MODE == EVEN:
            shrunk = log2_of_one_and(0.5 * ratio - 0.5)
        else:
            smaller = tl.where(above, 1.0 - beta, beta)
            # The first form is exactly 0 if s = t. The second form is accurate if the larger of the two has a
            # small weight.
            near = 1.0 + smaller * (ratio - 1.0)
            far = tl.where(above, beta, 1.0 - beta) + smaller * ratio
            shrunk = tl.log2(tl.where(ratio > 0.5, near, far))
        # log m/s and log m/t. For a huge d, log m/s - d would have no correct digits.
        to_s = tl.where(above, shrunk + d, shrunk)
        to_t = tl.where(above, shrunk, shrunk - d)
        ours = s * to_s
        return s, t, ours + (beta / (1.0 - beta)) * (t * to_t), to_s, ours
    s = tl.exp2(log_s)
    t = tl.exp2(log_t)
    d = d * LN2
    if (MODE == FORWARD) | (MODE >= TV):
        return s, t, (s - t) + t * d, d, s
    terms = (t - s) - s * d
    return s, t, terms, -d, terms


@triton.jit
def unit_of(beta, MODE: tl.constexpr):
    return -(1.0 - beta) * LN2 if (MODE == JSD) | (MODE == EVEN) else 1.0


@triton.jit
def of_acceptance(shared, excess, kl, eta, MODE: tl.constexpr):
    """Return (acceptance rate, loss, a, b), given sum min(s, p), sum max(s - p, 0) and KL(t||s).

    The two sums add up to 1, and the smaller one is more accurate. Modes below TV only use the acceptance
    rate.
    """
    near = excess < 0.5
    alpha = tl.where(near, 1.0 - excess, shared)
    tv = tl.where(near, excess, 1.0 - shared)
    loss = tv
    a = 0.0 * tv
    b = 1.0 + 0.0 * tv
    if MODE == NLA:
        # -log(1 - excess), corrected for the rounding error of 1 - excess.
        lost = 1.0 - alpha
        precise = tl.where(lost == 0.0, excess, -tl.log(alpha) * (excess / tl.where(lost == 0.0, 1.0, lost)))
        loss = tl.where(near, precise, -tl.log(tl.maximum(alpha, LEAST)))
        b = tl.where(alpha > LEAST, 1.0 / tl.maximum(alpha, LEAST), 0.0)
    if MODE == LK:
        a = tl.exp(-eta * alpha)
        b = 1.0 - a
        loss = a * kl + b * tv
    return alpha, loss, a, b


@cached_launch
@triton.jit(**OF_CHUNKS)
def divergence_kernel(
    student_ptr,
    teacher_ptr,
    grad_ptr,
    labels_ptr,
    factors_ptr,
    bias_ptr,
    teacher_bias_ptr,
    soft_ptr,
    hard_ptr,
    entropy_ptr,
    is_top1_ptr,
    agreement_ptr,
    acceptance_ptr,
    teacher_rows_ptr,
    teacher_lse_ptr,
    teacher_residual_ptr,
    student_stride,
    teacher_stride,
    grad_stride,
    V,
    common,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    cold,
    beta,
    hard_weight,
    eta,
    write,
    MODE: tl.constexpr,
    PLAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    MASS: tl.constexpr,
    ALIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`cold` is 1 / temperature. SPLIT: the cross-entropy has a gradient, or a different softmax (another
    temperature, more ids). OVERLAP: compute the acceptance rate. ROWS: `teacher_rows` contains the teacher's
    row of each row. MASS: the teacher has more ids than these; `teacher_lse` and `teacher_residual` are the
    log-sum-exp over all of its ids and the rounding error.
    """
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_row = tl.load(teacher_rows_ptr + row).to(tl.int64) if ROWS else row
    teacher_ptr += teacher_row * teacher_stride
    grad_ptr += row * grad_stride
    lane = tl.arange(0, BLOCK)
    y = tl.load(labels_ptr + row)
    has_label = (y >= 0) & (y < V)
    factor = tl.load(factors_ptr + row)
    # Factors of the logits for exponentials to the base 2: student at temperature 1, student, teacher.
    slope_all = scale if PLAIN else 1.0
    rate_1 = slope_all * LOG2E
    rate_s = rate_1 * cold
    rate_t = (teacher_scale if PLAIN else 1.0) * LOG2E * cold

    z, slope = values(student_ptr, lane, lane < common, bias_ptr, scale, softcap, PLAIN)
    t, slope_t = values(
        teacher_ptr, lane, lane < common, teacher_bias_ptr, teacher_scale, teacher_softcap, PLAIN
    )
    top_s, top_t = tl.max(z, 0), tl.max(t, 0)
    top_1 = top_s
    shift_s, shift_t, shift_1 = rate_s * top_s, rate_t * top_t, rate_1 * top_s
    argmax_id, teacher_argmax_id, argmax_id_1 = 0, 0, 0
    zeros = tl.zeros([BLOCK], tl.float32)
    sum_s, sum_t, sum_1 = zeros, zeros, zeros
    again = 1
    while again != 0:
        sum_s, sum_t, sum_1 = zeros, zeros, zeros
        best_s = tl.full([BLOCK], -float("inf"), tl.float32)
        start_s = tl.zeros([BLOCK], tl.int32)
        best_t, start_t, best_1, start_1 = best_s, start_s, best_s, start_s
        for start in range(0, V, BLOCK):
            cols = start + lane
            shared = cols < common
            z, slope = values(
                student_ptr, cols, cols < V if SPLIT else shared, bias_ptr, scale, softcap, PLAIN
            )
            t, slope_t = values(
                teacher_ptr, cols, shared, teacher_bias_ptr, teacher_scale, teacher_softcap, PLAIN
            )
            if SPLIT:
                sum_1, best_1, start_1 = added(z, rate_1, start, shift_1, sum_1, best_1, start_1)
                z = tl.where(shared, z, -float("inf"))
            sum_s, best_s, start_s = added(z, rate_s, start, shift_s, sum_s, best_s, start_s)
            sum_t, best_t, start_t = added(t, rate_t, start, shift_t, sum_t, best_t, start_t)
        top_s, argmax_id = first_best(best_s, start_s, lane)
        top_t, teacher_argmax_id = first_best(best_t, start_t, lane)
        rises = (rate_s * top_s > shift_s + DRIFT) | (rate_t * top_t > shift_t + DRIFT)
        if SPLIT:
            top_1, argmax_id_1 = first_best(best_1, start_1, lane)
            rises |= rate_1 * top_1 > shift_1 + DRIFT
        shift_s = tl.where(rises, rate_s * top_s, shift_s)
        shift_t = tl.where(rises, rate_t * top_t, shift_t)
        shift_1 = tl.where(rises, rate_1 * top_1, shift_1)
        again = rises.to(tl.int32)
    log_sum_s, log_sum_t = tl.log2(tl.sum(sum_s, 0)), tl.log2(tl.sum(sum_t, 0))
    tl.store(agreement_ptr + row, (argmax_id == teacher_argmax_id).to(tl.float32))
    if SPLIT:
        log_sum_1 = tl.log2(tl.sum(sum_1, 0))
    else:
        argmax_id_1, shift_1, log_sum_1 = argmax_id, shift_s, log_sum_s
    tl.store(is_top1_ptr + row, (argmax_id_1 == y).to(tl.float32))
    z_y, slope_y = values(student_ptr, y, has_label, bias_ptr, scale, softcap, PLAIN)
    tl.store(hard_ptr + row, tl.where(has_label, (log_sum_1 - tl.fma(z_y, rate_1, -shift_1)) * LN2, 0.0))

    loss, entropy, mean = zeros, zeros, zeros
    common_mass, excess_mass, below = zeros, zeros, zeros
    mass = 1.0
    if MASS:
        # The shift and the log-sum-exp over all ids are close, so their difference is exact.
        lse_all, rest_all = (
            tl.load(teacher_lse_ptr + teacher_row),
            tl.load(teacher_residual_ptr + teacher_row),
        )
        outside = tl.fma(lse_all, -LOG2E, shift_t) + tl.fma(rest_all, -LOG2E, log_sum_t)
        mass = tl.exp2(tl.minimum(outside, 0.0))
    if (MODE != FORWARD) | (write == 0):
        for start in range(0, common, BLOCK):
            cols = start + lane
            shared = cols < common
            z, slope = values(student_ptr, cols, shared, bias_ptr, scale, softcap, PLAIN)
            t, slope_t = values(
                teacher_ptr, cols, shared, teacher_bias_ptr, teacher_scale, teacher_softcap, PLAIN
            )
            log_s = log2_probability(z, rate_s, shift_s, log_sum_s)
            log_t = log2_probability(t, rate_t, shift_t, log_sum_t)
            s, t, terms, score, means = scored(log_s, log_t, beta, MODE)
            loss += terms
            mean += means
            entropy += s * log_s
            if OVERLAP:
                p = t * mass
                common_mass += tl.minimum(s, p)
                excess_mass += tl.maximum(s - p, 0.0)
                if MODE >= TV:
                    below += tl.where(s < p, s, 0.0)

    unit = unit_of(beta, MODE)
    if MODE >= TV:
        alpha, value, a, b = of_acceptance(
            tl.sum(common_mass, 0), tl.sum(excess_mass, 0), tl.sum(loss, 0), eta, MODE
        )
        rejected = tl.sum(below, 0)
    if write != 0:
        # All threads must have read the logits before a thread overwrites them.
        tl.debug_barrier()
        average = tl.sum(mean, 0)
        soft_factor = factor * (1.0 - hard_weight) * cold * unit * slope_all
        hard_factor = factor * hard_weight * slope_all
        for start in range(0, V, BLOCK):
            cols = start + lane
            mask, shared = cols < V, cols < common
            z, slope = values(student_ptr, cols, mask, bias_ptr, scale, softcap, PLAIN)
            t, slope_t = values(
                teacher_ptr, cols, shared, teacher_bias_ptr, teacher_scale, teacher_softcap, PLAIN
            )
            log_s = log2_probability(z, rate_s, shift_s, log_sum_s)
            if SPLIT:
                log_s = tl.where(shared, log_s, MIN_LOGPROB)
            log_t = log2_probability(t, rate_t, shift_t, log_sum_t)
            s, t, terms, score, means = scored(log_s, log_t, beta, MODE)
            if MODE == FORWARD:
                g = soft_factor * (s - t)
                loss += terms
                entropy += s * log_s
                if OVERLAP:
                    common_mass += tl.minimum(s, t * mass)
                    excess_mass += tl.maximum(s - t * mass, 0.0)
            elif MODE >= TV:
                accepted = tl.where(s < t * mass, 1.0 - rejected, -rejected)
                g = soft_factor * (a * (s - t) - b * (s * accepted))
            else:
                g = soft_factor * s * (score - average)
            if SPLIT:
                p = tl.exp2(tl.fma(z, rate_1, -shift_1) - log_sum_1)
                g += tl.where(has_label, hard_factor * (p - tl.where(cols == y, 1.0, 0.0)), 0.0)
            # The gradient of an unsupervised token is set to 0, even if its logits are not finite.
            g = tl.where(factor == 0.0, 0.0, g * slope)
            if ALIAS:
                tl.debug_barrier()
            tl.store(grad_ptr + cols, g.to(grad_ptr.dtype.element_ty), mask=mask)
    if MODE >= TV:
        tl.store(soft_ptr + row, value)
    else:
        tl.store(soft_ptr + row, unit * tl.sum(loss, 0))
    if OVERLAP:
        if MODE < TV:
            alpha, value, a, b = of_acceptance(tl.sum(common_mass, 0), tl.sum(excess_mass, 0), 0.0, eta, MODE)
        tl.store(acceptance_ptr + row, alpha)
    tl.store(entropy_ptr + row, tl.sum(entropy, 0) * -LN2)


def mode_of(divergence: str, beta: float) -> int:
    if divergence == "jsd" and beta in (0.0, 1.0):
        divergence = "reverse_kl" if beta else "forward_kl"
    return EVEN.value if (divergence, beta) == ("jsd", 0.5) else MODES[divergence]


def biases(
    student: Tensor,
    common: int,
    transform,
    teacher_transform,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
) -> tuple[bool, list[Tensor]]:
    """Return (whether the logits are positive multiples of the products, both biases as kernel arguments)."""
    plain = (
        bias is None
        and teacher_bias is None
        and transform.softcap is None
        and teacher_transform.softcap is None
    )
    plain = plain and min(transform.logit_scale, teacher_transform.logit_scale) > 0
    widths = (student.shape[1], common)
    options = {"dtype": torch.float32, "device": student.device}
    empty = [torch.zeros(0 if plain else width, **options) for width in widths]
    vectors = zip(empty, (bias, teacher_bias), strict=True)
    return plain, [zeros if x is None else dense(x, torch.float32) for zeros, x in vectors]


def divergence_pass(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    factors: Tensor | None,
    *,
    gradient: Tensor | None,
    divergence: str,
    beta: float,
    hard_weight: float,
    transform,
    teacher_transform,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    overlap: bool,
    teacher_rows: Tensor | None,
    teacher_lse: tuple[Tensor, Tensor] | None,
    lk_eta: float,
) -> tuple[Tensor, ...]:
    C, V = student.shape
    common = min(student.shape[1], teacher.shape[1])
    mode = mode_of(divergence, beta)
    overlap = overlap or mode >= TV.value
    outputs = [torch.empty(C, dtype=torch.float32, device=student.device) for _ in range(5 + overlap)]
    plain, vectors = biases(student, common, transform, teacher_transform, bias, teacher_bias)
    grad = student if gradient is None else gradient
    check_rows(student=student, teacher=teacher, gradient=grad)
    if labels is None:
        labels = torch.full((C,), -1, dtype=torch.int64, device=student.device)
    labels = dense(labels)
    divergence_kernel[(C,)](
        student,
        teacher,
        grad,
        labels,
        outputs[0] if factors is None else dense(factors),
        *vectors,
        *outputs[:5],
        outputs[-1],
        labels if teacher_rows is None else dense(teacher_rows),
        *((outputs[0], outputs[0]) if teacher_lse is None else map(dense, teacher_lse)),
        student.stride(0),
        teacher.stride(0),
        grad.stride(0),
        V,
        common,
        transform.logit_scale,
        transform.softcap or 0.0,
        teacher_transform.logit_scale,
        teacher_transform.softcap or 0.0,
        1.0 / transform.temperature,
        beta,
        hard_weight,
        lk_eta,
        int(gradient is not None),
        MODE=mode,
        PLAIN=plain,
        SPLIT=transform.temperature != 1.0 or common != V or hard_weight > 0.0,
        OVERLAP=overlap,
        ROWS=teacher_rows is not None,
        MASS=teacher_lse is not None,
        ALIAS=grad.dtype != student.dtype,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return tuple(outputs)
