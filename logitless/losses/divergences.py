"""Divergences between the distributions of a student and a teacher, by name."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from logitless.kernels.head import divergence as kernels


class DivergenceOptions(Protocol):
    """The fields of the loss that a divergence uses."""

    beta: float
    skew_alpha: float


# Functions (loss, log-probabilities of the student (n, K), log-probabilities of the teacher (n, K)) -> (n,).
DIVERGENCES: Mapping[str, Callable[[DivergenceOptions, Tensor, Tensor], Tensor]] = {
    "jsd": lambda loss, student, teacher: kernels.jsd(student, teacher, loss.beta),
    "forward_kl": lambda loss, student, teacher: kernels.kl(teacher, student),
    "reverse_kl": lambda loss, student, teacher: kernels.kl(student, teacher),
    "skewed_kl": lambda loss, student, teacher: kernels.skewed_kl(student, teacher, loss.skew_alpha),
    "skewed_reverse_kl": lambda loss, student, teacher: kernels.skewed_kl(teacher, student, loss.skew_alpha),
    "total_variation": lambda loss, student, teacher: 0.5 * (student.exp() - teacher.exp()).abs().sum(-1),
}


def plain_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """sum p log p/q of rows that do not sum to 1. `kernels.kl` adds q - p, whose sum is not 0 there."""
    return (logp.exp() * (logp - logq)).sum(-1)


# The divergences over k ids without their tail, topk_mode="partial".
PARTIAL: Mapping[str, Callable[[DivergenceOptions, Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda loss, student, teacher: plain_kl(teacher, student),
    "reverse_kl": lambda loss, student, teacher: plain_kl(student, teacher),
}
# topk_mode -> the divergences over k ids.
TOPK_MODES: Mapping[str, Mapping[str, Callable]] = {
    "tail": DIVERGENCES,
    "renormalize": DIVERGENCES,
    "partial": PARTIAL,
}


def log_of_others(teacher: Tensor, call_dtype: torch.dtype) -> Tensor:
    """(n, 1) log of 1 - sum exp(teacher), the probability of all ids outside the teacher's top k.

    The probability is clamped to at least eps, because the rounded sum may reach or exceed 1. eps is the
    machine epsilon of fp64 if `teacher` and `call_dtype` are fp64, else of fp32. The machine epsilon of bf16,
    2^-7, would be too large: log-probabilities near 0 have a small absolute error in every dtype. Even in
    bf16, a token with probability 0.9999 leaves a probability of about 1e-4 for all other ids.

    Args:
        teacher: (n, k) log-probabilities in the dtype of the student's.
        call_dtype: the dtype of the log-probabilities that the caller passed.
    """
    eps = max(
        torch.finfo(dtype).eps for dtype in (torch.promote_types(call_dtype, torch.float32), teacher.dtype)
    )
    return torch.log(-torch.expm1(teacher.logsumexp(-1, keepdim=True).clamp(max=-eps)))
