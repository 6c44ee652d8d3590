"""Statistics over kept ids, by their definition: full logits with -inf outside the sets."""

import torch
from torch import Tensor


def kept(sets: list, V: int, targets: Tensor | None = None) -> Tensor:
    """(N, V) bool: the ids of each token's set; every id where a token has none.

    `targets`: added to the sets that have not got them.
    """
    mask = torch.zeros(len(sets), V, dtype=torch.bool)
    for n, ids in enumerate(sets):
        if not ids:
            mask[n] = True
            continue
        mask[n, torch.tensor(ids)] = True
        if targets is not None and targets[n] >= 0:
            mask[n, targets[n]] = True
    return mask


def head_logits(hidden, weight, bias=None, softcap=None, logit_scale=1.0, temperature=1.0) -> Tensor:
    z = hidden @ weight.t()
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    z = z if bias is None else z + bias
    z = logit_scale * z
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / temperature


def statistics(z: Tensor, mask: Tensor, targets: Tensor, ignore_index: int = -100):
    """(log p, entropy, lse) (N,) of logits (N, V) over the ids of the mask; 0 where ignored."""
    z = z.masked_fill(~mask, -torch.inf)
    counted = targets != ignore_index
    log_p = z.log_softmax(-1)
    logps = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p.masked_fill(~mask, 0.0)).sum(-1)
    lse = z.logsumexp(-1)
    return tuple(torch.where(counted, x, 0.0) for x in (logps, entropy, lse))
