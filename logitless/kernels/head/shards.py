"""Merge the per-token statistics of all shards of a vocabulary to those of the whole vocabulary.

    merge_stats      merge the statistics
    merge_gradient   merge the statistics, and convert the result of `logprob_gradient` to that of the whole
                     vocabulary

`parallel/vocabulary.py` has the formulas of lse, log p and entropy. With w_r, the probability of shard r, as
there:

    sum_logits = sum_r sum_logits_r
    log_sum_sq_probs = log sum_r w_r^2 exp(log_sum_sq_probs_r)
    is_top1 = 1 if the target is the first of the largest logits of its shard, the largest logit of every
              earlier shard is smaller than the target's, and that of every later shard is not larger

Every rank computes the same result. There are up to seven statistics per token. On a GPU, one kernel replaces
about fifty PyTorch launches between two products.
"""

import math

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import TokenBuffers, stat_names
from logitless.kernels.head.transform import LogitTransform

# Logits of different shards count as equal if they differ by at most this many rounding errors of lse.
TIE = 4
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
    head: LogitTransform,
) -> Tensor:
    """`merge_stats` for the result of `logprob_gradient`. Also sets the target's entry of `gradient`.

    Returns:
        row factor (C,): in the whole vocabulary, d log p(target) / d logits = factor[:, None] * gradient.
    """
    if _has_kernel(shards, out):
        from logitless.kernels.head import shards_triton

        options = {"gradient": gradient, "factor": factor, "head": head}
        return shards_triton.merge_stats(shards, columns, out, rank, ignore_index, **LIMITS, **options)
    share = _merge_twin(shards, columns, out, rank, ignore_index)
    factor = factor * share.clamp(min=LEAST_LOG_SHARE).exp()
    has_target = (columns >= 0) & (columns < gradient.shape[1]) & (columns != ignore_index)
    at = torch.where(has_target, columns, 0)[:, None]
    slope = head.derivative_at(out.logps + out.lse)
    entry = (-torch.expm1(out.logps) / factor * slope)[:, None].to(gradient.dtype)
    gradient.scatter_(1, at, torch.where(has_target[:, None], entry, gradient.gather(1, at)))
    return factor


def _has_kernel(shards: Tensor, out: TokenBuffers) -> bool:
    names = tuple(name for name, _ in out.items())
    return uses_triton(shards.device, shards.dtype) and names == stat_names(names)


def _merge_twin(shards: Tensor, columns: Tensor, out: TokenBuffers, rank: int, ignore_index: int) -> Tensor:
    """Write the statistics to `out`, and return the log-probability (C,) of this rank's shard."""
    stats = dict(zip((name for name, _ in out.items()), shards.unbind(1), strict=True))
    lse_r, logps_r = stats["lse"], stats["logps"]
    residual_r = torch.where(lse_r.isfinite(), stats["lse_residual"], 0.0)
    top = lse_r.amax(0)
    shares = (lse_r - top + residual_r).exp()
    whole = shares.sum(0)
    shares = shares / whole
    log_whole = whole.log()
    lse = top + log_whole
    combined = {"lse": lse, "lse_residual": torch.where(lse.isfinite(), (top - lse) + log_whole, 0.0)}

    z_y = (logps_r + lse_r + residual_r).amax(0)
    owner = logps_r > -torch.inf
    # All sums exclude the target, so that 1 - p of a confident token is accurate.
    others = torch.where(owner, torch.expm1(-logps_r), (lse_r - z_y + residual_r).exp()).sum(0)
    combined["logps"] = torch.where(z_y - lse > -0.5, -torch.log1p(others), (z_y - top) - log_whole)
    if "entropy" in stats:
        combined["entropy"] = (shares * stats["entropy"] - torch.xlogy(shares, shares)).sum(0)
        # Among equal logits, the first one is the arg-max.
        slack = TIE * torch.finfo(lse.dtype).eps * (1 + lse.abs())
        ranks = torch.arange(len(shards), device=lse.device)[:, None]
        earlier = ranks < owner.long().argmax(0)
        beaten = torch.where(earlier, stats["is_top1"] >= z_y - slack, stats["is_top1"] > z_y + slack)
        combined["is_top1"] = torch.where(owner, stats["is_top1"] > 0, ~beaten).all(0).to(lse.dtype)
    if "sum_logits" in stats:
        combined["sum_logits"] = stats["sum_logits"].sum(0)
    if "log_sum_sq_probs" in stats:
        # For a shard in which all p are 0, the logarithm is -inf, which does not contribute to the sum.
        combined["log_sum_sq_probs"] = (2 * shares.log() + stats["log_sum_sq_probs"]).logsumexp(0)
    for name, x in combined.items():
        getattr(out, name).copy_(torch.where(columns == ignore_index, 0.0, x))
    return shares[rank].log()
