"""Divergences of a student's distribution from a teacher's, by name."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from logitless.kernels.head import divergence as kernels


class DivergenceOptions(Protocol):
    """The fields of the loss that a divergence uses."""

    beta: float
    skew_alpha: float


# (loss, student (n, K), teacher (n, K)), log-probabilities -> (n,).
DIVERGENCES: Mapping[str, Callable[[DivergenceOptions, Tensor, Tensor], Tensor]] = {
    "jsd": lambda loss, student, teacher: kernels.jsd(student, teacher, loss.beta),
    "forward_kl": lambda loss, student, teacher: kernels.kl(teacher, student),
    "reverse_kl": lambda loss, student, teacher: kernels.kl(student, teacher),
    "skewed_kl": lambda loss, student, teacher: kernels.skewed_kl(student, teacher, loss.skew_alpha),
    "total_variation": lambda loss, student, teacher: 0.5 * (student.exp() - teacher.exp()).abs().sum(-1),
}


def log_of_others(teacher: Tensor, call_dtype: torch.dtype) -> Tensor:
    """(n, 1) log of the probability 1 - sum exp(teacher) of all ids that are not among a teacher's k.

    The probability is clamped to at least eps, because rounding may bring the sum to 1 and above. eps is that
    of fp64 if the log-probabilities are fp64; otherwise that of fp32, the dtype of the sum. The eps of bf16,
    2^-7, would be too large: log-probabilities near 0 have small absolute errors in any dtype. In bf16 too,
    the log-probability of a token with probability 0.9999 leaves a probability of 1e-4 for all other ids.

    Args:
        teacher: (n, k) log-probabilities in the dtype of the student's.
        call_dtype: the dtype in which the call passed them.
    """
    eps = max(
        torch.finfo(dtype).eps for dtype in (torch.promote_types(call_dtype, torch.float32), teacher.dtype)
    )
    return torch.log(-torch.expm1(teacher.logsumexp(-1, keepdim=True).clamp(max=-eps)))
