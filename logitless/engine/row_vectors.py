"""Strategy row_scaled, the backward pass of a frozen head: what was kept per token, times its gradient."""

from torch import Tensor

from logitless.engine.objective import Objective
from logitless.engine.projection import Projection

# Rows that are scaled at a time: a few [rows, H] temporaries, small beside d_hidden.
SCALED_ROWS = 2048


def scale_vectors(vectors: Tensor, out: Tensor, objective: Objective, head: Projection) -> None:
    """d_hidden `out` (N, H) from `vectors` (N, H), d logp / d hidden, and the objective's gradients.

    `out` may be `vectors`.
    """
    rows = objective.rows
    for start in range(0, rows.count, SCALED_ROWS):
        stop = min(start + SCALED_ROWS, rows.count)
        at = rows.at(start, stop)
        scaled = objective.scaled(vectors[at], at, slice(start, stop), head).to(out.dtype)
        if isinstance(at, slice):
            out[at] = scaled
        else:
            out.index_copy_(0, at, scaled)
