"""Statistics of several ids per token from a chunk of logits, and the gradient of the logits from the
gradients of these statistics.

Let S be the distinct ids of a token, and R all other ids. The softmax over the vocabulary depends on the |S|
logits of S and on the log-sum-exp of R. Therefore the logits of S are read and overwritten with a very low
value, and the statistics of the chunk are then those of R:

    lse = log(exp(lse_R) + sum_S exp(z_s))      log p_s = z_s - lse      rest = lse_R - lse
    entropy = P_R (entropy_R - log P_R) - sum_S p_s log p_s,  P_R = exp(rest)

No statistic is a difference of nearly equal values: log(1 - sum_S p_s) is `rest`, and the log-probability of
a confident token is -log(1 + (sum of all other exponentials) / (its exponential)). With the gradients g of
log p, and their sum G:

    d z_s = g_s - (G + g_rest - g_lse) p_s      d z_r = (g_lse - G + g_rest (1 - P_R) / P_R) p_r

    pop_logits    read the logits of the ids, and overwrite them in the chunk
    statistics    these logits and the statistics of R -> the statistics of the whole vocabulary
    sparse_grad   gradients of the statistics -> gradients of the ids' products, and the row factor of p for R
    scatter       write one value per id to its column of the chunk

A row has k slots with one id each. A negative id is an empty slot, and an id may occur several times. The
Triton kernels (`slots_triton.py`) compare all pairs of up to MOST_SLOTS slots. The twins sort the slots.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import LogitTransform

MOST_SLOTS = 256
# The value with which logits are overwritten in the chunk. Its exponential is 0 relative to any other logit,
# and it is exact in its dtype.
POPPED_LOGITS = {torch.float16: -3e4}
MASKED_LOGIT = -(2.0**96)
# Lower bound of log P_R in its gradient. exp(-LEAST_REST) is finite in fp32.
LEAST_REST = -60.0


class Upstream(NamedTuple):
    """Gradients of the statistics of some rows; None for a statistic without gradient."""

    logps: Tensor | None  # (n, k)
    lse: Tensor | None = None  # (n,)
    rest: Tensor | None = None
    entropy: Tensor | None = None


def _runs(x: Tensor, ids: Tensor) -> bool:
    return uses_triton(x.device, x.dtype) and ids.shape[1] <= MOST_SLOTS and ids.numel() > 0


def taken_out(dtype: torch.dtype, transform: LogitTransform) -> float:
    return POPPED_LOGITS.get(dtype, MASKED_LOGIT) * (1 if transform.logit_scale > 0 else -1)


def pop_logits(
    logits: Tensor,  # (n, V) products with the head, written
    columns: Tensor,  # (n, k) int64
    *,
    transform: LogitTransform,
    bias: Tensor | None = None,  # (V,)
) -> Tensor:
    """Read the logits of the columns, and overwrite them in the chunk with `taken_out(dtype, head)`.

    Returns:
        (n, k) logits after the head transform, -inf in empty slots and for columns of other shards.
    """
    if _runs(logits, columns):
        from logitless.kernels.ids import slots_triton

        return slots_triton.pop_logits(
            logits, columns, taken_out(logits.dtype, transform), transform=transform, bias=bias
        )
    there, at = _found(columns, logits.shape[1])
    z, _ = transform.logits(logits.gather(1, at), None if bias is None else bias[at])
    scatter(logits, columns, taken_out(logits.dtype, transform))
    return torch.where(there, z, -torch.inf)


def statistics(
    z: Tensor,  # (n, k) logits of the ids on all ranks, -inf in empty slots
    ids: Tensor,  # (n, k) int64
    stats: TokenBuffers,  # (n,) lse, lse_residual, entropy (if requested) of this rank's other ids
    out: Mapping[str, Tensor],  # logps (n, k), and any of lse, lse_residual, rest, entropy (n,); written
    *,
    transform: LogitTransform,
    bias: Tensor | None,  # (V,)
    logits: Tensor,  # (n, V), in which the logits of the ids were overwritten
    targets: Tensor,  # (n,) int64
    ignore_index: int,
    columns: Tensor,  # (n, k) of the ids in this rank's chunk
    exchange: Callable[[Tensor], Tensor] | None = None,  # all-gather: (numbers, n) -> (ranks, numbers, n)
) -> None:
    """Write the statistics that `out` names; 0 in ignored rows."""
    options = {"transform": transform, "bias": bias}
    taken = taken_out(logits.dtype, transform)
    width = logits.shape[1]
    if exchange is None and _runs(z, ids):
        from logitless.kernels.ids import slots_triton

        options |= {"targets": targets, "ignore_index": ignore_index}
        slots_triton.statistics(z, ids, stats, out, taken, width, **options)
        return
    first = distinct(ids)
    supervised = targets != ignore_index
    there, at = _found(columns, width)
    taken = torch.full(z.shape, taken, dtype=logits.dtype, device=z.device)
    taken, _ = transform.logits(taken, None if bias is None else bias[at])
    others = torch.stack(_others(stats, first & there, taken, width))
    others = others[None] if exchange is None else exchange(others)
    computed = _whole(torch.where(first, z, -torch.inf), z, *others.unbind(1))
    for name, x in out.items():
        x.copy_(torch.where(supervised if x.dim() == 1 else supervised[:, None], computed[name], 0.0))


def sparse_grad(
    stats: Mapping[str, Tensor],  # ids (n, k), and the results of `statistics`
    upstream: Upstream,
    *,
    transform: LogitTransform,
    targets: Tensor,  # (n,) int64
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the products from the gradients of the statistics.

    Returns:
        (ids, d_products, factor). ids (n, k): each id in its first slot, and -1 in all other slots and in
        ignored rows. d_products (n, k): d loss / d product of each slot's id, which is equal in slots with
        equal ids, and 0 in empty slots and in ignored rows. factor (n,): the gradient of the logit of any
        other id r is factor * p_r plus the part of the entropy, which is not included; 0 in ignored rows.
    """
    ids, logps = stats["ids"], stats["logps"]
    if _runs(logps, ids):
        from logitless.kernels.ids import slots_triton

        options = {
            "transform": transform,
            "targets": targets,
            "ignore_index": ignore_index,
            "least": LEAST_REST,
        }
        return slots_triton.sparse_grad(stats, upstream, **options)
    supervised = targets != ignore_index
    first = distinct(ids)
    p = logps.exp()
    g = torch.zeros_like(logps)
    if upstream.logps is not None:
        # The gradient of an empty slot, whose log-probability is -inf, may be NaN. It does not affect other
        # slots.
        g = _merged(ids, upstream.logps)
    total = torch.where(first, g, 0.0).sum(1, keepdim=True)
    d_z = g * -torch.expm1(logps) - (total - g) * p
    factor = -total[:, 0]
    if upstream.lse is not None:
        d_z = d_z + upstream.lse[:, None] * p
        factor = factor + upstream.lse
    if upstream.rest is not None:
        d_z = d_z - upstream.rest[:, None] * p
        rest = stats["rest"]
        factor = factor - upstream.rest * torch.expm1(rest) * (-rest.clamp(min=LEAST_REST)).exp()
    if upstream.entropy is not None:
        share = torch.where(p > 0, p * (logps + stats["entropy"][:, None]), 0.0)
        d_z = d_z - upstream.entropy[:, None] * share
    slope = transform.derivative_at(logps + stats["lse"][:, None])
    d_x = torch.where((ids >= 0) & supervised[:, None], d_z * slope, 0.0)
    return torch.where(first & supervised[:, None], ids, -1), d_x, torch.where(supervised, factor, 0.0)


def scatter(matrix: Tensor, columns: Tensor, values: Tensor | float) -> None:
    """Write one value per slot (n, k), or the same value for all slots, to the slot's column of `matrix` (n,
    V).

    Slots with equal columns must have equal values. Slots with a negative column are skipped.
    """
    if _runs(matrix, columns):
        from logitless.kernels.ids import slots_triton

        slots_triton.scatter(matrix, columns, values)
        return
    there, at = _found(columns, matrix.shape[1])
    # An empty slot repeats the write of another slot of its row, so no two writes to a column differ.
    source = torch.arange(columns.shape[1], device=columns.device).expand_as(columns)
    source = torch.where(there, source, there.to(torch.uint8).argmax(1, keepdim=True))
    at = at.gather(1, source)
    if isinstance(values, Tensor):
        values = values.gather(1, source).to(matrix.dtype)
    matrix.scatter_(1, at, torch.where(there.any(1, keepdim=True), values, matrix.gather(1, at)))


def dedupe(ids: Tensor) -> Tensor:
    """(n, k) ids without duplicates: each id in its first slot, and -1 in its other slots."""
    return torch.where(distinct(ids), ids, -1)


def distinct(ids: Tensor) -> Tensor:
    """(n, k) bool: whether a slot is the first slot with its id; False in empty slots."""
    ordered, order = ids.sort(dim=-1, stable=True)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(first).scatter_(-1, order, first & (ordered >= 0))


def _found(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (whether a slot has a column in [0, width); the column, or 0 if it has none)."""
    there = (columns >= 0) & (columns < width)
    return there, torch.where(there, columns, 0)


def _merged(ids: Tensor, x: Tensor) -> Tensor:
    """(n, k) for each slot, the sum of `x` over all slots with the same id. Deterministic."""
    ordered, order = ids.sort(dim=-1, stable=True)
    total = x.gather(-1, order)
    distance = 1
    while distance < ids.shape[-1]:
        same = ordered[:, distance:] == ordered[:, :-distance]
        total = torch.cat(
            (
                total[:, :distance],
                torch.where(same, total[:, distance:] + total[:, :-distance], total[:, distance:]),
            ),
            dim=-1,
        )
        distance *= 2
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    return torch.empty_like(x).scatter_(-1, order, total.gather(-1, last))


def _others(stats: TokenBuffers, own: Tensor, taken: Tensor, width: int) -> list[Tensor]:
    """Return lse, lse_residual and entropy (n,) of this rank's other ids.

    `own` (n, k): the slots whose logits were overwritten in this rank's chunk, each id once. `taken`: the
    logit of each of these slots in `stats`, after the head transform. With a softcap, its exponential may be
    above 0.
    """
    share = torch.where(own, (taken - stats.lse[:, None]).exp(), 0.0)
    left = 1 - share.sum(1)
    none = (left <= 0) | (own.sum(1) == width)  # a NaN is not nothing
    lse = torch.where(none, -torch.inf, stats.lse + left.log())
    residual = torch.where(lse.isfinite() & stats.lse_residual.isfinite(), stats.lse_residual, 0.0)
    others = [lse, residual]
    if stats.entropy is not None:
        out = torch.where(share > 0, share * (taken - stats.lse[:, None]), 0.0).sum(1)
        others.append(torch.where(none, 0.0, (stats.entropy + out) / left + left.log()))
    return others


def _whole(
    own: Tensor,  # (n, k) logits, -inf in all but the first slot of each id
    z: Tensor,  # (n, k) logits of all slots
    lse: Tensor,  # (ranks, n) of each rank's other ids
    residual: Tensor,
    entropy: Tensor | None = None,
) -> dict[str, Tensor]:
    """Statistics of the whole vocabulary, from the ids' logits and each rank's statistics of other ids."""
    x = torch.cat((own, lse.t()), 1)
    rounding = torch.cat((torch.zeros_like(own), residual.t()), 1)
    top, at = x.max(1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    e = (x - top + rounding).exp()
    # The sum of all parts except the largest, of which only the rounding error is added.
    others = e.scatter(1, at, rounding.gather(1, at).expm1()).sum(1)
    log_total = others.log1p()
    top = top[:, 0]
    whole = top + log_total
    part = lse - top + residual - log_total
    stats = {
        "logps": (z - top[:, None]) - log_total[:, None],
        "lse": whole,
        "lse_residual": torch.where(whole.isfinite(), (top - whole) + log_total, 0.0),
        "rest": part.logsumexp(0),
    }
    if entropy is not None:
        log_p = (own - top[:, None]) - log_total[:, None]
        shares = part.exp()
        stats["entropy"] = (shares * entropy - torch.xlogy(shares, shares)).sum(0) - torch.where(
            log_p > -torch.inf, log_p.exp() * log_p, 0.0
        ).sum(1)
    return stats
