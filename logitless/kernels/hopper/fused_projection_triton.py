"""The product with the head whose epilogue reads the logits, so that no pass over them is left.

`fused_projection.py` says what is computed. A tile of logits stays in the accumulators, in fp32: logits are
never rounded, and only their exponentials are stored, if anything. What needs a whole row comes from a few
partial sums per row and tile, 5 to 12 KB a token, which `row_partials_triton.py` puts together.

Exponentials are powers of two, taken relative to a shift known beforehand, a whole number near log2(e) times
the target's logit: the total of a row is then about 1 or more. A row that rises more than DRIFT above it is
done again relative to its largest logit, which is among the partials; so is one whose target ties with
another logit of its tile, to learn which comes first. Its two launches are unconditional, return at once
where there is no such row and leave out tiles without one, so the host waits for nothing. The target is left
out of every sum, as in `cross_entropy_triton.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import vocabulary_arguments
from logitless.kernels.head.exponentials_triton import exp2
from logitless.kernels.head.row_partials_triton import (
    NEVER,
    TIED,
    above_shift,
    finish_kernel,
    shift_kernel,
)
from logitless.kernels.hopper.product_tiles_triton import (
    BLOCK_N,
    LAUNCH,
    TILE,
    aligned,
    described,
    group_of,
    halves_of_product,
    place_of_tile,
    programs_of,
)
from logitless.kernels.launch import OF_CHUNKS, held
from logitless.kernels.layout import check_written, dense

ROWS, TILES = 4, 128  # of a program that puts partial sums together
BLOCK_H = 1024
PARTIALS = 5  # numbers per row and tile, at most


@triton.jit
def read_half(
    acc,
    n0,
    given,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    SQUARES: tl.constexpr,
    WRITE: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Of the columns from n0 on without the target, with d = log2(e) z - shift: the sum of e = 2^d, the
    largest d, the sums of e d, of all d and of e^2; with AGAIN whether one of them comes before the target
    and equals it."""
    grad, bias_ptr, shift, own, y, m0, V, gain, squash, cap = given
    cols = (n0 + tl.arange(0, BN))[None, :]
    d, slope = above_shift(
        acc, shift[:, None], bias_ptr, cols, cols < V, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP
    )
    sum_d, plain, sum_sq = tl.zeros_like(shift), tl.zeros_like(shift), tl.zeros_like(shift)
    tied = tl.zeros_like(y)
    if SUM:
        plain = tl.sum(tl.where(cols < V, d, 0.0), 1)
    if AGAIN and EXTRA:
        tied = tl.max(((d == own[:, None]) & (cols < y[:, None])).to(tl.int32), 1)
    # Finite, so that p log p is 0 there.
    d = tl.where(cols == y[:, None], NEVER, d)
    if n0 + BN > V:
        d = tl.where(cols < V, d, NEVER)
    top = tl.max(d, 1)
    if EXTRA and HAS_BIAS:
        # The bias of an id that is ruled out is -inf.
        d = tl.maximum(d, NEVER, propagate_nan=tl.PropagateNan.ALL)
    e = exp2(d)
    if EXTRA:
        sum_d = tl.sum(e * d, 1)
    if SQUARES:
        sum_sq = tl.sum(e * e, 1)
    if WRITE:
        # Without a soft cap the slope is the same everywhere, and left to the factor of the row.
        grad.store([m0, n0], (e * slope if HAS_SOFTCAP else e).to(grad.dtype))
    return tl.sum(e, 1), top, sum_d, plain, sum_sq, tied


@triton.jit
def any_again(again_ptr, C, BLOCK: tl.constexpr):
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(again_ptr + rows, mask=rows < C, other=0))
    return tl.max(found, 0) > 0


@held
@triton.jit(**OF_CHUNKS)
def read_kernel(
    x,
    w,
    grad,
    bias_ptr,
    targets_ptr,
    shift_ptr,
    own_ptr,
    again_ptr,
    partials_ptr,
    partial_stride,
    C,
    V,
    H,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    SQUARES: tl.constexpr,
    WRITE: tl.constexpr,
    AGAIN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Partial sums of every tile and, with WRITE, exp(z - shift) times d z / d product.

    With AGAIN only of the tiles with a row that `finish_kernel` chose; the other rows in them come out as
    before. There is no branch in the epilogue that depends on the data: one costs more than the masks do.
    """
    row_tiles, col_tiles = tl.cdiv(C, BM), tl.cdiv(V, BN)
    tiles = row_tiles * col_tiles
    if AGAIN:
        tiles = tl.where(any_again(again_ptr, C, 1024), tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=not AGAIN):
        row, column = place_of_tile(tile, row_tiles, col_tiles, GROUP)
        m0, n0 = row * BM, column * BN
        rows = m0 + tl.arange(0, BM)
        here = rows < C
        wanted = True
        if AGAIN:
            wanted = tl.max(tl.load(again_ptr + rows, mask=here, other=0), 0) > 0
        if wanted:
            left, right = halves_of_product(x, w, m0, n0, H, BM, BN, BK)
            target = tl.load(targets_ptr + rows, mask=here, other=-1)
            shift = tl.load(shift_ptr + rows, mask=here, other=0.0)
            own = tl.load(own_ptr + rows, mask=here & AGAIN, other=0.0)
            given = (grad, bias_ptr, shift, own, target.to(tl.int32), m0, V, gain, squash, cap)
            total, top, sum_d, plain, sum_sq, tied = read_half(
                left, n0, given, BN // 2, HAS_BIAS, HAS_SOFTCAP, EXTRA, SUM, SQUARES, WRITE, AGAIN
            )
            total_r, top_r, sum_d_r, plain_r, sum_sq_r, tied_r = read_half(
                right, n0 + BN // 2, given, BN // 2, HAS_BIAS, HAS_SOFTCAP, EXTRA, SUM, SQUARES, WRITE, AGAIN
            )
            at = partials_ptr + column.to(tl.int64) * C + rows
            tl.store(at, total + total_r, mask=here)
            tl.store(at + partial_stride, tl.maximum(top, top_r), mask=here)
            if EXTRA:
                tl.store(at + 2 * partial_stride, sum_d + sum_d_r, mask=here)
                if AGAIN:
                    tl.store(again_ptr + rows, TIED, mask=here & ((tied > 0) | (tied_r > 0)))
            if SUM:
                tl.store(at + 3 * partial_stride, plain + plain_r, mask=here)
            if SQUARES:
                tl.store(at + (3 + SUM) * partial_stride, sum_sq + sum_sq_r, mask=here)


def row_bytes(V: int, *, stored: bool) -> int:
    return 4 * PARTIALS * -(-V // BLOCK_N) + (2 * V if stored else 0)


def read(
    features: Tensor, weight: Tensor, targets: Tensor, out, *, gradient, head, bias, ignore_index, sums
) -> Tensor | None:
    (C, H), V = features.shape, weight.shape[0]
    check_written(**dict(out.items()))
    write, extra, squares = gradient is not None, out.entropy is not None, out.log_sum_sq_probs is not None
    summed = out.sum_logits is not None and sums is not None  # not in the epilogue
    total = out.sum_logits is not None and not summed
    features, targets, tiles = aligned(features), dense(targets), -(-V // BLOCK_N)
    (bias, _), scalars, flags = vocabulary_arguments(head, bias, None, out.lse)
    gain, _, cap = scalars
    transform = {name: flags[name] for name in ("HAS_BIAS", "HAS_SOFTCAP")}
    shift, own = torch.empty_like(out.lse), torch.empty_like(out.lse)
    strides, sizes = (features.stride(0), weight.stride(0)), (V, H, *scalars)
    shift_kernel[(C,)](
        features,
        weight,
        bias,
        targets,
        shift,
        own,
        sums if summed else shift,
        out.sum_logits if summed else shift,
        *strides,
        *sizes,
        ignore_index,
        **transform,
        SUMS=summed,
        BLOCK=BLOCK_H,
        num_warps=4,
    )
    partials = out.lse.new_empty(2 + extra + total + squares, tiles, C)
    again = torch.empty(C, dtype=torch.int32, device=features.device)
    programs, grid = programs_of(features), (-(-C // ROWS),)
    found = (targets, shift, own, again, partials, partials.stride(0))
    operands = (*described(features, weight, gradient), bias, *found, C, V, H, *scalars)
    levels = {"EXTRA": extra, "SUM": total, "SQUARES": squares, "WRITE": write}
    options = transform | levels | TILE | LAUNCH | {"GROUP": group_of(features), "PROGRAMS": programs}
    row_scale = torch.empty_like(out.lse) if write else None
    results = (out.logps, out.lse, out.lse_residual, out.entropy, out.is_top1)
    results += (out.log_sum_sq_probs, out.sum_logits, row_scale)
    grad = out.lse if gradient is None else gradient
    numbers = (
        grad,
        *found[:-1],
        *(out.lse if x is None else x for x in results),
        grad.stride(0),
        partials.stride(0),
        *(C, V, tiles, ignore_index, gain, cap),
    )
    few = levels | {"HAS_SOFTCAP": flags["HAS_SOFTCAP"], "BM": TILE["BM"], "BN": BLOCK_N}
    few |= {"ROWS": ROWS, "TILES": TILES, "num_warps": 4}
    for again in (False, True):
        read_kernel[(programs,)](*operands, **options, AGAIN=again)
        finish_kernel[grid](*numbers, **few, AGAIN=again)
    return row_scale
