"""Log-probabilities of several ids per position, on full logits."""

import torch
from torch import Tensor

from tests.reference.cross_entropy import head_logits


def ids_logprobs(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (..., k)
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    **head,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(logps (..., k), entropy (...), lse (...))`: -inf in an empty slot, 0 where all slots are empty."""
    z = head_logits(hidden, weight, bias, **head)
    log_p, lse = z.log_softmax(-1), z.logsumexp(-1)
    empty = ids == ignore_index
    kept = ~empty.all(-1)
    logps = log_p.gather(-1, ids.masked_fill(empty, 0)).masked_fill(empty, -torch.inf)
    # p = 0 contributes nothing, though its log is -inf.
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    zero = torch.zeros((), dtype=z.dtype)
    return (
        torch.where(kept[..., None], logps, zero),
        torch.where(kept, entropy, zero),
        torch.where(kept, lse, zero),
    )


def best_ids(
    hidden: Tensor, weight: Tensor, k: int, *, bias: Tensor | None = None, **head
) -> tuple[Tensor, Tensor]:
    """`(log-probabilities, ids)`, each `(..., k)`: by falling logit, of equal ones by rising id."""
    z = head_logits(hidden, weight, bias, **head)
    ids = z.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return z.log_softmax(-1).gather(-1, ids), ids
