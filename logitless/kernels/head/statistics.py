"""`STATISTICS`: the per-token statistics of the logits.

The order of `STATISTICS` is the order of the pointers of all kernels, and of the statistics that the ranks of
a sharded vocabulary gather. `cross_entropy.TokenBuffers`, the merge of the shards, the readers and the oracle
of `logitless.check` read this table; kernels and twins have lines of their own for each statistic.
tests/kernels/head/test_statistics.py compares them, and the table of docs/design.md, with it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Logits of different shards count as equal if they differ by at most this many rounding errors of lse.
TIE = 4


class MergedSoftmax(NamedTuple):
    """The softmax over the whole vocabulary, from the statistics of R shards."""

    logps: Tensor  # (C,)
    lse: Tensor  # (C,)
    lse_residual: Tensor  # (C,)
    shares: Tensor  # (R, C) probability of each shard, w_r
    target_logit: Tensor  # (C,)
    has_target: Tensor  # (R, C) whether the target is in the shard


class Statistic(NamedTuple):
    """A per-token statistic of the logits z of a row, with p = softmax(z) and the target y.

    Attributes:
        name: the attribute of `TokenStats` and of `TokenBuffers`.
        level: requesting a statistic computes all statistics of its level and of the lower levels.
        definition: the formula.
        derivative: the formula of d statistic / d z; "" for a statistic that is a constant of the loss.
        merged: the formula of the statistic over the shards r of a sharded vocabulary, w_r the probability of
            shard r.
        compute: (z (n, V), log p (n, V), targets (n,), weights of the logits (V,) or None) -> (n,), by the
            definition.
        merge: (the softmax, the statistic of each shard (R, C)) -> the statistic (C,).
    """

    name: str
    level: int
    definition: str
    derivative: str
    merged: str
    compute: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    merge: Callable[[MergedSoftmax, Tensor], Tensor]


def _merge_is_top1(softmax: MergedSoftmax, is_top1: Tensor) -> Tensor:
    # Among equal logits, the first one is the arg-max.
    lse = softmax.lse
    z_y = softmax.target_logit
    slack = TIE * torch.finfo(lse.dtype).eps * (1 + lse.abs())
    ranks = torch.arange(len(is_top1), device=lse.device)[:, None]
    earlier = ranks < softmax.has_target.long().argmax(0)
    beaten = torch.where(earlier, is_top1 >= z_y - slack, is_top1 > z_y + slack)
    return torch.where(softmax.has_target, is_top1 > 0, ~beaten).all(0).to(lse.dtype)


STATISTICS = (
    Statistic(
        name="logps",
        level=1,
        definition="log p_y",
        derivative="onehot(y) - p",
        merged="log p_y,r + log w_r, r the shard of y",
        compute=lambda z, log_p, y, weights: log_p.gather(1, y[:, None])[:, 0],
        merge=lambda softmax, logps: softmax.logps,
    ),
    Statistic(
        name="lse",
        level=1,
        definition="log sum_v exp(z_v)",
        derivative="p",
        merged="log sum_r exp(lse_r)",
        compute=lambda z, log_p, y, weights: z.logsumexp(1),
        merge=lambda softmax, lse: softmax.lse,
    ),
    # exp((z - lse) - lse_residual) is accurate even if lse is large.
    Statistic(
        name="lse_residual",
        level=1,
        definition="rounding error of lse",
        derivative="",
        merged="rounding error of lse",
        compute=lambda z, log_p, y, weights: z.new_zeros(z.shape[0]),
        merge=lambda softmax, residual: softmax.lse_residual,
    ),
    Statistic(
        name="entropy",
        level=2,
        definition="-sum_v p_v log p_v",
        derivative="-p (log p + entropy)",
        merged="sum_r w_r (entropy_r - log w_r)",
        # p log p is 0 at p = 0, where log p is -inf.
        compute=lambda z, log_p, y, weights: (
            -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(1)
        ),
        merge=lambda softmax, x: (softmax.shares * x - torch.xlogy(softmax.shares, softmax.shares)).sum(0),
    ),
    # In a shard without the target, the kernels store the shard's largest logit instead.
    Statistic(
        name="is_top1",
        level=2,
        definition="1 if y is the first of the largest logits, else 0",
        derivative="",
        merged="1 if it is 1 in the shard of y, and the largest logit is < z_y in all earlier shards and "
        "<= z_y in all later shards",
        compute=lambda z, log_p, y, weights: (z.argmax(1) == y).to(z.dtype),
        merge=_merge_is_top1,
    ),
    Statistic(
        name="sum_logits",
        level=3,
        definition="sum_v c_v z_v, c the class weights",
        derivative="c",
        merged="sum_r sum_logits_r",
        compute=lambda z, log_p, y, weights: z.sum(1) if weights is None else z @ weights.to(z.dtype),
        merge=lambda softmax, x: x.sum(0),
    ),
    # For a shard in which all p are 0, the logarithm is -inf, which does not contribute to the sum.
    Statistic(
        name="log_sum_sq_probs",
        level=4,
        definition="log sum_v p_v^2",
        derivative="",
        merged="log sum_r w_r^2 exp(log_sum_sq_probs_r)",
        compute=lambda z, log_p, y, weights: (2 * log_p).logsumexp(1),
        merge=lambda softmax, x: (2 * softmax.shares.log() + x).logsumexp(0),
    ),
)
NAMES = tuple(statistic.name for statistic in STATISTICS)
# Statistics that `cross_entropy.logits_gradient` differentiates.
DIFFERENTIABLE = tuple(statistic.name for statistic in STATISTICS if statistic.derivative)
# Constexpr of the kernels -> the first statistic of the level that it switches on. The first level is always
# computed.
FLAGS = {"EXTRA": "entropy", "SUM": "sum_logits", "SQUARES": "log_sum_sq_probs"}
# Statistic -> all statistics that are computed with it.
COMPUTED_WITH = {
    one.name: tuple(other.name for other in STATISTICS if other.level <= one.level) for one in STATISTICS
}
