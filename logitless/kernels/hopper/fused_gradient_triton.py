"""A product with the head whose epilogue computes the gradient of the logits, for rows whose statistics were
computed in an earlier pass. See `fused_projection_triton.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import complement, head_logits, vocabulary_arguments
from logitless.kernels.hopper.product_tiles_triton import (
    LAUNCH,
    TILE,
    aligned,
    described,
    group_of,
    halves_of_product,
    place_of_tile,
    programs_of,
)
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, dense


@triton.jit
def gradient_half(
    acc,
    n0,
    rows,  # vectors with one entry per row
    operands,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """Store the gradient of the columns from n0 on."""
    y, ignored, lse, correction, a, g_y, g_entropy, offset, g_sum = rows
    grad, bias_ptr, class_weights_ptr, m0, V, gain, squash, cap = operands
    cols = (n0 + tl.arange(0, BN))[None, :]
    z, slope = head_logits(acc, bias_ptr, cols, cols < V, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
    log_p = z - lse[:, None]
    p = correction[:, None] * tl.exp(log_p)
    g = a[:, None] * p
    if EXTRA:
        # Terms with p = 0 are 0, although log p is -inf.
        g -= g_entropy[:, None] * tl.where(p > 0.0, p * (log_p + offset[:, None]), 0.0)
    g = tl.where(cols == y[:, None], g_y[:, None], g)
    if EXTRA:
        if HAS_WEIGHTS:
            g += g_sum[:, None] * tl.load(class_weights_ptr + cols, mask=cols < V, other=0.0)
        else:
            g += g_sum[:, None]
    grad.store([m0, n0], tl.where(ignored[:, None], 0.0, g * slope).to(grad.dtype))


@cached_launch
@triton.jit(**OF_CHUNKS)
def gradient_kernel(
    x,
    w,
    grad,
    bias_ptr,
    class_weights_ptr,
    targets_ptr,
    lse_ptr,
    lse_residual_ptr,
    logps_ptr,
    entropy_ptr,
    g_logp_ptr,
    g_lse_ptr,
    g_entropy_ptr,
    g_sum_ptr,
    C,
    V,
    H,
    ignore_index,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """`cross_entropy_triton.logits_gradient_kernel` on the accumulators of the product."""
    row_tiles, col_tiles = tl.cdiv(C, BM), tl.cdiv(V, BN)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, PROGRAMS, flatten=True):
        row, column = place_of_tile(tile, row_tiles, col_tiles, GROUP)
        m0, n0 = row * BM, column * BN
        left, right = halves_of_product(x, w, m0, n0, H, BM, BN, BK)
        rows = m0 + tl.arange(0, BM)
        here = rows < C
        y = tl.load(targets_ptr + rows, mask=here, other=ignore_index)
        lse = tl.load(lse_ptr + rows, mask=here, other=0.0)
        residual = tl.load(lse_residual_ptr + rows, mask=here, other=0.0)
        logp = tl.load(logps_ptr + rows, mask=here, other=0.0)
        g_logp = tl.load(g_logp_ptr + rows, mask=here, other=0.0)
        g_lse = tl.load(g_lse_ptr + rows, mask=here, other=0.0)
        p_y = tl.exp(logp)
        g_y = g_lse * p_y + g_logp * complement(logp)
        g_entropy, g_sum, offset = 0.0 * lse, 0.0 * lse, 0.0 * lse
        if EXTRA:
            entropy = tl.load(entropy_ptr + rows, mask=here, other=0.0)
            g_entropy = tl.load(g_entropy_ptr + rows, mask=here, other=0.0)
            g_sum = tl.load(g_sum_ptr + rows, mask=here, other=0.0)
            g_y -= g_entropy * tl.where(p_y > 0.0, p_y * (logp + entropy), 0.0)
            offset = entropy - residual
        # p = exp(z - lse) exp(-residual)
        correction = 1.0 - complement(-residual)
        a = g_lse - g_logp
        ignored = y == ignore_index
        statistics = (y, ignored, lse, correction, a, g_y, g_entropy, offset, g_sum)
        operands = (grad, bias_ptr, class_weights_ptr, m0, V, gain, squash, cap)
        gradient_half(left, n0, statistics, operands, BN // 2, HAS_BIAS, HAS_SOFTCAP, EXTRA, HAS_WEIGHTS)
        gradient_half(
            right, n0 + BN // 2, statistics, operands, BN // 2, HAS_BIAS, HAS_SOFTCAP, EXTRA, HAS_WEIGHTS
        )


def write(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats,
    grads,
    *,
    gradient,
    transform,
    bias,
    class_weights,
    ignore_index,
) -> None:
    C, H = features.shape
    V = weight.shape[0]
    check_rows(gradient=gradient)
    extra = grads.entropy is not None or grads.sum_logits is not None
    zeros = torch.zeros_like(stats.lse)
    pointers, scalars, flags = vocabulary_arguments(transform, bias, class_weights if extra else None, zeros)
    statistics = (stats.lse, stats.lse_residual, stats.logps, stats.entropy)
    upstream = (grads.logps, grads.lse, grads.entropy, grads.sum_logits)
    programs = programs_of(features)
    gradient_kernel[(programs,)](
        *described(aligned(features), weight, gradient),
        *pointers,
        dense(targets),
        *(zeros if x is None else dense(x) for x in (*statistics, *upstream)),
        *(C, V, H, ignore_index, *scalars),
        **flags,
        EXTRA=extra,
        **TILE,
        **LAUNCH,
        GROUP=group_of(features),
        PROGRAMS=programs,
    )
