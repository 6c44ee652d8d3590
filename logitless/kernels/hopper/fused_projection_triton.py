"""A product with the head whose epilogue computes the statistics, so that no pass over the logits is needed.

`fused_projection.py` documents the results. The logits of a tile remain in the fp32 accumulators: they are
never rounded, and at most their exponentials are stored. The epilogue stores a few partial sums per row and
tile, 5 to 12 KB per token, which `row_partials_triton.py` merges to the statistics of the row.

Exponentials are powers of two relative to a shift, which is computed before the product: log2(e) times the
target's logit, rounded to an integer. The sum of a row is then about 1 or more. A row whose sum exceeds
2^DRIFT is recomputed relative to its largest logit, which is one of the partial results. A row whose target
equals another logit of its tile is recomputed to determine which of them comes first. The two launches of the
recomputation are unconditional, so that the host does not wait. They return at once if no row is flagged, and
skip tiles without flagged rows. All sums exclude the target, as in `cross_entropy_triton.py`.
"""

import functools
from collections.abc import Hashable
from typing import NamedTuple

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
from logitless.kernels.launch import OF_CHUNKS, BoundLaunch, cached_launch
from logitless.kernels.layout import check_written, dense

ROWS, TILES = 4, 128  # rows per program of `finish_kernel`, and tiles that it loads at a time
BLOCK_H = 1024


@triton.jit
def read_half(
    acc,
    n0,
    operands,
    BN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    SQUARES: tl.constexpr,
    WRITE: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Return partial sums over the BN columns from n0 on, without the target.

    With d = log2(e) z - shift and e = 2^d: the sum of e, the largest d, the sum of e d, the sum of d (with
    the target, and with d = -shift in columns from V on), the sum of e^2; with AGAIN also whether a column
    before the target equals the target. With WRITE, e is stored.
    """
    grad, bias_ptr, shift, target_logit, y, m0, V, gain, squash, cap = operands
    cols = (n0 + tl.arange(0, BN))[None, :]
    d, slope = above_shift(
        acc, shift[:, None], bias_ptr, cols, cols < V, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP
    )
    sum_d, logit_sum, sum_sq = tl.zeros_like(shift), tl.zeros_like(shift), tl.zeros_like(shift)
    tied = tl.zeros_like(y)
    if SUM:
        logit_sum = tl.sum(d, 1)
    if AGAIN and EXTRA:
        tied = tl.max(((d == target_logit[:, None]) & (cols < y[:, None])).to(tl.int32), 1)
    # NEVER is finite, so that p log p is 0 and not NaN.
    d = tl.where(cols == y[:, None], NEVER, d)
    if n0 + BN > V:
        d = tl.where(cols < V, d, NEVER)
    top = tl.max(d, 1)
    if EXTRA and HAS_BIAS:
        # A bias may be -inf, to exclude an id.
        d = tl.maximum(d, NEVER, propagate_nan=tl.PropagateNan.ALL)
    e = exp2(d)
    if EXTRA:
        sum_d = tl.sum(e * d, 1)
    if SQUARES:
        sum_sq = tl.sum(e * e, 1)
    if WRITE:
        # Without a softcap, the slope is constant, and is included in the row factor.
        grad.store([m0, n0], (e * slope if HAS_SOFTCAP else e).to(grad.dtype))
    return tl.sum(e, 1), top, sum_d, logit_sum, sum_sq, tied


@triton.jit
def any_again(again_ptr, C, BLOCK: tl.constexpr):
    flags = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        flags = tl.maximum(flags, tl.load(again_ptr + rows, mask=rows < C, other=0))
    return tl.max(flags, 0) > 0


@cached_launch
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
    """Store the partial sums of every tile and, with WRITE, exp(z - shift) times d z / d product.

    With AGAIN, only tiles with a row that `finish_kernel` flagged are recomputed; their other rows get the
    same values as before. The epilogue has no data-dependent branches, because they would take more time than
    masks.
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
            target_logit = tl.load(own_ptr + rows, mask=here & AGAIN, other=0.0)
            operands = (grad, bias_ptr, shift, target_logit, target.to(tl.int32), m0, V, gain, squash, cap)
            total, top, sum_d, logit_sum, sum_sq, tied = read_half(
                left, n0, operands, BN // 2, HAS_BIAS, HAS_SOFTCAP, EXTRA, SUM, SQUARES, WRITE, AGAIN
            )
            total_r, top_r, sum_d_r, logit_sum_r, sum_sq_r, tied_r = read_half(
                right,
                n0 + BN // 2,
                operands,
                BN // 2,
                HAS_BIAS,
                HAS_SOFTCAP,
                EXTRA,
                SUM,
                SQUARES,
                WRITE,
                AGAIN,
            )
            at = partials_ptr + column.to(tl.int64) * C + rows
            tl.store(at, total + total_r, mask=here)
            tl.store(at + partial_stride, tl.maximum(top, top_r), mask=here)
            if EXTRA:
                tl.store(at + 2 * partial_stride, sum_d + sum_d_r, mask=here)
                if AGAIN:
                    tl.store(again_ptr + rows, TIED, mask=here & ((tied > 0) | (tied_r > 0)))
            if SUM:
                tl.store(at + 3 * partial_stride, logit_sum + logit_sum_r, mask=here)
            if SQUARES:
                tl.store(at + (3 + SUM) * partial_stride, sum_sq + sum_sq_r, mask=here)


class Launches(NamedTuple):
    """The kernels of `read` with their constants."""

    shift: BoundLaunch
    read: BoundLaunch
    finish: BoundLaunch
    read_again: BoundLaunch
    finish_again: BoundLaunch


@functools.lru_cache(maxsize=1024)
def _launches(
    flags: tuple[bool, ...],
    group: int,
    programs: int,
    *others: Hashable,  # on which Triton specializes the kernels
) -> Launches:
    bias, softcap, summed, extra, total, squares, write = flags
    transform = {"HAS_BIAS": bias, "HAS_SOFTCAP": softcap}
    levels = {"EXTRA": extra, "SUM": total, "SQUARES": squares, "WRITE": write}
    product = transform | levels | TILE | LAUNCH | {"GROUP": group, "PROGRAMS": programs}
    rows = levels | {"HAS_SOFTCAP": softcap, "BM": TILE["BM"], "BN": BLOCK_N}
    rows |= {"ROWS": ROWS, "TILES": TILES, "num_warps": 4}
    return Launches(
        BoundLaunch(shift_kernel, **transform, SUMS=summed, BLOCK=BLOCK_H, num_warps=4),
        BoundLaunch(read_kernel, **product, AGAIN=False),
        BoundLaunch(finish_kernel, **rows, AGAIN=False),
        BoundLaunch(read_kernel, **product, AGAIN=True),
        BoundLaunch(finish_kernel, **rows, AGAIN=True),
    )


def read(
    features: Tensor, weight: Tensor, targets: Tensor, out, *, gradient, transform, bias, ignore_index, sums
) -> Tensor | None:
    C, H = features.shape
    V = weight.shape[0]
    check_written(**dict(out.items()))
    write = gradient is not None
    extra = out.entropy is not None
    squares = out.log_sum_sq_probs is not None
    summed = out.sum_logits is not None and sums is not None  # not in the epilogue
    total = out.sum_logits is not None and not summed
    features = aligned(features)
    targets = dense(targets)
    tiles = -(-V // BLOCK_N)
    (bias, _), scalars, flags = vocabulary_arguments(transform, bias, None, out.lse)
    gain, _, cap = scalars
    shift, target_logit = torch.empty_like(out.lse), torch.empty_like(out.lse)
    partials = out.lse.new_empty(2 + extra + total + squares, tiles, C)
    again = torch.empty(C, dtype=torch.int32, device=features.device)
    row_scale = torch.empty_like(out.lse) if write else out.lse
    gradient_of_finish = out.lse if gradient is None else gradient
    programs = programs_of(features)
    strides = features.stride(0), weight.stride(0), gradient_of_finish.stride(0)
    partial_stride = partials.stride(0)
    launches = _launches(
        (flags["HAS_BIAS"], flags["HAS_SOFTCAP"], summed, extra, total, squares, write),
        group_of(features),
        programs,
        (V, H, *strides, ignore_index, partial_stride < 2**31, targets.dtype, features.dtype, weight.dtype),
        *[x is None or x.data_ptr() & 15 == 0 for x in (weight, bias, sums, gradient_of_finish)],
    )
    row_arguments = (targets, shift, target_logit, again, partials)
    sizes = (V, H, *scalars)
    launches.shift(
        (C,),
        features,
        weight,
        bias,
        targets,
        shift,
        target_logit,
        sums if summed else shift,
        out.sum_logits if summed else shift,
        *strides[:2],
        *sizes,
        ignore_index,
    )
    operands = (*described(features, weight, gradient), bias, *row_arguments, partial_stride, C, *sizes)
    statistics = (
        gradient_of_finish,
        *row_arguments,
        *out.pointers(),
        row_scale,
        strides[2],
        partial_stride,
        *(C, V, tiles, ignore_index, gain, cap),
    )
    grid = (-(-C // ROWS),)
    launches.read((programs,), *operands)
    launches.finish(grid, *statistics)
    # They return at once if no row is flagged.
    launches.read_again((programs,), *operands)
    launches.finish_again(grid, *statistics)
    return row_scale if write else None
