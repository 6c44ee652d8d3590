"""The operators over one chunk of logits `[C, V]` that every loss of log-probabilities is made of.

    token_statistics   logits -> log p(target), log-sum-exp and, on request, entropy, weighted sum of logits, log sum p^2, arg-max hit
    logprob_gradient   the same, and in the same pass d log p(target) / d logits, in place: the fused cross-entropy primitive
    logits_gradient    logits -> d loss / d logits, in place, from the gradients of those per-token numbers

With z the logits after the head transform (`kernels/head.py`), p = softmax(z) and y the target:

    d logp = onehot(y) - p      d lse = p      d entropy = -p (log p + entropy)      d sum_logits = class_weights

Each operator has one signature and two implementations: Triton (`cross_entropy_triton.py`), and the PyTorch twin below, which
walks the vocabulary in blocks so that its temporaries stay small beside the chunk. "In place" means into `gradient`, which is
`logits` itself or a narrower tensor overlaid on it.
"""

import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from logitless.kernels.head import Head

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class TokenStats:
    """Per-token numbers `[n]` of the logits, fp32 (fp64 for fp64 logits); those that nobody asked for are None."""

    logps: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    sum_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        return ((f.name, x) for f in fields(self) if (x := getattr(self, f.name)) is not None)

    def __getitem__(self, rows: slice | Tensor) -> "TokenStats":
        return TokenStats(**{name: x[rows] for name, x in self.items()})


# Numbers that one pass over the logits finds together, each row on top of those before it.
_TOGETHER = (("logps", "lse"), ("entropy", "is_top1"), ("log_sum_sq_probs", "sum_logits"))


def allocate_stats(names: Sequence[str], n: int, dtype: torch.dtype, device: torch.device) -> TokenStats:
    """Room for the named numbers and for those that come with them; logps and lse always do."""
    level = max((i for i, found in enumerate(_TOGETHER) for name in names if name in found), default=0)
    return TokenStats(**{name: torch.empty(n, dtype=dtype, device=device) for found in _TOGETHER[: level + 1] for name in found})


@functools.cache
def _triton_runs(device_type: str) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    # Triton's own switch for running kernels in its interpreter, which is how they are tested without a GPU.
    return device_type in ("cuda", "xpu") or (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def uses_triton(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in TRITON_DTYPES and _triton_runs(device.type)


def single_pass(gradient_dtype: torch.dtype) -> bool:
    """Whether `logprob_gradient` may store unnormalized exponentials: not in fp16, whose largest number is exp(11)."""
    return gradient_dtype != torch.float16


def token_statistics(
    logits: Tensor,  # (C, V)
    targets: Tensor,  # (C,) int64
    out: TokenStats,  # (C,) each, written
    *,
    head: Head,
    bias: Tensor | None = None,  # (V,)
    class_weights: Tensor | None = None,  # (V,) of sum_logits; None means ones
    ignore_index: int = -100,
) -> None:
    """Fill `out`; ignored rows get zeros."""
    if uses_triton(logits.device, logits.dtype):
        from logitless.kernels import cross_entropy_triton

        cross_entropy_triton.row_pass(
            logits, targets, out, bias=bias, class_weights=class_weights, head=head, ignore_index=ignore_index, gradient=None
        )
        return
    _token_statistics_twin(logits, targets, out, head, bias, class_weights, ignore_index)


def logprob_gradient(
    logits: Tensor, targets: Tensor, out: TokenStats, *, gradient: Tensor, head: Head, bias: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Fill `out` and `gradient`, and return `row_scale` [C]: d logp / d logits = row_scale[:, None] * gradient."""
    if uses_triton(logits.device, logits.dtype):
        from logitless.kernels import cross_entropy_triton

        return cross_entropy_triton.row_pass(
            logits, targets, out, bias=bias, class_weights=None, head=head, ignore_index=ignore_index, gradient=gradient
        )
    _token_statistics_twin(logits, targets, out, head, bias, None, ignore_index)
    supervised = (targets != ignore_index).to(out.lse.dtype)
    _logits_gradient_twin(logits, targets, out, TokenStats(logps=supervised), head, bias, None, ignore_index, gradient)
    return supervised


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    stats: TokenStats,  # lse, and entropy where it has a gradient
    grads: TokenStats,  # d loss / d of each number; None where it has none
    *,
    gradient: Tensor,  # (C, V), written
    head: Head,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> None:
    """Fill `gradient` with d loss / d logits; ignored rows get zeros."""
    if uses_triton(logits.device, logits.dtype):
        from logitless.kernels import cross_entropy_triton

        cross_entropy_triton.logits_gradient(
            logits, targets, stats, grads, bias=bias, class_weights=class_weights, head=head, ignore_index=ignore_index, gradient=gradient
        )
        return
    _logits_gradient_twin(logits, targets, stats, grads, head, bias, class_weights, ignore_index, gradient)


# Wide enough that PyTorch's per-call cost does not show, narrow enough that a few fp32 temporaries stay small beside the chunk.
def twin_block(V: int) -> int:
    return max(256, V // 32)


def twin_row_bytes(device: torch.device, dtype: torch.dtype, V: int) -> int:
    """Memory of the twins' temporaries beside a row of logits; the kernels have none."""
    return 0 if uses_triton(device, dtype) else 6 * twin_block(V) * torch.promote_types(dtype, torch.float32).itemsize


def _blocks(logits: Tensor, head: Head, bias: Tensor | None):
    V = logits.shape[1]
    for start in range(0, V, twin_block(V)):
        stop = min(start + twin_block(V), V)
        yield start, stop, *head.logits(logits[:, start:stop], None if bias is None else bias[start:stop])


def _in_block(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    inside = (targets >= start) & (targets < stop)
    return inside, torch.where(inside, targets - start, 0)[:, None]


def _token_statistics_twin(logits, targets, out, head, bias, class_weights, ignore_index) -> None:
    stat = torch.promote_types(logits.dtype, torch.float32)
    column = functools.partial(torch.zeros, targets.shape, dtype=stat, device=logits.device)
    top, total, z_sum, sq_sum, weighted, z_y = column() - torch.inf, column(), column(), column(), column(), column()
    arg_max = torch.zeros_like(targets)
    for start, stop, z, _ in _blocks(logits, head, bias):
        inside, local = _in_block(targets, start, stop)
        z_y = torch.where(inside, z.gather(1, local)[:, 0], z_y)
        if out.sum_logits is not None:
            weighted += z.sum(1) if class_weights is None else z @ class_weights[start:stop].to(stat)
        block_top, block_arg = z.max(1)
        arg_max = torch.where(block_top > top, block_arg + start, arg_max)
        new_top = torch.maximum(top, block_top)
        # A maximum of -inf has no exponentials to rescale; of NaN it stays NaN.
        anchor = torch.where(new_top == -torch.inf, 0.0, new_top)
        shrink, drop = torch.exp(top - anchor), torch.where(total > 0, top - anchor, 0.0)
        z = z - anchor[:, None]
        e = z.exp()
        if out.entropy is not None:
            z_sum = shrink * (z_sum + drop * total) + torch.where(e > 0, e * z, 0.0).sum(1)
            sq_sum = shrink * shrink * sq_sum + (e * e).sum(1)
        total = shrink * total + e.sum(1)
        top = new_top
    lse = top + total.log()
    found = {
        "logps": z_y - lse,
        "lse": lse,
        "entropy": total.log() - z_sum / total,
        "sum_logits": weighted,
        "log_sum_sq_probs": sq_sum.log() - 2 * total.log(),
        "is_top1": (arg_max == targets).to(stat),
    }
    for name, buffer in out.items():
        buffer.copy_(torch.where(targets != ignore_index, found[name], 0.0))


def _logits_gradient_twin(logits, targets, stats, grads, head, bias, class_weights, ignore_index, gradient) -> None:
    supervised = (targets != ignore_index)[:, None]
    g_logp = torch.zeros_like(stats.lse) if grads.logps is None else grads.logps
    g_softmax = -g_logp if grads.lse is None else grads.lse - g_logp
    for start, stop, z, slope in _blocks(logits, head, bias):
        z = z - stats.lse[:, None]
        p = z.exp()
        g = g_softmax[:, None] * p
        if grads.entropy is not None:
            g -= grads.entropy[:, None] * torch.where(p > 0, p * (z + stats.entropy[:, None]), 0.0)
        if grads.sum_logits is not None:
            g += grads.sum_logits[:, None] if class_weights is None else grads.sum_logits[:, None] * class_weights[start:stop]
        inside, local = _in_block(targets, start, stop)
        g.scatter_add_(1, local, torch.where(inside, g_logp, 0.0)[:, None])
        gradient[:, start:stop] = torch.where(supervised, g * slope, 0.0)
