"""Merge the per-token statistics of all shards of a vocabulary to those of the whole vocabulary.

    merge_stats      merge the statistics
    merge_gradient   merge the statistics, and convert the result of `logprob_gradient` to that of the whole
                     vocabulary

`statistics.py` has the formulas. Every rank computes the same result. On a GPU, one kernel replaces about
fifty PyTorch launches between two products.
"""

import math

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import TokenBuffers, stat_names
from logitless.kernels.head.statistics import STATISTICS, TIE, MergedSoftmax
from logitless.kernels.head.transform import LogitTransform

# Lower bound of the log-probability of a shard. The gradient in a shard with a smaller probability is
# negligible. Without the bound, the target's entry, which is divided by the probability of the shard, would
# overflow.
LEAST_LOG_SHARE = -40.0
# Both limits as arguments of the kernel, which computes in fp32.
LIMITS = {"tie": TIE * torch.finfo(torch.float32).eps, "least_share": math.exp(LEAST_LOG_SHARE)}


def merge_stats(shards: Tensor, columns: Tensor, out: TokenBuffers, *, rank: int, ignore_index: int) -> None:
    """Write the statistics of the whole vocabulary to `out`; zeros in ignored rows.

    Args:
        shards: (ranks, statistics, C), the statistics of every rank in the order of the fields of `out`. In a
            shard without the target, logps is -inf and is_top1 is the largest logit.
        columns: (C,) targets as columns of this rank's shard.
        out: (C,) each, written.
        rank: this rank's index in `shards`.
        ignore_index: the value in `columns` of an ignored target.
    """
    if _has_kernel(shards, out):
        from logitless.kernels.head import shards_triton

        shards_triton.merge_stats(shards, columns, out, rank, ignore_index, **LIMITS)
    else:
        _merge_twin(shards, columns, out, rank, ignore_index)


def merge_gradient(
    shards: Tensor,
    columns: Tensor,
    out: TokenBuffers,
    *,
    rank: int,
    ignore_index: int,
    gradient: Tensor,  # (C, columns) d log p(target) / d logits within the shard, up to the row factor
    factor: Tensor,  # (C,) row factor
    transform: LogitTransform,
) -> Tensor:
    """`merge_stats` for the result of `logprob_gradient`. Also sets the target's entry of `gradient`.

    Returns:
        row factor (C,): in the whole vocabulary, d log p(target) / d logits = factor[:, None] * gradient.
    """
    if _has_kernel(shards, out):
        from logitless.kernels.head import shards_triton

        options = {"gradient": gradient, "factor": factor, "transform": transform}
        return shards_triton.merge_stats(shards, columns, out, rank, ignore_index, **LIMITS, **options)
    share = _merge_twin(shards, columns, out, rank, ignore_index)
    factor = factor * share.clamp(min=LEAST_LOG_SHARE).exp()
    has_target = (columns >= 0) & (columns < gradient.shape[1]) & (columns != ignore_index)
    at = torch.where(has_target, columns, 0)[:, None]
    slope = transform.derivative_at(out.logps + out.lse)
    entry = (-torch.expm1(out.logps) / factor * slope)[:, None].to(gradient.dtype)
    gradient.scatter_(1, at, torch.where(has_target[:, None], entry, gradient.gather(1, at)))
    return factor


def _has_kernel(shards: Tensor, out: TokenBuffers) -> bool:
    names = tuple(name for name, _ in out.items())
    return uses_triton(shards.device, shards.dtype) and names == stat_names(names)


def _merge_twin(shards: Tensor, columns: Tensor, out: TokenBuffers, rank: int, ignore_index: int) -> Tensor:
    """Write the statistics to `out`, and return the log-probability (C,) of this rank's shard."""
    buffers = out.items()
    stats = dict(zip((name for name, _ in buffers), shards.unbind(1), strict=True))
    softmax = _merge_softmax(stats["logps"], stats["lse"], stats["lse_residual"])
    merges = {statistic.name: statistic.merge for statistic in STATISTICS}
    for name, buffer in buffers:
        buffer.copy_(torch.where(columns == ignore_index, 0.0, merges[name](softmax, stats[name])))
    return softmax.shares[rank].log()


def _merge_softmax(logps: Tensor, lse: Tensor, residual: Tensor) -> MergedSoftmax:
    """The softmax of the whole vocabulary, from the statistics (R, C) of the shards."""
    residual = torch.where(lse.isfinite(), residual, 0.0)
    top = lse.amax(0)
    shares = (lse - top + residual).exp()
    whole = shares.sum(0)
    log_whole = whole.log()
    merged = top + log_whole

    z_y = (logps + lse + residual).amax(0)
    has_target = logps > -torch.inf
    # All sums exclude the target, so that 1 - p of a confident token is accurate.
    others = torch.where(has_target, torch.expm1(-logps), (lse - z_y + residual).exp()).sum(0)
    return MergedSoftmax(
        logps=torch.where(z_y - merged > -0.5, -torch.log1p(others), (z_y - top) - log_whole),
        lse=merged,
        lse_residual=torch.where(merged.isfinite(), (top - merged) + log_whole, 0.0),
        shares=shares / whole,
        target_logit=z_y,
        has_target=has_target,
    )
