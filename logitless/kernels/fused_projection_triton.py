"""The product with the head whose epilogue reads the logits, so that no pass over them is left.

`fused_projection.py` says what is computed. A tile of logits stays in the accumulators, in fp32: logits are
never rounded, and only their exponentials are stored, if anything. What needs a whole row comes from a few
partial sums per row and tile, 5 to 12 KB a token, which `row_partials_triton.py` puts together.

Exponentials are powers of two, taken relative to a shift known beforehand, a whole number near log2(e) times
the target's logit: the total of a row is then about 1 or more. A row that rises more than DRIFT above it is
done again relative to its largest logit, which is among the partials; that launch is unconditional, and tiles
without such a row are left out, so the host waits for nothing. The target is left out of every sum, as in
`cross_entropy_triton.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.cross_entropy_triton import head_logits, vocabulary_arguments
from logitless.kernels.layout import check_written, dense
from logitless.kernels.product_tiles_triton import (
    BLOCK_N,
    LAUNCH,
    TILE,
    aligned,
    described,
    halves_of_product,
    programs_of,
)
from logitless.kernels.row_partials_triton import LOG2E, again_kernel, finish_kernel, shift_kernel

ROWS, TILES = 16, 64  # of a program that puts partial sums together
BLOCK_H = 1024
PARTIALS = (2, 3, 5)  # numbers per row and tile, by the level of statistics


@triton.jit
def read_half(
    acc,
    n0,
    y,
    ignored,
    V,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    WRITE: tl.constexpr,
    MASKED: tl.constexpr,
    grad,
    bias_ptr,
    shift,
    m0,
    gain,
    squash,
    cap,
):
    """Of the columns from n0 on without the target, with d = log2(e) z - shift: the sum of e = 2^d, the
    largest d, the sums of e d, of e^2 and of all d; the target's own d, and whether another of these logits
    comes before it. Without MASKED no column is a target or beyond V, and no row is ignored."""
    cols = (n0 + tl.arange(0, BN))[None, :]
    z, slope = head_logits(
        acc, bias_ptr, cols, cols < V, gain * LOG2E, squash, cap * LOG2E, HAS_BIAS, HAS_SOFTCAP
    )
    d = z - shift[:, None]
    own = tl.zeros_like(shift)
    beaten, sum_d, sum_sq, plain = own, own, own, own
    if SUM:
        plain = tl.sum(tl.where(cols < V, d, 0.0) if MASKED else d, 1)
    if MASKED:
        is_target = cols == y[:, None]
        own = tl.sum(tl.where(is_target, d, 0.0), 1)
        d = tl.where(is_target | (cols >= V), -float("inf"), d)
        if EXTRA:
            # The first of equal logits wins.
            first = (d > own[:, None]) | ((d == own[:, None]) & (cols < y[:, None]))
            beaten = tl.max(first.to(tl.float32), 1)
    top = tl.max(d, 1)
    if EXTRA:
        # So that p log p is 0 and not NaN at a logit of -inf; 2^-300 is 0 in fp32.
        d = tl.maximum(d, -300.0, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(d)
    if MASKED:
        e = tl.where(ignored[:, None], 0.0, e)
    if EXTRA:
        sum_d = tl.sum(e * d, 1)
    if SUM:
        sum_sq = tl.sum(e * e, 1)
    if WRITE:
        # Without a soft cap the slope is the same everywhere, and left to the factor of the row.
        grad.store([m0, n0], (e * slope if HAS_SOFTCAP else e).to(grad.dtype))
    return tl.sum(e, 1), top, sum_d, sum_sq, plain, own, beaten


@triton.jit
def read_either_half(
    acc,
    n0,
    y,
    ignored,
    V,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    WRITE: tl.constexpr,
    given,
):
    """One half in ten holds a target of its rows; the others are spared the masks."""
    special = ignored | ((y >= n0) & (y < n0 + BN))
    if (n0 + BN > V) | (tl.max(special.to(tl.int32), 0) > 0):
        found = read_half(acc, n0, y, ignored, V, BN, HAS_BIAS, HAS_SOFTCAP, EXTRA, SUM, WRITE, True, *given)
    else:
        found = read_half(acc, n0, y, ignored, V, BN, HAS_BIAS, HAS_SOFTCAP, EXTRA, SUM, WRITE, False, *given)
    return found


@triton.jit
def read_kernel(
    x,
    w,
    grad,
    bias_ptr,
    targets_ptr,
    shift_ptr,
    again_ptr,
    own_ptr,
    beaten_ptr,
    partials_ptr,
    partial_stride,
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
    SUM: tl.constexpr,
    WRITE: tl.constexpr,
    AGAIN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Partial sums of every tile and, with WRITE, exp(z - shift) times d z / d product.

    With AGAIN only of the tiles with a row that rose too far above its shift, relative to the new one; the
    other rows in them come out as before.
    """
    row_tiles = tl.cdiv(C, BM)
    tiles = row_tiles * tl.cdiv(V, BN)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=not AGAIN):
        # Row tiles run fastest: x stays in L2, and w is read once.
        m0, n0 = (tile % row_tiles) * BM, (tile // row_tiles) * BN
        rows = m0 + tl.arange(0, BM)
        here = rows < C
        wanted = True
        if AGAIN:
            wanted = tl.max(tl.load(again_ptr + rows, mask=here, other=0), 0) > 0
        if wanted:
            left, right = halves_of_product(x, w, m0, n0, H, BM, BN, BK)
            y = tl.load(targets_ptr + rows, mask=here, other=0)
            shift = tl.load(shift_ptr + rows, mask=here, other=0.0)
            ignored = y == ignore_index
            given = (grad, bias_ptr, shift, m0, gain, squash, cap)
            total, top, sum_d, sum_sq, plain, own, beaten = read_either_half(
                left, n0, y, ignored, V, BN // 2, HAS_BIAS, HAS_SOFTCAP, EXTRA, SUM, WRITE, given
            )
            total_r, top_r, sum_d_r, sum_sq_r, plain_r, own_r, beaten_r = read_either_half(
                right, n0 + BN // 2, y, ignored, V, BN // 2, HAS_BIAS, HAS_SOFTCAP, EXTRA, SUM, WRITE, given
            )
            has_own, at_right = here & (y >= n0) & (y < n0 + BN) & (y < V), y >= n0 + BN // 2
            own = tl.where(at_right, own_r, own)
            tl.store(own_ptr + rows, own, mask=has_own)
            at = partials_ptr + (tile // row_tiles).to(tl.int64) * C + rows
            tl.store(at, total + total_r, mask=here)
            tl.store(at + partial_stride, tl.maximum(top, top_r), mask=here)
            if EXTRA:
                beaten = tl.where(at_right, (top >= own) | (beaten_r > 0), (top_r > own) | (beaten > 0))
                tl.store(beaten_ptr + rows, beaten.to(tl.float32), mask=has_own)
                tl.store(at + 2 * partial_stride, sum_d + sum_d_r, mask=here)
            if SUM:
                tl.store(at + 3 * partial_stride, sum_sq + sum_sq_r, mask=here)
                tl.store(at + 4 * partial_stride, plain + plain_r, mask=here)


def read(
    features: Tensor, weight: Tensor, targets: Tensor, out, *, gradient, head, bias, ignore_index
) -> Tensor | None:
    (C, H), V = features.shape, weight.shape[0]
    check_written(**dict(out.items()))
    write, extra, total = gradient is not None, out.entropy is not None, out.sum_logits is not None
    features, targets, tiles = aligned(features), dense(targets), triton.cdiv(V, BLOCK_N)
    (bias, _), scalars, flags = vocabulary_arguments(head, bias, None, out.lse)
    gain, _, cap = scalars
    transform = {name: flags[name] for name in ("HAS_BIAS", "HAS_SOFTCAP")}
    shift, own, beaten = out.lse.new_empty(3, C).unbind(0)
    strides, sizes = (features.stride(0), weight.stride(0)), (V, H, *scalars)
    shift_kernel[(C,)](
        features, weight, bias, targets, shift, *strides, *sizes, **transform, BLOCK=BLOCK_H, num_warps=4
    )
    partials = out.lse.new_empty(PARTIALS[extra + total], tiles, C)
    again = torch.empty(C, dtype=torch.int32, device=features.device)
    programs, rows = programs_of(features), (triton.cdiv(C, ROWS),)
    operands = (*described(features, weight, gradient), bias, targets, shift, again)
    found = (own, beaten, partials)
    numbers = (partials.stride(0), C, *sizes[:2], ignore_index, *scalars)
    options = {
        **transform,
        "EXTRA": extra,
        "SUM": total,
        "WRITE": write,
        **TILE,
        **LAUNCH,
        "PROGRAMS": programs,
    }
    read_kernel[(programs,)](*operands, *found, *numbers, **options, AGAIN=False)
    few = {"ROWS": ROWS, "TILES": TILES, "num_warps": 4}
    again_kernel[rows](
        targets, shift, again, own, partials, partials.stride(0), C, V, tiles, ignore_index, **few
    )
    read_kernel[(programs,)](*operands, *found, *numbers, **options, AGAIN=True)
    row_scale = torch.empty_like(out.lse) if write else None
    results = (out.logps, out.lse, out.lse_residual, out.entropy, out.is_top1)
    results += (out.log_sum_sq_probs, out.sum_logits, row_scale)
    grad = out.lse if gradient is None else gradient
    finish_kernel[rows](
        grad,
        targets,
        shift,
        *found,
        *(out.lse if x is None else x for x in results),
        grad.stride(0),
        partials.stride(0),
        *(C, V, tiles, ignore_index, gain, cap),
        HAS_SOFTCAP=flags["HAS_SOFTCAP"],
        EXTRA=extra,
        SUM=total,
        WRITE=write,
        BN=BLOCK_N,
        **few,
    )
    return row_scale
