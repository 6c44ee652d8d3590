"""Triton kernel of `shards.py`. The statistics of each rank are read up to three times, from L1."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import complement, left_out_of_log, log1p
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_written, dense

BLOCK, WARPS = 128, 4


@triton.jit
def of_softmax(at, C, here):
    """Load log p(target), log-sum-exp and its residual of a shard."""
    logp = tl.load(at, mask=here, other=-float("inf"))
    lse = tl.load(at + C, mask=here, other=0.0)
    residual = tl.load(at + 2 * C, mask=here, other=0.0)
    return logp, lse, tl.where(tl.abs(lse) < float("inf"), residual, 0.0)


@cached_launch
@triton.jit(**OF_CHUNKS)
def merge_kernel(
    shards_ptr,
    columns_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    entropy_ptr,
    is_top1_ptr,
    sum_logits_ptr,
    log_sum_sq_ptr,
    factor_ptr,
    result_ptr,
    grad_ptr,
    grad_stride,
    C,
    V,
    rank,
    ranks,
    ignore_index,
    gain,
    uncap,
    tie,
    least_share,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
    SQUARES: tl.constexpr,
    WRITE: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = rows < C
    column = tl.load(columns_ptr + rows, mask=here, other=ignore_index)
    supervised = column != ignore_index

    top, z_y = tl.full([BLOCK], -float("inf"), tl.float32), tl.full([BLOCK], -float("inf"), tl.float32)
    owner = tl.full([BLOCK], 0, tl.int32)
    for r in range(ranks):
        logp, lse_r, residual_r = of_softmax(shards_ptr + r * STATISTICS * C + rows, C, here)
        top = tl.maximum(top, lse_r)
        owner = tl.where((logp > -float("inf")) & (z_y == -float("inf")), r, owner)
        z_y = tl.maximum(z_y, logp + lse_r + residual_r)

    whole, others = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    own_share = whole
    for r in range(ranks):
        logp, lse_r, residual_r = of_softmax(shards_ptr + r * STATISTICS * C + rows, C, here)
        share = tl.exp(lse_r - top + residual_r)
        whole += share
        own_share = tl.where(r == rank, share, own_share)
        # All sums exclude the target, so that 1 - p of a confident token is accurate.
        others += tl.where(logp > -float("inf"), -complement(-logp), tl.exp(lse_r - z_y + residual_r))

    log_whole = tl.log(whole)
    log_whole += left_out_of_log(whole, log_whole)
    lse = top + log_whole
    residual = tl.where(tl.abs(lse) < float("inf"), (top - lse) + log_whole, 0.0)
    logp = tl.where(z_y - lse > -0.5, -log1p(others), (z_y - top) - log_whole)
    logp = tl.where(supervised, logp, 0.0)
    lse = tl.where(supervised, lse, 0.0)
    tl.store(logps_ptr + rows, logp, mask=here)
    tl.store(lse_ptr + rows, lse, mask=here)
    tl.store(lse_residual_ptr + rows, tl.where(supervised, residual, 0.0), mask=here)

    if EXTRA:
        entropy, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        beaten = here & False
        most = tl.full([BLOCK], -float("inf"), tl.float32)
        squares = total
        slack = tie * (1.0 + tl.abs(lse))
        for r in range(ranks):
            at = shards_ptr + r * STATISTICS * C + rows
            logp_r, lse_r, residual_r = of_softmax(at, C, here)
            log_share = lse_r - top + residual_r - log_whole
            share = tl.exp(log_share)
            # The statistics are in the order of `TokenBuffers`. Entropy is the fourth.
            inner = tl.load(at + 3 * C, mask=here, other=0.0)
            entropy += tl.where(share > 0.0, share * (inner - log_share), 0.0)
            # In a shard without the target, this is the largest logit. Among equal logits, the first one is
            # the arg-max.
            hit = tl.load(at + 4 * C, mask=here, other=0.0)
            above = tl.where(r < owner, hit >= z_y - slack, hit > z_y + slack)
            beaten = beaten | tl.where(logp_r > -float("inf"), hit <= 0.0, above)
            if SUM:
                total += tl.load(at + 5 * C, mask=here, other=0.0)
            if SQUARES:
                # If all p of a shard are 0, the logarithm is -inf and does not contribute to the sum.
                square = 2.0 * log_share + tl.load(at + 6 * C, mask=here, other=-float("inf"))
                higher = tl.maximum(most, square)
                above_most = tl.where(most > -float("inf"), tl.exp(most - higher), 0.0)
                squares = squares * above_most + tl.where(
                    square > -float("inf"), tl.exp(square - higher), 0.0
                )
                most = higher
        tl.store(entropy_ptr + rows, tl.where(supervised, entropy, 0.0), mask=here)
        tl.store(is_top1_ptr + rows, tl.where(supervised & (beaten == 0), 1.0, 0.0), mask=here)
        if SUM:
            tl.store(sum_logits_ptr + rows, tl.where(supervised, total, 0.0), mask=here)
        if SQUARES:
            tl.store(log_sum_sq_ptr + rows, tl.where(supervised, most + tl.log(squares), 0.0), mask=here)

    if WRITE:
        share = tl.maximum(own_share / whole, least_share)
        factor = tl.load(factor_ptr + rows, mask=here, other=1.0) * share
        tl.store(result_ptr + rows, factor, mask=here)
        slope = gain
        if HAS_SOFTCAP:
            squashed = (logp + lse) * uncap
            slope = gain * (1.0 - squashed * squashed)
        entry = complement(logp) / factor * slope
        mine = here & supervised & (column >= 0) & (column < V)
        target = grad_ptr + rows.to(tl.int64) * grad_stride + column
        tl.store(target, entry.to(grad_ptr.dtype.element_ty), mask=mine)


def merge_stats(
    shards: Tensor,
    columns: Tensor,
    out,
    rank: int,
    ignore_index: int,
    *,
    tie: float,
    least_share: float,
    gradient=None,
    factor=None,
    transform=None,
) -> Tensor | None:
    check_written(**dict(out.items()))
    ranks, statistics, C = shards.shape
    write = gradient is not None
    softcap = transform.softcap if write else None
    result = torch.empty_like(out.lse) if write else out.lse
    merge_kernel[(triton.cdiv(C, BLOCK),)](
        dense(shards),
        dense(columns),
        *out.pointers(),
        dense(factor) if write else out.lse,
        result,
        gradient if write else out.lse,
        gradient.stride(0) if write else 0,
        C,
        gradient.shape[1] if write else 0,
        rank,
        ranks,
        ignore_index,
        transform.logit_scale / transform.temperature if write else 1.0,
        transform.temperature / softcap if softcap is not None else 1.0,
        tie,
        least_share,
        HAS_SOFTCAP=softcap is not None,
        **out.flags(),
        WRITE=write,
        STATISTICS=statistics,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return result if write else None
