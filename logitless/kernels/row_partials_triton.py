"""Small kernels around the product with an epilogue (`fused_projection_triton.py`): what a row's exponentials
are taken relative to, and a row's numbers from the partial sums of its tiles."""

import triton
import triton.language as tl

from logitless.kernels.cross_entropy_triton import head_logits, numbers_of_row

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# ln 2 in two parts, the first of so few digits that its product with a shift is exact.
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)
# Further above the shift a row is done again. bf16 and fp32 hold 2^58; times a small upstream gradient
# over the total it does not vanish.
DRIFT = tl.constexpr(58.0)


@triton.jit
def shift_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    targets_ptr,
    shift_ptr,
    x_stride,
    w_stride,
    V,
    H,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """log2(e) times the target's logit, rounded to a whole number; 0 where a row has none, or an infinite
    one."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(targets_ptr + row)
    known = (y >= 0) & (y < V)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = (at < H) & known
        x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        total += x * tl.load(w_ptr + y * w_stride + at, mask=mask, other=0.0).to(tl.float32)
    z, _ = head_logits(tl.sum(total, 0), bias_ptr, y, known, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
    # Of this size multiples of ln 2 have an exact part and a small one.
    usable = known & (tl.abs(z) < 2000.0)
    tl.store(shift_ptr + row, tl.where(usable, tl.floor(z * LOG2E + 0.5), 0.0))


@triton.jit
def again_kernel(
    targets_ptr,
    shift_ptr,
    again_ptr,
    own_ptr,
    partials_ptr,
    partial_stride,
    C,
    V,
    tiles,
    ignore_index,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Which rows are done again, and relative to what."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < C
    y = tl.load(targets_ptr + rows, mask=here, other=ignore_index)
    own = tl.load(own_ptr + rows, mask=here & (y >= 0) & (y < V), other=-float("inf"))
    total, top = tl.zeros([TILES, ROWS], tl.float32), tl.full([TILES, ROWS], -float("inf"), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = partials_ptr + tile[:, None].to(tl.int64) * C + rows[None, :]
        mask = (tile < tiles)[:, None] & here[None, :]
        total += tl.load(at, mask=mask, other=0.0)
        top = tl.maximum(top, tl.load(at + partial_stride, mask=mask, other=-float("inf")))
    highest = tl.maximum(tl.max(top, 0), own)
    sum_e = tl.sum(total, 0) + tl.exp2(own)
    # Also a row without a target here whose logits all lie far below 0, the shift it was given.
    again = (y != ignore_index) & ((sum_e > tl.exp2(DRIFT)) | (sum_e < tl.exp2(-DRIFT)))
    again = again & (tl.abs(highest) < float("inf"))
    shift = tl.load(shift_ptr + rows, mask=here, other=0.0)
    tl.store(again_ptr + rows, again.to(tl.int32), mask=here)
    tl.store(shift_ptr + rows, tl.where(again, tl.floor(shift + highest + 0.5), shift), mask=here)


@triton.jit
def finish_kernel(
    grad_ptr,
    targets_ptr,
    shift_ptr,
    own_ptr,
    beaten_ptr,
    partials_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    entropy_ptr,
    is_top1_ptr,
    log_sum_sq_ptr,
    sum_logits_ptr,
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
    WRITE: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """A row's numbers from its partial sums, and the target's entry of what was stored."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < C
    y = tl.load(targets_ptr + rows, mask=here, other=ignore_index)
    known = here & (y >= 0) & (y < V) & (y != ignore_index)
    own = tl.load(own_ptr + rows, mask=known, other=-float("inf"))
    shift = tl.load(shift_ptr + rows, mask=here, other=0.0)
    rest = tl.zeros([TILES, ROWS], tl.float32)
    rest_d, rest_sq, plain = rest, rest, rest
    top = tl.full([TILES, ROWS], -float("inf"), tl.float32)
    beaten = tl.load(beaten_ptr + rows, mask=known & EXTRA, other=0.0) > 0.0
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = partials_ptr + tile[:, None].to(tl.int64) * C + rows[None, :]
        mask = (tile < tiles)[:, None] & here[None, :]
        rest += tl.load(at, mask=mask, other=0.0)
        if EXTRA:
            tops = tl.load(at + partial_stride, mask=mask, other=-float("inf"))
            earlier = ((tile + 1) * BN)[:, None] <= y[None, :]
            above = (tops > own[None, :]) | (earlier & (tops == own[None, :]))
            beaten = beaten | (tl.max((above & mask).to(tl.int32), 0) > 0)
            top = tl.maximum(top, tops)
            rest_d += tl.load(at + 2 * partial_stride, mask=mask, other=0.0)
        if SUM:
            rest_sq += tl.load(at + 3 * partial_stride, mask=mask, other=0.0)
            plain += tl.load(at + 4 * partial_stride, mask=mask, other=0.0)
    others, supervised = tl.sum(rest, 0), y != ignore_index
    total, log_total, logp, lse, residual, entropy = numbers_of_row(
        others, tl.sum(rest_d, 0) * LN2, own * LN2, shift * LN2_HIGH
    )
    left_out = shift * LN2_LOW + residual
    whole = lse + left_out
    # Of an infinite or undefined lse nothing is left out.
    residual = tl.where(tl.abs(whole) < float("inf"), left_out - (whole - lse), 0.0)
    lse = whole
    tl.store(logps_ptr + rows, tl.where(supervised, logp, 0.0), mask=here)
    tl.store(lse_ptr + rows, tl.where(supervised, lse, 0.0), mask=here)
    tl.store(lse_residual_ptr + rows, tl.where(supervised, residual, 0.0), mask=here)
    if EXTRA:
        hit = tl.where(known, tl.where(beaten, 0.0, 1.0), (shift + tl.max(top, 0)) * LN2)
        tl.store(entropy_ptr + rows, tl.where(supervised, entropy, 0.0), mask=here)
        tl.store(is_top1_ptr + rows, tl.where(supervised, hit, 0.0), mask=here)
    if SUM:
        e_y = tl.exp2(own)
        log_sum_sq = tl.log(tl.sum(rest_sq, 0) + e_y * e_y) - 2.0 * log_total
        tl.store(log_sum_sq_ptr + rows, tl.where(supervised, log_sum_sq, 0.0), mask=here)
        tl.store(
            sum_logits_ptr + rows, tl.where(supervised, (tl.sum(plain, 0) + V * shift) * LN2, 0.0), mask=here
        )
    if WRITE:
        slope = 1.0
        if HAS_SOFTCAP:
            # What was stored carries log2(e) d z / d product; the target's is known from its logit.
            squashed = (shift + own) * LN2 / cap
            slope = gain * LOG2E * (1.0 - squashed * squashed)
            scale = -1.0 / (total * LOG2E)
        else:
            scale = -gain / total
        tl.store(row_scale_ptr + rows, tl.where(supervised, scale, 0.0), mask=here)
        entry = grad_ptr + rows.to(tl.int64) * grad_stride + y
        tl.store(entry, (-others * slope).to(grad_ptr.dtype.element_ty), mask=known)
