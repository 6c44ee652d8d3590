"""Log-probabilities of several ids per position, on full logits."""

import math

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


def support_divergence(
    student: Tensor,  # (N, V) logits
    teacher: Tensor | tuple[Tensor, Tensor],  # (N, V') logits, or log-probabilities and ids (N, k)
    *,
    divergence: str,
    topk_mode: str,
    support: str = "teacher",
    k: int | None = None,
    beta: float = 0.5,
) -> Tensor:
    """(N,) divergences over the ids that student or teacher rate best, each once.

    "tail": the distributions over these ids and one event more, that of all others. "renormalize": those
    conditional on these ids. "partial": the sums over these ids alone, normalized over all. Forward KL is
    KL(t||s), reverse KL is KL(s||t), JSD is beta KL(t||m) + (1 - beta) KL(s||m) with m = beta t +
    (1 - beta) s.
    """
    values = []
    for n, row in enumerate(student):
        log_s = row.log_softmax(-1)
        if isinstance(teacher, tuple):
            known = dict(
                reversed([x for x in zip(teacher[1][n].tolist(), teacher[0][n]) if x[1] > -torch.inf])
            )
            ids = sorted(known)
            t = torch.stack([known[v] for v in ids])
            t_rest = torch.log1p(-t.exp().sum()) if len(ids) < len(row) else t.new_full((), -torch.inf)
        else:
            log_t = teacher[n].log_softmax(-1)
            common = min(len(row), len(log_t))
            best = {"teacher": log_t[:common], "student": log_s[:common]}
            chosen = [best[name] for name in best if support in (name, "union")]
            ids = sorted({v for x in chosen for v in x.topk(k).indices.tolist()})
            t, others = log_t[ids], [v for v in range(len(log_t)) if v not in ids]
            t_rest = log_t[others].logsumexp(-1)
        s, others = log_s[ids], [v for v in range(len(log_s)) if v not in ids]
        if topk_mode == "renormalize":
            s, t = s.log_softmax(-1), t.log_softmax(-1)
        elif topk_mode == "tail":
            s = torch.cat((s, log_s[others].logsumexp(-1)[None]))
            t = torch.cat((t, t_rest[None])).log_softmax(-1)
        values.append(_divergence(divergence, s, t, beta))
    return torch.stack(values)


def _divergence(name: str, s: Tensor, t: Tensor, beta: float) -> Tensor:
    def kl(p: Tensor, q: Tensor) -> Tensor:
        return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum()

    if name == "forward_kl":
        return kl(t, s)
    if name == "reverse_kl":
        return kl(s, t)
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return beta * kl(t, m) + (1 - beta) * kl(s, m)
