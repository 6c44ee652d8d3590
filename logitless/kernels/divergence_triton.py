"""Triton kernel of `divergence.py`. One program walks one row of both chunks, three times:

1. Exponentials of both rows are summed, each relative to a provisional shift as in `cross_entropy_triton.py`;
both arg-maxes. 2. With the normalizers known, the divergence, the entropy, and the mean of the score.
3. With that mean known, the gradient is written over the student's logits. The forward KL needs no mean and
does 2 and 3 at once.

Per pair of logits that is 7 accesses for the JSD (5 for the forward KL) and 9 evaluations of exp or log; on
an H200 the arithmetic takes longer than the memory, so that nothing is computed twice but what a pass needs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.cross_entropy_triton import DRIFT
from logitless.kernels.launch import OF_CHUNKS, held
from logitless.kernels.layout import check_rows, dense

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
    slope = scale
    if not PLAIN:
        slope += 0.0 * z
        if softcap > 0.0:
            squashed = 2.0 / (1.0 + tl.exp(-2.0 * z / softcap)) - 1.0
            z = softcap * squashed
            slope = scale * (1.0 - squashed * squashed)
    return z, slope


@triton.jit
def grow(z, start, shift, total, best, best_start):
    """Adds exp(z - shift) to the lanes of `total`; the shift rises where z drifts too far above it. Keeps the
    maximum's first block."""
    top = tl.max(z, 0)
    if top > shift + DRIFT:
        total *= tl.exp(shift - top)
        shift = top
    best_start = tl.where(top > best, start, best_start)
    return shift, total + tl.exp(z - shift), tl.maximum(top, best), best_start


@triton.jit
def scored(log_s, log_t, t, beta, MODE: tl.constexpr):
    """(s, the divergence's terms, score, terms of the score's mean under s). Where log_s = log_t, all but s
    are exactly 0.

    Differences of logarithms are formed before any logarithm of m, so that they keep their digits where s and
    t are close.
    """
    s, d = tl.exp(log_s), log_t - log_s
    if MODE == JSD:
        above = d > 0.0
        shrunk = tl.log(1.0 + tl.where(above, 1.0 - beta, beta) * (tl.exp(-tl.abs(d)) - 1.0))
        to_s = tl.where(above, shrunk + d, shrunk)  # log m/s
        ours = -(1.0 - beta) * s * to_s
        return s, ours - beta * t * (to_s - d), -(1.0 - beta) * to_s, ours
    if MODE == FORWARD:
        return s, (s - t) + t * d, d, s
    terms = (t - s) - s * d
    return s, terms, -d, terms


@held
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
    write,
    MODE: tl.constexpr,
    PLAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`cold` is 1 / temperature. SPLIT: the cross-entropy has a gradient, or a softmax of its own (another
    temperature, more ids)."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    grad_ptr += row * grad_stride
    lane = tl.arange(0, BLOCK)
    y = tl.load(labels_ptr + row)
    known = (y >= 0) & (y < V)
    z_y, slope_y = head_at_one(
        tl.load(student_ptr + y, mask=known, other=0.0), bias_ptr, y, known, scale, softcap, PLAIN
    )
    factor = tl.load(factors_ptr + row)

    shift_s, shift_t, shift_1 = -1e30, -1e30, -1e30
    best_s, best_t, best_1 = -float("inf"), -float("inf"), -float("inf")
    start_s, start_t, start_1 = 0, 0, 0
    sum_s = tl.zeros([BLOCK], tl.float32)
    sum_t = tl.zeros([BLOCK], tl.float32)
    sum_1 = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + lane
        mask, shared = cols < V, cols < common
        z, slope = head_at_one(
            tl.load(student_ptr + cols, mask=mask, other=0.0), bias_ptr, cols, mask, scale, softcap, PLAIN
        )
        t, slope_t = head_at_one(
            tl.load(teacher_ptr + cols, mask=shared, other=0.0),
            teacher_bias_ptr,
            cols,
            shared,
            teacher_scale,
            teacher_softcap,
            PLAIN,
        )
        if SPLIT:
            whole = tl.where(mask, z, -float("inf"))
            shift_1, sum_1, best_1, start_1 = grow(whole, start, shift_1, sum_1, best_1, start_1)
        z = tl.where(shared, z * cold, -float("inf"))
        t = tl.where(shared, t * cold, -float("inf"))
        shift_s, sum_s, best_s, start_s = grow(z, start, shift_s, sum_s, best_s, start_s)
        shift_t, sum_t, best_t, start_t = grow(t, start, shift_t, sum_t, best_t, start_t)
    log_sum_s, log_sum_t = tl.log(tl.sum(sum_s, 0)), tl.log(tl.sum(sum_t, 0))

    # The arg-maxes, each from the one block that holds it.
    cols, far = start_s + lane, 2147483647
    shared = cols < common
    z, slope = head_at_one(
        tl.load(student_ptr + cols, mask=shared, other=0.0), bias_ptr, cols, shared, scale, softcap, PLAIN
    )
    favourite = tl.min(tl.where(shared & (z * cold == best_s), cols, far), 0)
    cols = start_t + lane
    shared = cols < common
    t, slope_t = head_at_one(
        tl.load(teacher_ptr + cols, mask=shared, other=0.0),
        teacher_bias_ptr,
        cols,
        shared,
        teacher_scale,
        teacher_softcap,
        PLAIN,
    )
    agrees = favourite == tl.min(tl.where(shared & (t * cold == best_t), cols, far), 0)
    tl.store(agreement_ptr + row, agrees.to(tl.float32))
    if SPLIT:
        log_sum_1 = tl.log(tl.sum(sum_1, 0))
        cols = start_1 + lane
        mask = cols < V
        z, slope = head_at_one(
            tl.load(student_ptr + cols, mask=mask, other=0.0), bias_ptr, cols, mask, scale, softcap, PLAIN
        )
        favourite = tl.min(tl.where(mask & (z == best_1), cols, far), 0)
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
            z, slope = head_at_one(
                tl.load(student_ptr + cols, mask=shared, other=0.0),
                bias_ptr,
                cols,
                shared,
                scale,
                softcap,
                PLAIN,
            )
            t, slope_t = head_at_one(
                tl.load(teacher_ptr + cols, mask=shared, other=0.0),
                teacher_bias_ptr,
                cols,
                shared,
                teacher_scale,
                teacher_softcap,
                PLAIN,
            )
            log_s = tl.maximum((z * cold - shift_s) - log_sum_s, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            log_t = tl.maximum((t * cold - shift_t) - log_sum_t, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            log_s, log_t = tl.where(shared, log_s, NOTHING), tl.where(shared, log_t, NOTHING)
            s, terms, score, means = scored(log_s, log_t, tl.exp(log_t), beta, MODE)
            loss += terms
            mean += means
            entropy -= s * log_s

    if write != 0:
        # Nobody may store over a logit before everybody has read it.
        tl.debug_barrier()
        average = tl.sum(mean, 0)
        soft_factor = factor * (1.0 - hard_weight) * cold
        hard_factor = factor * hard_weight
        for start in range(0, V, BLOCK):
            cols = start + lane
            mask, shared = cols < V, cols < common
            z, slope = head_at_one(
                tl.load(student_ptr + cols, mask=mask, other=0.0), bias_ptr, cols, mask, scale, softcap, PLAIN
            )
            t, slope_t = head_at_one(
                tl.load(teacher_ptr + cols, mask=shared, other=0.0),
                teacher_bias_ptr,
                cols,
                shared,
                teacher_scale,
                teacher_softcap,
                PLAIN,
            )
            log_s = tl.maximum((z * cold - shift_s) - log_sum_s, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            log_t = tl.maximum((t * cold - shift_t) - log_sum_t, NOTHING, propagate_nan=tl.PropagateNan.ALL)
            log_s, log_t = tl.where(shared, log_s, NOTHING), tl.where(shared, log_t, NOTHING)
            if MODE == FORWARD:
                t = tl.exp(log_t)
                s, terms, score, means = scored(log_s, log_t, t, beta, MODE)
                g = soft_factor * (s - t)
                loss += terms
                entropy -= s * log_s
            else:
                s, terms, score, means = scored(log_s, log_t, t, beta, MODE)
                g = soft_factor * s * (score - average)
            if SPLIT:
                p = tl.exp((z - shift_1) - log_sum_1)
                g += tl.where(known, hard_factor * (p - tl.where(cols == y, 1.0, 0.0)), 0.0)
            # A token that does not count is zeroed, whatever its logits hold.
            g = tl.where(factor == 0.0, 0.0, g * slope)
            if ALIAS:
                tl.debug_barrier()
            tl.store(grad_ptr + cols, g.to(grad_ptr.dtype.element_ty), mask=mask)
    tl.store(soft_ptr + row, tl.sum(loss, 0))
    tl.store(entropy_ptr + row, tl.sum(entropy, 0))


def mode_of(divergence: str, beta: float) -> int:
    if divergence == "jsd" and beta in (0.0, 1.0):
        divergence = "reverse_kl" if beta else "forward_kl"
    return MODES[divergence]


def biases(
    student: Tensor, common: int, head, teacher_head, bias: Tensor | None, teacher_bias: Tensor | None
) -> tuple[bool, list[Tensor]]:
    """Whether the logits are plain multiples of the products, and both biases as the kernels read them."""
    plain = bias is None and teacher_bias is None and head.softcap is None and teacher_head.softcap is None
    widths = (student.shape[1], common)
    empty = [torch.zeros(0 if plain else width, device=student.device) for width in widths]
    given = zip(empty, (bias, teacher_bias), strict=True)
    return plain, [zeros if x is None else dense(x, torch.float32) for zeros, x in given]


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
    head,
    teacher_head,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
) -> tuple[Tensor, ...]:
    (C, V), common = student.shape, min(student.shape[1], teacher.shape[1])
    found = [torch.empty(C, device=student.device) for _ in range(5)]
    plain, vectors = biases(student, common, head, teacher_head, bias, teacher_bias)
    grad = student if gradient is None else gradient
    check_rows(student=student, teacher=teacher, gradient=grad)
    divergence_kernel[(C,)](
        student,
        teacher,
        grad,
        torch.full((C,), -1, device=student.device) if labels is None else dense(labels),
        found[0] if factors is None else dense(factors),
        *vectors,
        *found,
        student.stride(0),
        teacher.stride(0),
        grad.stride(0),
        V,
        common,
        head.logit_scale,
        head.softcap or 0.0,
        teacher_head.logit_scale,
        teacher_head.softcap or 0.0,
        1.0 / head.temperature,
        beta,
        hard_weight,
        int(gradient is not None),
        MODE=mode_of(divergence, beta),
        PLAIN=plain,
        SPLIT=head.temperature != 1.0 or common != V or hard_weight > 0.0,
        ALIAS=grad.dtype != student.dtype,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return tuple(found)
