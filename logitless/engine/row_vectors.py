"""Strategy row_scaled, the backward pass of a frozen head: d logp / d hidden times each token's gradient."""

import torch
from torch import Tensor

from logitless.engine.projection import Projection
from logitless.engine.token_objective import TokenObjective
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

    What is left when d logp / d hidden is taken from d z(target) / d hidden, a row of the head, is d lse / d
    hidden.
    """
    call, vectors = head.call, vectors.to(stats.lse.dtype)
    if grads.lse is None:
        return vectors * grads.logps[:, None]
    slope = grads.lse * call.loss.head.derivative_at(stats.logps + stats.lse)
    vectors = vectors * (grads.logps - grads.lse)[:, None]
    known = torch.where(
        slope != 0, call.targets[at], 0
    )  # with compact=False a row may have no target, nor a gradient
    return torch.addcmul(
        vectors, slope[:, None], call.vocabulary.rows_of(head.weight, known).to(vectors.dtype)
    )
