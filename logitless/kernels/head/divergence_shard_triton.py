"""Triton kernel of `divergence.py` for a sharded vocabulary.

The caller runs pass 1 (see `divergence_triton.py`) with `token_statistics` and merges its results over the
ranks. Passes 2 and 3 are one
launch each, with an all-reduce of the sums between them.
"""

import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.divergence_triton import (
    BLOCK,
    FORWARD,
    LOG2E,
    MIN_LOGPROB,
    TV,
    WARPS,
    biases,
    head_at_one,
    mode_of,
    scored,
    unit_of,
)
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, check_written, dense


@cached_launch
@triton.jit(**OF_CHUNKS)
def shard_kernel(
    student_ptr,
    teacher_ptr,
    grad_ptr,
    labels_ptr,
    factors_ptr,
    bias_ptr,
    teacher_bias_ptr,
    known_ptr,
    sums_ptr,
    teacher_rows_ptr,
    student_stride,
    teacher_stride,
    grad_stride,
    V,
    rows,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    cold,
    beta,
    hard_weight,
    MODE: tl.constexpr,
    PLAIN: tl.constexpr,
    HARD: tl.constexpr,
    WRITE: tl.constexpr,
    ALIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pass 2 or 3 for a shard of the vocabulary.

    `known` contains the statistics of the whole vocabulary from pass 1: log-sum-exp and its residual of the
    student, of the teacher, and of the student at temperature 1. For pass 3 of a divergence of the acceptance
    rate, it also contains the factors a and b. `sums` contains the divergence and the mean of the score: pass
    2 writes the sums of this shard, and pass 3 reads the sums of all shards. With OVERLAP, it also contains
    sum min(s, p) and sum max(s - p, 0). For a divergence of the acceptance rate, the first two sums are the
    forward KL and sum s [s < p].
    """
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_row = tl.load(teacher_rows_ptr + row).to(tl.int64) if ROWS else row
    teacher_ptr += teacher_row * teacher_stride
    grad_ptr += row * grad_stride
    lane = tl.arange(0, BLOCK)
    lse_s = tl.load(known_ptr + row)
    rest_s = tl.load(known_ptr + rows + row)
    lse_t, rest_t = tl.load(known_ptr + 2 * rows + row), tl.load(known_ptr + 3 * rows + row)
    unit = unit_of(beta, MODE)
    loss = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    shared, excess = mean, mean
    if WRITE:
        average = tl.load(sums_ptr + rows + row)
        factor = tl.load(factors_ptr + row)
        soft_factor = factor * (1.0 - hard_weight) * cold
        hard_factor = factor * hard_weight
        y = tl.load(labels_ptr + row)
        lse_1, rest_1 = tl.load(known_ptr + 4 * rows + row), tl.load(known_ptr + 5 * rows + row)
        if MODE >= TV:
            a, b = tl.load(known_ptr + 6 * rows + row), tl.load(known_ptr + 7 * rows + row)
    for start in range(0, V, BLOCK):
        cols = start + lane
        mask = cols < V
        z, slope = head_at_one(
            tl.load(student_ptr + cols, mask=mask, other=0.0), bias_ptr, cols, mask, scale, softcap, PLAIN
        )
        t, slope_t = head_at_one(
            tl.load(teacher_ptr + cols, mask=mask, other=0.0),
            teacher_bias_ptr,
            cols,
            mask,
            teacher_scale,
            teacher_softcap,
            PLAIN,
        )
        # Subtract the normalizers before the multiplication by LOG2E. Separate products with LOG2E would lose
        # the last digits of the difference.
        log_s, log_t = ((z * cold - lse_s) - rest_s) * LOG2E, ((t * cold - lse_t) - rest_t) * LOG2E
        log_s = tl.maximum(log_s, MIN_LOGPROB, propagate_nan=tl.PropagateNan.ALL)
        log_t = tl.maximum(log_t, MIN_LOGPROB, propagate_nan=tl.PropagateNan.ALL)
        log_s, log_t = tl.where(mask, log_s, MIN_LOGPROB), tl.where(mask, log_t, MIN_LOGPROB)
        s, p_t, terms, score, means = scored(log_s, log_t, beta, MODE)
        if WRITE:
            if MODE >= TV:
                accepted = tl.where(s < p_t, 1.0 - average, -average)
                g = soft_factor * (a * (s - p_t) - b * (s * accepted))
            elif MODE == FORWARD:
                g = soft_factor * (s - p_t)
            else:
                g = soft_factor * s * (unit * score - average)
            if HARD:
                p = tl.exp((z - lse_1) - rest_1)
                g += tl.where(y >= 0, hard_factor * (p - tl.where(cols == y, 1.0, 0.0)), 0.0)
            g = tl.where(factor == 0.0, 0.0, g * slope)
            if ALIAS:
                # All threads must have read this block before a thread overwrites it.
                tl.debug_barrier()
            tl.store(grad_ptr + cols, g.to(grad_ptr.dtype.element_ty), mask=mask)
        else:
            loss += terms
            mean += tl.where(s < p_t, s, 0.0) if MODE >= TV else means
            if OVERLAP:
                shared += tl.minimum(s, p_t)
                excess += tl.maximum(s - p_t, 0.0)
    if not WRITE:
        tl.store(sums_ptr + row, unit * tl.sum(loss, 0))
        tl.store(sums_ptr + rows + row, unit * tl.sum(mean, 0))
        if OVERLAP:
            tl.store(sums_ptr + 2 * rows + row, tl.sum(shared, 0))
            tl.store(sums_ptr + 3 * rows + row, tl.sum(excess, 0))


def shard_pass(
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
    transform,
    teacher_transform,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    teacher_rows: Tensor | None,
) -> None:
    C, V = student.shape
    write = gradient is not None
    plain, vectors = biases(student, V, transform, teacher_transform, bias, teacher_bias)
    grad = gradient if write else student
    check_rows(student=student, teacher=teacher, gradient=grad)
    check_written(sums=sums)
    shard_kernel[(C,)](
        student,
        teacher,
        grad,
        dense(labels),
        dense(factors) if write else sums,
        *vectors,
        dense(normalizers),
        sums,
        dense(labels if teacher_rows is None else teacher_rows),
        student.stride(0),
        teacher.stride(0),
        grad.stride(0),
        V,
        C,
        transform.logit_scale,
        transform.softcap or 0.0,
        teacher_transform.logit_scale,
        teacher_transform.softcap or 0.0,
        1.0 / transform.temperature,
        beta,
        hard_weight,
        MODE=mode_of(divergence, beta),
        PLAIN=plain,
        HARD=write and hard_weight > 0.0,
        WRITE=write,
        ALIAS=grad.dtype != student.dtype,
        OVERLAP=sums.shape[0] > 2,
        ROWS=teacher_rows is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
