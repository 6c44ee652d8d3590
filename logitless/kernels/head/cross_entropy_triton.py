"""Triton kernels for one chunk of logits (C, V). `cross_entropy.py` documents the results and contains the
twins.

One program processes one row, block by block. Both kernels are bound by memory traffic, but only barely: each
additional instruction per logit takes about 1/20 of the time. Therefore each logit is read as few times as
possible:

* `row_kernel` reads each logit once. It does not need the maximum of the row: exponentials are relative to a
  provisional shift k, the maximum of the first block. If a later logit exceeds k by more than DRIFT, the sums
  and the stored part of the row are scaled down. With WRITE, the kernel also stores exp(z - k) and sets the
  target's entry, so that the row is d log p(target) / d logits up to the factor -1/sum. The kernel returns
  this factor per row, and the engine applies it to the (C, H) matrices of the gradient products. This takes
  one read and one write per logit; normalizing in place would take two reads.
* `logits_gradient_kernel` reads and writes each logit once. It computes gradients that are not multiples of
  d log p(target) / d logits.

Rows of 0.25-0.5 MB do not remain in L2 for a second read. Sums are kept per lane and reduced once per row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.exponentials_triton import exp
from logitless.kernels.launch import OF_CHUNKS, BoundLaunch, cached_launch
from logitless.kernels.layout import check_rows, check_written, dense

# Exponentials relative to the shift are at most exp(DRIFT). The sum of their squares over any vocabulary is
# finite in fp32, and bf16 and fp32 can store them. fp16 cannot store them; therefore WRITE is not used for
# fp16 gradients (`single_pass`).
DRIFT = tl.constexpr(30.0)
# An H200 reads 4,096 x 151,936 bf16 logits in 0.52 ms with blocks of 1,024, in 0.43 ms with blocks of 2,048,
# and in 0.6 ms with EXTRA.
BLOCK, LONG_BLOCK, WARPS = 1024, 2048, 4
# Number of columns of a tile. `row_kernel` stores the largest logit of each tile for `select_triton`.
TILE = 64


@triton.jit
def head_logits(
    x, bias_ptr, cols, mask, gain, squash, cap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Logits and d logits / d x, like `LogitTransform.logits`.

    gain = scale/temperature, squash = scale/softcap, cap = softcap/temperature. Results outside the mask are
    arbitrary, and callers must mask the logits: an x of -inf would not give a logit of -inf, because
    tanh(-inf) is finite, and a negative scale gives +inf.
    """
    x = x.to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0)
    if HAS_SOFTCAP:
        # tanh(u) = 2 sigmoid(2u) - 1
        squashed = 2.0 / (1.0 + exp(-2.0 * squash * x)) - 1.0
        z = cap * squashed
        slope = gain * (1.0 - squashed * squashed)
    else:
        z = gain * x
        slope = gain
    return z, slope


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log1p(u):
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def left_out_of_log(x, log_x):
    """log(x) - log_x, the rounding error of log_x = tl.log(x). It is up to 5e-7 for results from 8 to 16.

    With x = m 2^k and m near 1, log(m) is small and accurate to 3e-8. k ln(2) is accurate as well, because
    ln(2) is split into two constants, the first of which has few digits.
    """
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23  # m from sqrt(1/2) to sqrt(2)
    m = (bits - (k << 23)).to(tl.float32, bitcast=True)
    k = k.to(tl.float32)
    small = tl.log(m) - k * 2.12194440e-4
    return tl.where((x > 0.0) & (x < float("inf")), (k * 0.693359375 - log_x) + small, 0.0)


@triton.jit
def complement(logp):
    """1 - exp(logp), computed by the series of exp if the difference would cancel."""
    x = -logp
    series = x * (
        1 - x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6 * (1 - x / 7 * (1 - x / 8))))))
    )
    return tl.where(tl.abs(x) < 0.5, series, 1.0 - tl.exp(logp))


@triton.jit
def statistics_of_row(others, others_z, drop_y, shift):
    """Return (total, log total, log p(target), lse, lse_residual, entropy) of a row.

    `others` and `others_z` are the sums of e = exp(z - shift) and of e (z - shift) without the target.
    `drop_y` is z - shift of the target. The total is the sum of e including the target. `lse_residual` is the
    rounding error of lse: lse + lse_residual is the log-sum-exp before rounding."""
    e_y = tl.exp(drop_y)
    total = others + e_y
    log_total = tl.log(total)
    log_rest = left_out_of_log(total, log_total)
    lse = shift + log_total
    log_part = lse - shift  # from the rounded lse: the differences from shift and log_total are exact in fp32
    confident = others < e_y
    logp = tl.where(
        confident, -log1p(others / tl.where(confident, e_y, 1.0)), (drop_y - log_total) - log_rest
    )
    residual = (shift - (lse - log_part)) + (log_total - log_part) + log_rest
    # -p log p of the target is a separate term, so that the small entropy of a confident token is not a
    # difference of large numbers.
    target_term = tl.where(e_y > 0.0, e_y * logp, 0.0)
    entropy = ((others * log_total - others_z) - target_term) / total
    return total, log_total, logp, lse, residual, entropy


@cached_launch
@triton.jit(**OF_CHUNKS)
def row_kernel(
    logits_ptr,
    grad_ptr,
    targets_ptr,
    bias_ptr,
    class_weights_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    entropy_ptr,
    is_top1_ptr,
    sum_logits_ptr,
    log_sum_sq_ptr,
    row_scale_ptr,
    maxima_ptr,
    logits_stride,
    grad_stride,
    V,
    ignore_index,
    gain,
    squash,
    cap,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    SQUARES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WRITE: tl.constexpr,
    ALIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    grad_ptr += row * grad_stride
    lane = tl.arange(0, BLOCK)
    y = tl.load(targets_ptr + row)
    if y == ignore_index:
        tl.store(logps_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        tl.store(lse_residual_ptr + row, 0.0)
        if EXTRA:
            tl.store(entropy_ptr + row, 0.0)
            tl.store(is_top1_ptr + row, 0.0)
        if SUM:
            tl.store(sum_logits_ptr + row, 0.0)
        if SQUARES:
            tl.store(log_sum_sq_ptr + row, 0.0)
        if WRITE:
            tl.store(row_scale_ptr + row, 0.0)
            for start in range(0, V, BLOCK):
                cols = start + lane
                tl.store(grad_ptr + cols, tl.zeros([BLOCK], grad_ptr.dtype.element_ty), mask=cols < V)
        return

    has_target = (y >= 0) & (y < V)
    z_y, slope_y = head_logits(
        tl.load(logits_ptr + y, mask=has_target, other=0.0),
        bias_ptr,
        y,
        has_target,
        gain,
        squash,
        cap,
        HAS_BIAS,
        HAS_SOFTCAP,
    )
    z_y = tl.where(has_target, z_y, -float("inf"))
    place = tl.where(has_target, y, -1).to(tl.int32)
    # All threads must have read the target's logit before a thread overwrites it.
    tl.debug_barrier()
    shift = -1e30
    best = -float("inf")  # of the blocks so far
    beaten = False
    # All sums exclude the target. 1 - p is then accurate for a confident token, for which 1 - exp(logp) would
    # cancel.
    rest = tl.zeros([BLOCK], tl.float32)
    if EXTRA:
        rest_z = tl.zeros([BLOCK], tl.float32)
    if SUM:
        weighted = tl.zeros([BLOCK], tl.float32)
    if SQUARES:
        rest_sq = tl.zeros([BLOCK], tl.float32)
    upcoming = tl.load(logits_ptr + lane, mask=lane < V, other=0.0)
    for start in range(0, V, BLOCK):
        cols = start + lane
        mask = cols < V
        x = upcoming
        # Prefetch the next block. If it were loaded after the reduction and the store of this block, its
        # latency would not be hidden.
        upcoming = tl.load(logits_ptr + cols + BLOCK, mask=cols + BLOCK < V, other=0.0)
        z, slope = head_logits(x, bias_ptr, cols, mask, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
        z = tl.where(mask, z, -float("inf"))
        top = tl.max(z, 0)
        if TILE:
            # Store the maximum of each tile for `select_triton`, in the order of `select_triton.compared`.
            products = x.to(tl.float32)
            if HAS_BIAS:
                products += tl.load(bias_ptr + cols, mask=mask, other=0.0)
            products *= tl.where(gain > 0.0, 1.0, -1.0)
            products = tl.reshape(tl.where(mask, products, -float("inf")), [BLOCK // TILE, TILE])
            most = tl.reduce(products, 1, larger)
            tile = start // TILE + tl.arange(0, BLOCK // TILE)
            last = maxima_ptr + row * ((V + TILE - 1) // TILE) + tile
            tl.store(last, tl.where(most == most, most, float("inf")), mask=tile * TILE < V)
        if EXTRA:
            # As in torch, the arg-max is the first of equal maxima. The target is the arg-max if the maxima
            # of earlier blocks are below the target's logit, and those of later blocks are not above it.
            if (y >= start) & (y < start + BLOCK):
                beaten = (best >= z_y) | (tl.max(((z == z_y) & (cols < y)).to(tl.int32), 0) > 0)
            best = tl.maximum(best, top)
        if top > shift + DRIFT:
            # Always executed for the first block, with nothing to scale, and rarely for later blocks.
            shrink = tl.exp(shift - top)
            if EXTRA:
                rest_z = shrink * tl.where(rest > 0.0, rest_z + (shift - top) * rest, 0.0)
            if SQUARES:
                rest_sq *= shrink * shrink
            rest *= shrink
            if WRITE:
                tl.debug_barrier()
                for begin in range(0, start, BLOCK):
                    before = grad_ptr + begin + lane
                    tl.store(before, (tl.load(before).to(tl.float32) * shrink).to(grad_ptr.dtype.element_ty))
            shift = top
        # A lower bound makes p log p 0 instead of NaN for a logit of -inf. exp(-200) is 0 in fp32.
        drop = z - shift
        if EXTRA:
            drop = tl.maximum(drop, -200.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.where(cols == place, 0.0, exp(drop))
        rest += e
        if EXTRA:
            rest_z += e * drop
        if SQUARES:
            rest_sq += e * e
        if SUM:
            if HAS_WEIGHTS:
                z *= tl.load(class_weights_ptr + cols, mask=mask, other=0.0)
            weighted += tl.where(mask, z, 0.0)
        if WRITE:
            if ALIAS:
                # The narrow gradient is stored in the memory of the wide logits, never after the block that
                # was just read.
                tl.debug_barrier()
            tl.store(grad_ptr + cols, (e * slope).to(grad_ptr.dtype.element_ty), mask=mask)

    others = tl.sum(rest, 0)
    sum_z = tl.sum(rest_z, 0) if EXTRA else 0.0
    total, log_total, logp, lse, residual, entropy = statistics_of_row(others, sum_z, z_y - shift, shift)
    e_y = tl.exp(z_y - shift)
    tl.store(logps_ptr + row, logp)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_residual_ptr + row, residual)
    if EXTRA:
        tl.store(entropy_ptr + row, entropy)
        tl.store(is_top1_ptr + row, tl.where(has_target, tl.where(beaten | (best > z_y), 0.0, 1.0), best))
    if SUM:
        tl.store(sum_logits_ptr + row, tl.sum(weighted, 0))
    if SQUARES:
        tl.store(log_sum_sq_ptr + row, tl.log(tl.sum(rest_sq, 0) + e_y * e_y) - 2.0 * log_total)
    if WRITE:
        tl.store(row_scale_ptr + row, -1.0 / total)
        tl.debug_barrier()
        tl.store(grad_ptr + y, (-others * slope_y).to(grad_ptr.dtype.element_ty), mask=has_target)


@cached_launch
@triton.jit(**OF_CHUNKS)
def logits_gradient_kernel(
    logits_ptr,
    grad_ptr,
    targets_ptr,
    bias_ptr,
    class_weights_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    entropy_ptr,
    g_logp_ptr,
    g_lse_ptr,
    g_entropy_ptr,
    g_sum_ptr,
    upstream_ptr,
    logits_stride,
    grad_stride,
    V,
    ignore_index,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    UPSTREAM: tl.constexpr,
    UNLESS_ONE: tl.constexpr,
    ALIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute d z_v = (g_lse - g_logp) p_v - g_entropy p_v (log p_v + entropy) + g_sum w_v, plus g_logp at
    the target.

    At the target, logps is more accurate than z - lse, and the gradient is computed without the difference 1
    - p, which would cancel for a confident token.

    UPSTREAM: 0, or the gradients of the statistics have a factor: 1, the same for all rows; 2, one for each
    row.
    """
    row = tl.program_id(0).to(tl.int64)
    if UPSTREAM:
        upstream = tl.load(upstream_ptr + (row if UPSTREAM == 2 else 0))
        if UNLESS_ONE:
            if upstream == 1.0:
                return
    logits_ptr += row * logits_stride
    grad_ptr += row * grad_stride
    y = tl.load(targets_ptr + row)
    lse = tl.load(lse_ptr + row)
    residual = tl.load(lse_residual_ptr + row)
    g_logp = tl.load(g_logp_ptr + row)
    g_lse = tl.load(g_lse_ptr + row)
    if UPSTREAM:
        # A statistic without a gradient has zeros, and 0 times inf is NaN.
        g_logp = tl.where(g_logp == 0.0, 0.0, g_logp * upstream)
        g_lse = tl.where(g_lse == 0.0, 0.0, g_lse * upstream)
    logp = tl.load(logps_ptr + row)
    p_y = tl.exp(logp)
    # p = exp(z - lse) exp(-residual). If the residual were subtracted from z - lse, most of it would be lost
    # by rounding, with the same error in all columns of a row.
    correction = 1.0 - complement(-residual)
    g_y = g_lse * p_y + g_logp * complement(logp)
    if EXTRA:
        entropy = tl.load(entropy_ptr + row)
        g_entropy = tl.load(g_entropy_ptr + row)
        g_sum = tl.load(g_sum_ptr + row)
        if UPSTREAM:
            g_entropy = tl.where(g_entropy == 0.0, 0.0, g_entropy * upstream)
            g_sum = tl.where(g_sum == 0.0, 0.0, g_sum * upstream)
        g_y -= g_entropy * tl.where(p_y > 0.0, p_y * (logp + entropy), 0.0)
    # An ignored row is set to 0, even if its logits are not finite. In Triton 3.9's interpreter, the mask
    # `(cols < V) & (y != ignore_index)` would be an integer, because a scalar condition is.
    end = tl.where(y != ignore_index, V, 0)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < end
        x = tl.load(logits_ptr + cols, mask=mask, other=0.0)
        z, slope = head_logits(x, bias_ptr, cols, mask, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
        log_p = z - lse
        p = correction * exp(log_p)
        g = (g_lse - g_logp) * p
        if EXTRA:
            # Terms with p = 0 are 0, although log p is -inf.
            g -= g_entropy * tl.where(p > 0.0, p * (log_p + (entropy - residual)), 0.0)
        g = tl.where(cols == y, g_y, g)
        if EXTRA:
            if HAS_WEIGHTS:
                g += g_sum * tl.load(class_weights_ptr + cols, mask=mask, other=0.0)
            else:
                g += g_sum
        g = tl.where(mask, g * slope, 0.0)
        if ALIAS:
            tl.debug_barrier()
        tl.store(grad_ptr + cols, g.to(grad_ptr.dtype.element_ty), mask=cols < V)


def vocabulary_arguments(transform, bias: Tensor | None, class_weights: Tensor | None, unused: Tensor):
    """Return (pointers, scalars, constexprs) for bias, class weights and head transform, for both kernels."""
    gain = transform.logit_scale / transform.temperature
    softcap = transform.softcap or 1.0
    return (
        # In a single dtype, so that a kernel is not compiled for other dtypes. A cast only reads V numbers.
        [unused if x is None else dense(x, torch.float32) for x in (bias, class_weights)],
        (gain, transform.logit_scale / softcap, softcap / transform.temperature),
        {
            "HAS_BIAS": bias is not None,
            "HAS_SOFTCAP": transform.softcap is not None,
            "HAS_WEIGHTS": class_weights is not None,
        },
    )


def row_pass(
    logits: Tensor,
    targets: Tensor,
    out,
    *,
    bias,
    class_weights,
    transform,
    ignore_index,
    gradient,
    maxima=None,
):
    write = gradient is not None
    check_rows(logits=logits, gradient=gradient if write else logits)
    check_written(**dict(out.items()))
    weights = None if out.sum_logits is None else class_weights
    pointers, scalars, flags = vocabulary_arguments(transform, bias, weights, out.lse)
    row_scale = torch.empty_like(out.lse) if write else out.lse
    grad = gradient if write else logits
    row_kernel[(logits.shape[0],)](
        logits,
        grad,
        dense(targets),
        *pointers,
        *out.pointers(),
        row_scale,
        out.lse if maxima is None else maxima,
        logits.stride(0),
        grad.stride(0),
        logits.shape[1],
        ignore_index,
        *scalars,
        **flags,
        TILE=0 if maxima is None else TILE,
        **out.flags(),
        WRITE=write,
        ALIAS=grad.dtype != logits.dtype,
        BLOCK=BLOCK if out.entropy is not None else LONG_BLOCK,
        num_warps=WARPS,
    )
    return row_scale if write else None


def logits_gradient(
    logits: Tensor, targets: Tensor, stats, grads, *, upstream: Tensor | None, **options
) -> None:
    write_gradient(*gradient_arguments(logits, targets, stats, grads, **options), upstream)


def gradient_arguments(
    logits: Tensor, targets: Tensor, stats, grads, *, bias, class_weights, transform, ignore_index, gradient
) -> tuple[list[Tensor], tuple, dict]:
    """Return (tensors, numbers, constants) for `write_gradient`."""
    extra = grads.entropy is not None or grads.sum_logits is not None
    unused = stats.lse
    # 0 times an entropy that was not computed may be NaN.
    factors = [grads.logps, grads.lse]
    others = [None if grads.entropy is None else stats.entropy, grads.entropy, grads.sum_logits]
    needed = factors + others if extra else factors
    zeros = stats.lse.new_zeros(stats.lse.shape) if any([x is None for x in needed]) else unused
    g_logp, g_lse, entropy, g_entropy, g_sum = [zeros if x is None else x for x in factors + others]
    pointers, scalars, flags = vocabulary_arguments(transform, bias, class_weights if extra else None, unused)
    read = [stats.logps, stats.lse, stats.lse_residual]
    return (
        [logits, gradient, targets, *pointers, *read, entropy, g_logp, g_lse, g_entropy, g_sum],
        (logits.shape[1], ignore_index, *scalars),
        flags | {"EXTRA": extra, "ALIAS": gradient.dtype != logits.dtype},
    )


def write_gradient(
    tensors: Sequence[Tensor],
    numbers: tuple,
    constants: dict,
    upstream: Tensor | None,
    *,
    unless_one: bool = False,
) -> None:
    """Write the gradient, `tensors[1]`; with `unless_one`, only rows where `upstream` is not 1."""
    logits, gradient, *vectors = tensors
    check_rows(logits=logits, gradient=gradient)
    tensors = (logits, gradient, *[dense(x) for x in vectors])
    upstream = None if upstream is None else dense(upstream)
    operands, constants = gradient_launch(tensors, numbers, constants, upstream, unless_one=unless_one)
    logits_gradient_kernel[(logits.shape[0],)](*operands, **constants)


def bound_gradient(
    tensors: Sequence[Tensor], numbers: tuple, constants: dict, upstream: Tensor
) -> BoundLaunch:
    """The launch of `write_gradient` with `unless_one`, for tensors of this specialization whose vectors are
    contiguous."""
    operands, constants = gradient_launch(tensors, numbers, constants, upstream, unless_one=True)
    launch = BoundLaunch(logits_gradient_kernel, **constants)
    launch.look_up(*operands)
    return launch


def gradient_launch(
    tensors: Sequence[Tensor], numbers: tuple, constants: dict, upstream: Tensor | None, *, unless_one: bool
) -> tuple[tuple, dict]:
    """Return (operands, constants) of `logits_gradient_kernel` for contiguous vectors."""
    logits, gradient = tensors[:2]
    each = 0 if upstream is None else 1 if upstream.numel() == 1 else 2
    last = tensors[-1] if upstream is None else upstream
    return (
        (*tensors, last, logits.stride(0), gradient.stride(0), *numbers),
        constants | {"UPSTREAM": each, "UNLESS_ONE": unless_one, "BLOCK": BLOCK, "num_warps": WARPS},
    )
