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


def log_of_others(teacher: Tensor, given: torch.dtype) -> Tensor:
    """(n, 1) log of the probability 1 - sum exp(teacher) of all ids that are not among a teacher's k.

    It is at least eps, as rounding may bring the sum to 1 and above: that of fp32, in which narrower
    log-probabilities are summed, or of fp64 if they are given and summed in it. bf16's own eps would be
    2^-7, but log-probabilities near 0 have small absolute errors in any dtype: that of a token with
    probability 0.9999 says in bf16 too that the others have 1e-4.

    Args:
        teacher: (n, k) log-probabilities in the dtype of the student's.
        given: their dtype in the call.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (torch.promote_types(given, torch.float32), teacher.dtype))
    return torch.log(-torch.expm1(teacher.logsumexp(-1, keepdim=True).clamp(max=-eps)))
