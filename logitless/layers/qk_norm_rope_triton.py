"""Triton kernel of `qk_norm_rope`'s backward pass: rotates the gradients back, and differentiates the norm.

With x a head, s = 1 / sqrt(mean(x^2) + eps), z = s x and g = weight * (gradient rotated back):

    d_x = s (g - z mean(g z))        d_weight = sum over tokens and heads of (gradient rotated back) * z

A few programs per multiprocessor each loop over many tokens and keep their partial sums of both weights'
gradients in registers; `column_sum` adds them in a fixed order. s is recomputed, because the kernel loads the
head in any case.
"""

import torch
import triton
import triton.language as tl

from logitless.kernels.launch import cached_launch
from logitless.kernels.operands import multiprocessors
from logitless.layers.norm_triton import PREFETCH_BYTES, choose_num_stages, column_sum
from logitless.layers.rope_triton import (
    empty_with_layout,
    launch_constants,
    load_angles,
    load_pairs,
    rotate_pairs,
    store_pairs,
    with_angle_strides,
    with_strides,
)

# Warps of a program whose heads have up to 128 elements, and of one with longer heads.
SHORT_WARPS, LONG_WARPS = 4, 2


def programs_per_multiprocessor(bytes_per_iteration: int) -> int:
    """Return the number of programs per multiprocessor that together have enough bytes in flight."""
    return max(2, min(8, PREFETCH_BYTES // (2 * bytes_per_iteration)))


@triton.jit
def heads_backward(
    d_out_ptr,
    x_ptr,
    weight_ptr,
    d_x_ptr,
    d_out_row,
    x_row,
    d_x_row,
    d_out_stride,
    x_stride,
    d_x_stride,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    d_weight_a,
    d_weight_b,
    eps,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GEMMA: tl.constexpr,
):
    """Differentiate one token's heads of q or of k; add to the partial sum of the weight's gradient."""
    if weight_ptr is not None:
        row = tl.zeros([1, 1], tl.int64)
        weight_a, weight_b = load_pairs(weight_ptr, row, row == 0, D, R, HALF, INTERLEAVED)
        if GEMMA:
            weight_a += 1.0
            weight_b += 1.0
    for start in tl.static_range(0, COUNT, HEADS):
        head = start + tl.arange(0, HEADS)[:, None].to(tl.int64)
        mask = head < COUNT
        g_a, g_b = load_pairs(d_out_ptr, d_out_row + head * d_out_stride, mask, D, R, HALF, INTERLEAVED)
        z_a, z_b = load_pairs(x_ptr, x_row + head * x_stride, mask, D, R, HALF, INTERLEAVED)
        rstd = tl.rsqrt(tl.sum(z_a * z_a + z_b * z_b, 1, keep_dims=True) / D + eps)
        g_a, g_b = rotate_pairs(g_a, g_b, cos_a, cos_b, sin_a, sin_b, D, R, HALF, True)
        z_a *= rstd
        z_b *= rstd
        d_weight_a += g_a * z_a
        d_weight_b += g_b * z_b
        if weight_ptr is not None:
            g_a *= weight_a
            g_b *= weight_b
        mean = tl.sum(g_a * z_a + g_b * z_b, 1, keep_dims=True) / D
        d_a = rstd * (g_a - z_a * mean)
        d_b = rstd * (g_b - z_b * mean)
        store_pairs(d_x_ptr, d_x_row + head * d_x_stride, mask, d_a, d_b, D, R, HALF, INTERLEAVED)
    return d_weight_a, d_weight_b


@cached_launch
@triton.jit(do_not_specialize=["tokens", "length"])
def norm_rope_backward_kernel(
    d_q_out_ptr,  # or None
    d_k_out_ptr,  # or None
    q_ptr,
    k_ptr,
    q_weight_ptr,  # or None
    k_weight_ptr,  # or None
    d_q_ptr,
    d_k_ptr,
    partial_sums_ptr,  # (programs, 2, D) fp32, or None
    cos_ptr,
    sin_ptr,
    d_q_out_batch_stride,
    d_q_out_stride,
    d_q_out_token_stride,
    d_k_out_batch_stride,
    d_k_out_stride,
    d_k_out_token_stride,
    q_batch_stride,
    q_stride,
    q_token_stride,
    k_batch_stride,
    k_stride,
    k_token_stride,
    d_q_batch_stride,
    d_q_stride,
    d_q_token_stride,
    d_k_batch_stride,
    d_k_stride,
    d_k_token_stride,
    angle_batch_stride,
    angle_token_stride,
    tokens,  # B * T
    length,  # T
    eps,
    Q_COUNT: tl.constexpr,
    K_COUNT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_PAIR: tl.constexpr,
    GEMMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    zero = tl.full((), 0, tl.int64)
    d_q_weight_a = tl.zeros([Q_HEADS, HALF], tl.float32)
    d_q_weight_b = tl.zeros([Q_HEADS, HALF], tl.float32)
    d_k_weight_a = tl.zeros([K_HEADS, HALF], tl.float32)
    d_k_weight_b = tl.zeros([K_HEADS, HALF], tl.float32)
    for token in tl.range(program, tokens, tl.num_programs(0), num_stages=STAGES):
        batch = zero + token // length
        position = zero + token % length
        angle = batch * angle_batch_stride + position * angle_token_stride
        cos_a, cos_b = load_angles(cos_ptr, angle, 1.0, R, HALF, INTERLEAVED, PER_PAIR)
        sin_a, sin_b = load_angles(sin_ptr, angle, 0.0, R, HALF, INTERLEAVED, PER_PAIR)
        if d_q_out_ptr is not None:
            d_q_weight_a, d_q_weight_b = heads_backward(
                d_q_out_ptr,
                q_ptr,
                q_weight_ptr,
                d_q_ptr,
                batch * d_q_out_batch_stride + position * d_q_out_token_stride,
                batch * q_batch_stride + position * q_token_stride,
                batch * d_q_batch_stride + position * d_q_token_stride,
                d_q_out_stride,
                q_stride,
                d_q_stride,
                cos_a,
                cos_b,
                sin_a,
                sin_b,
                d_q_weight_a,
                d_q_weight_b,
                eps,
                Q_COUNT,
                Q_HEADS,
                D,
                R,
                HALF,
                INTERLEAVED,
                GEMMA,
            )
        if d_k_out_ptr is not None:
            d_k_weight_a, d_k_weight_b = heads_backward(
                d_k_out_ptr,
                k_ptr,
                k_weight_ptr,
                d_k_ptr,
                batch * d_k_out_batch_stride + position * d_k_out_token_stride,
                batch * k_batch_stride + position * k_token_stride,
                batch * d_k_batch_stride + position * d_k_token_stride,
                d_k_out_stride,
                k_stride,
                d_k_stride,
                cos_a,
                cos_b,
                sin_a,
                sin_b,
                d_k_weight_a,
                d_k_weight_b,
                eps,
                K_COUNT,
                K_HEADS,
                D,
                R,
                HALF,
                INTERLEAVED,
                GEMMA,
            )
    if partial_sums_ptr is not None:
        row = tl.zeros([1, 1], tl.int64) + program.to(tl.int64) * 2 * D
        d_q_weight_a = tl.sum(d_q_weight_a, 0, keep_dims=True)
        d_q_weight_b = tl.sum(d_q_weight_b, 0, keep_dims=True)
        store_pairs(partial_sums_ptr, row, row >= 0, d_q_weight_a, d_q_weight_b, D, R, HALF, INTERLEAVED)
        d_k_weight_a = tl.sum(d_k_weight_a, 0, keep_dims=True)
        d_k_weight_b = tl.sum(d_k_weight_b, 0, keep_dims=True)
        store_pairs(partial_sums_ptr, row + D, row >= 0, d_k_weight_a, d_k_weight_b, D, R, HALF, INTERLEAVED)


def backward(
    d_q_out, d_k_out, cos, sin, q, k, q_weight, k_weight, config, needs_weight_gradients: tuple[bool, bool]
):
    """Return the gradients of q, k and the weights; None for those that are not needed."""
    B, q_count, T, D = q.shape
    d_q = None if d_q_out is None else empty_with_layout(q)
    d_k = None if d_k_out is None else empty_with_layout(k)
    num_warps = SHORT_WARPS if D <= 128 else LONG_WARPS
    constants = launch_constants(q_count, 0 if k is None else k.shape[1], D, config) | {
        "num_warps": num_warps
    }
    bytes_per_iteration = sum(x.numel() * x.element_size() for x in (d_q_out, d_k_out, q, k) if x is not None)
    bytes_per_iteration = bytes_per_iteration // (B * T) * 2 * constants["HALF"] // D
    constants["STAGES"] = choose_num_stages(bytes_per_iteration)
    num_programs = min(B * T, programs_per_multiprocessor(bytes_per_iteration) * multiprocessors(q.device))
    partial_sums = (
        q.new_empty((num_programs, 2 * D), dtype=torch.float32) if any(needs_weight_gradients) else None
    )
    d_q_out, d_q_out_strides = with_strides(d_q_out)
    d_k_out, d_k_out_strides = with_strides(d_k_out)
    q, q_strides = with_strides(q)
    k, k_strides = with_strides(k)
    cos, sin, angle_strides = with_angle_strides(cos, sin)
    norm_rope_backward_kernel[(num_programs,)](
        d_q_out,
        d_k_out,
        q,
        k,
        None if q_weight is None else q_weight.contiguous(),
        None if k_weight is None else k_weight.contiguous(),
        d_q,
        d_k,
        partial_sums,
        cos,
        sin,
        *d_q_out_strides,
        *d_k_out_strides,
        *q_strides,
        *k_strides,
        *with_strides(d_q)[1],
        *with_strides(d_k)[1],
        *angle_strides,
        B * T,
        T,
        config.eps,
        PER_PAIR=cos.shape[-1] != config.rotary_dim,
        **constants,
    )
    d_q_weight = d_k_weight = None
    if partial_sums is not None:
        needs_d_q_weight, needs_d_k_weight = needs_weight_gradients
        weight_gradients = column_sum(partial_sums, (q_weight if needs_d_q_weight else k_weight).dtype)
        if needs_d_q_weight and d_q is not None:
            d_q_weight = weight_gradients[:D]
        if needs_d_k_weight and d_k is not None:
            d_k_weight = weight_gradients[D:].to(k_weight.dtype)
    return d_q, d_k, d_q_weight, d_k_weight
