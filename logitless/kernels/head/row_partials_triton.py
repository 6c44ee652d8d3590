"""Kernels that run before and after the product with an epilogue (`fused_projection_triton.py`).

    shift_kernel    before the product: compute the shift of each row, to which its exponentials are relative
    finish_kernel   after the product: compute the statistics of each row from the partial sums of its tiles

Exponentials are to the base 2: a scaled logit is log2(e) z, and its exponential is 2^(log2(e) z - shift).
`target_logit` is the scaled logit of the target minus the shift.
"""

import triton
import triton.language as tl

from logitless.kernels.head.cross_entropy_triton import head_logits, statistics_of_row
from logitless.kernels.launch import OF_CHUNKS, cached_launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# ln 2 as the sum of two constants. The first has so few digits that its product with a shift is exact.
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.12194440e-4)
# A row is recomputed if its sum of exponentials is above 2^DRIFT or below 2^-DRIFT. bf16 and fp32 can
# represent 2^58, and the product of its inverse and a small upstream gradient in a row factor does not
# underflow.
DRIFT = tl.constexpr(58.0)
# Scaled logit of a masked column. 2^NEVER and NEVER * 2^NEVER are 0; with -inf, the latter would be NaN.
NEVER = tl.constexpr(-1e30)
# Flags of a row. DRIFTED: the row must be recomputed, because its exponentials may underflow or overflow.
# TIE: the row must be recomputed, because another logit in the target's tile equals the target's logit. TIED:
# in the recomputation, the other logit comes first.
DRIFTED, TIE, TIED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def above_shift(
    x, shift, bias_ptr, cols, mask, gain, squash, cap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """(log2(e) z - shift, log2(e) d z / d x) for the logits z of products x; bitwise equal in all kernels."""
    if HAS_SOFTCAP:
        z, slope = head_logits(x, bias_ptr, cols, mask, gain * LOG2E, squash, cap * LOG2E, HAS_BIAS, True)
        d = z - shift
    else:
        if HAS_BIAS:
            x += tl.load(bias_ptr + cols, mask=mask, other=0.0)
        slope = gain * LOG2E
        d = tl.fma(x, slope, -shift)
    return d, slope


@cached_launch
@triton.jit(**OF_CHUNKS)
def shift_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    targets_ptr,
    shift_ptr,
    target_logit_ptr,
    sums_ptr,
    sum_logits_ptr,
    x_stride,
    w_stride,
    V,
    H,
    gain,
    squash,
    cap,
    ignore_index,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store each row's shift, and `target_logit` = log2(e) z_target - shift.

    The shift is log2(e) z_target rounded to an integer. It is 0 if the magnitude of log2(e) z_target is 3,000
    or more, and if the row has no target in these columns (sharded vocabulary); `target_logit` is then -inf.
    The shift of an ignored row is +inf, so that all of its exponentials are 0. With SUMS, also store the sum
    of the logits of each row, computed from the sum of the head's rows (`fused_projection.head_sums`).
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(targets_ptr + row)
    supervised = y != ignore_index
    has_target = (y >= 0) & (y < V) & supervised
    # An end of 0 instead of a scalar condition in the masks, as in `logits_gradient_kernel`.
    w_end = tl.where(has_target, H, 0)
    x_end = tl.where(supervised, H, 0) if SUMS else w_end
    total, logit_sum = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + at, mask=at < x_end, other=0.0).to(tl.float32)
        total += x * tl.load(w_ptr + y * w_stride + at, mask=at < w_end, other=0.0).to(tl.float32)
        if SUMS:
            logit_sum += x * tl.load(sums_ptr + at, mask=at < H, other=0.0)
    if SUMS:
        sum_z = gain * (tl.sum(logit_sum, 0) + tl.load(sums_ptr + H))
        tl.store(sum_logits_ptr + row, tl.where(supervised, sum_z, 0.0))
    x = tl.sum(total, 0)
    z, _ = above_shift(x, 0.0, bias_ptr, y, has_target, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
    # For integers of this size, shift * LN2_HIGH is exact.
    shift = tl.where(has_target & (tl.abs(z) < 3000.0), tl.floor(z + 0.5), 0.0)
    target_logit, _ = above_shift(x, shift, bias_ptr, y, has_target, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
    tl.store(shift_ptr + row, tl.where(supervised, shift, float("inf")))
    tl.store(target_logit_ptr + row, tl.where(has_target, target_logit, -float("inf")))


@triton.jit
def chosen_again(y, total, top, target_logit, shift, tie, ignore_index):
    """Return the flag DRIFTED, TIE or 0 (no recomputation) of each row, and the increase of its shift."""
    highest = tl.maximum(top, target_logit)
    sum_e = total + tl.exp2(target_logit)
    # `sum_e` can be below 2^-DRIFT if the row has no target in these columns: its shift is then 0, while all
    # of its logits may be far below 0.
    drifted = (y != ignore_index) & ((sum_e > tl.exp2(DRIFT)) | (sum_e < tl.exp2(-DRIFT)))
    # No finite shift helps a row whose largest logit is infinite.
    drifted = drifted & (highest > NEVER) & (highest < float("inf"))
    tied = (y != ignore_index) & (tie > 0)
    rise = tl.where(drifted, tl.floor(highest + 0.5), 0.0)
    return tl.where(drifted, DRIFTED, tl.where(tied, TIE, 0)), rise


@cached_launch
@triton.jit(**OF_CHUNKS)
def finish_kernel(
    grad_ptr,
    targets_ptr,
    shift_ptr,
    target_logit_ptr,
    again_ptr,
    partials_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    entropy_ptr,
    is_top1_ptr,
    sum_logits_ptr,
    log_sum_sq_ptr,
    row_scale_ptr,
    grad_stride,
    partial_stride,
    C,
    V,
    tiles,
    ignore_index,
    gain,
    cap,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    SQUARES: tl.constexpr,
    WRITE: tl.constexpr,
    AGAIN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Merge the partial sums of each row to its statistics, and store the target's entry of the gradient.

    Also store the flags of the rows that must be recomputed (`again_ptr`), and their new shifts. The launch
    with AGAIN runs after the recomputation. It processes all rows of each tile with a flagged row, because
    the recomputation stores the whole tile without the entries of the targets. It skips all other tiles.
    """
    first = tl.program_id(0) * ROWS
    if AGAIN:
        others_of_tile = first // BM * BM + tl.arange(0, BM)
        flags = tl.load(again_ptr + others_of_tile, mask=others_of_tile < C, other=0)
        tiles = tl.where(tl.max(flags, 0) > 0, tiles, 0)
        C = tl.where(tl.max(flags, 0) > 0, C, 0)
    rows = first + tl.arange(0, ROWS)
    here = rows < C
    y = tl.load(targets_ptr + rows, mask=here, other=ignore_index)
    has_target = here & (y >= 0) & (y < V) & (y != ignore_index)
    target_logit = tl.load(target_logit_ptr + rows, mask=here, other=-float("inf"))
    shift = tl.load(shift_ptr + rows, mask=here, other=0.0)
    rest = tl.zeros([TILES, ROWS], tl.float32)
    rest_d, rest_sq, logit_sum = rest, rest, rest
    top = tl.full([TILES, ROWS], -float("inf"), tl.float32)
    tie = tl.zeros([TILES, ROWS], tl.int32)
    beaten = rows < 0
    if AGAIN and EXTRA:
        beaten = tl.load(again_ptr + rows, mask=here, other=0) == TIED
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = partials_ptr + tile[:, None].to(tl.int64) * C + rows[None, :]
        mask = (tile < tiles)[:, None] & here[None, :]
        rest += tl.load(at, mask=mask, other=0.0)
        if EXTRA or not AGAIN:
            tops = tl.load(at + partial_stride, mask=mask, other=-float("inf"))
            top = tl.maximum(top, tops)
        if EXTRA:
            earlier = ((tile + 1) * BN)[:, None] <= y[None, :]
            above = (tops > target_logit[None, :]) | (earlier & (tops == target_logit[None, :]))
            beaten = beaten | (tl.max((above & mask).to(tl.int32), 0) > 0)
            if not AGAIN:
                tie |= (mask & (tops == target_logit[None, :]) & (tile[:, None] == (y // BN)[None, :])).to(
                    tl.int32
                )
            rest_d += tl.load(at + 2 * partial_stride, mask=mask, other=0.0)
        if SUM:
            logit_sum += tl.load(at + 3 * partial_stride, mask=mask, other=0.0)
        if SQUARES:
            rest_sq += tl.load(at + (3 + SUM) * partial_stride, mask=mask, other=0.0)
    others = tl.sum(rest, 0)
    supervised = y != ignore_index
    if not AGAIN:
        why, rise = chosen_again(y, others, tl.max(top, 0), target_logit, shift, tl.max(tie, 0), ignore_index)
        tl.store(again_ptr + rows, why, mask=here)
        tl.store(shift_ptr + rows, shift + rise, mask=here)
        tl.store(target_logit_ptr + rows, target_logit - rise, mask=here)
    total, log_total, logp, lse, residual, entropy = statistics_of_row(
        others, tl.sum(rest_d, 0) * LN2, target_logit * LN2, shift * LN2_HIGH
    )
    left_out = shift * LN2_LOW + residual
    whole = lse + left_out
    # An infinite or NaN lse has no rounding error.
    residual = tl.where(tl.abs(whole) < float("inf"), left_out - (whole - lse), 0.0)
    lse = whole
    tl.store(logps_ptr + rows, tl.where(supervised, logp, 0.0), mask=here)
    tl.store(lse_ptr + rows, tl.where(supervised, lse, 0.0), mask=here)
    tl.store(lse_residual_ptr + rows, tl.where(supervised, residual, 0.0), mask=here)
    if EXTRA:
        hit = tl.where(has_target, tl.where(beaten, 0.0, 1.0), (shift + tl.max(top, 0)) * LN2)
        tl.store(entropy_ptr + rows, tl.where(supervised, entropy, 0.0), mask=here)
        tl.store(is_top1_ptr + rows, tl.where(supervised, hit, 0.0), mask=here)
    if SUM:
        # Each of the tiles * BN columns subtracted the shift.
        sum_z = (tl.sum(logit_sum, 0) + tiles * BN * shift) * LN2
        tl.store(sum_logits_ptr + rows, tl.where(supervised, sum_z, 0.0), mask=here)
    if SQUARES:
        e_y = tl.exp2(target_logit)
        log_sum_sq = tl.log(tl.sum(rest_sq, 0) + e_y * e_y) - 2.0 * log_total
        tl.store(log_sum_sq_ptr + rows, tl.where(supervised, log_sum_sq, 0.0), mask=here)
    if WRITE:
        slope = 1.0
        if HAS_SOFTCAP:
            # The stored gradient contains log2(e) d z / d product. For the target, it is computed from the
            # logit.
            squashed = (shift + target_logit) * LN2 / cap
            slope = gain * LOG2E * (1.0 - squashed * squashed)
            scale = -1.0 / (total * LOG2E)
        else:
            scale = -gain / total
        tl.store(row_scale_ptr + rows, tl.where(supervised, scale, 0.0), mask=here)
        entry = grad_ptr + rows.to(tl.int64) * grad_stride + y
        tl.store(entry, (-others * slope).to(grad_ptr.dtype.element_ty), mask=has_target)
