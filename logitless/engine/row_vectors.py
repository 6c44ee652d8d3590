"""Strategy row_scaled, the backward pass of a frozen head: d logp / d hidden times each token's gradient."""

import torch
from torch import Tensor

from logitless.engine.projection import Projection
from logitless.engine.token_objective import TokenObjective, target_apart
from logitless.kernels.cross_entropy import TokenBuffers

# Rows that are scaled at a time: a few [rows, H] temporaries, small beside d_hidden.
SCALED_ROWS = 2048


def scale_vectors(vectors: Tensor, out: Tensor, objective: TokenObjective, head: Projection) -> None:
    """d_hidden `out` (N, H) from `vectors` (N, H), d logp / d hidden, and the objective's gradients.

    `out` may be `vectors`.
    """
    rows = objective.rows
    for start in range(0, rows.count, SCALED_ROWS):
        stop = min(start + SCALED_ROWS, rows.count)
        at = rows.at(start, stop)
        scaled = _scaled(vectors[at], at, objective.stats[start:stop], objective.grads[start:stop], head).to(
            out.dtype
        )
        if isinstance(at, slice):
            out[at] = scaled
        else:
            out.index_copy_(0, at, scaled)


def _scaled(
    vectors: Tensor, at: slice | Tensor, stats: TokenBuffers, grads: TokenBuffers, head: Projection
) -> Tensor:
    """d loss / d hidden of some rows.

    For a loss of lse, W[target] is left out of the vectors (`TokenObjective.target_apart`) and added here:
    taken as a difference from it, d lse / d hidden would lose the digits of a token whose own gradient is
    small.
    """
    call = head.call
    g_lse = 0.0 if grads.lse is None else grads.lse
    if target_apart(call.loss):
        own = g_lse * stats.logps.exp() - grads.logps * torch.expm1(stats.logps)
    elif grads.lse is not None:
        own = grads.lse
    else:
        return vectors * grads.logps[:, None]
    targets = call.targets[at]
    supervised = targets != call.loss.ignore_index  # with compact=False a row may have no target
    own = torch.where(supervised, own * call.loss.head.derivative_at(stats.logps + stats.lse), 0.0)
    rows = call.vocabulary.rows_of(head.weight, torch.where(supervised, targets, 0))
    # In the numbers' dtype, which is the wider one: promotion spares a copy of the vectors and of the rows.
    return (vectors * (grads.logps - g_lse)[:, None]).addcmul_(own[:, None], rows)
