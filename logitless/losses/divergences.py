"""Divergences of a student's distribution from a teacher's, by name."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from logitless.kernels.head import divergence as kernels


class Options(Protocol):
    """The fields of the loss that a divergence uses."""

    beta: float
    skew_alpha: float


# (loss, student (n, K), teacher (n, K)), log-probabilities -> (n,).
DIVERGENCES: Mapping[str, Callable[[Options, Tensor, Tensor], Tensor]] = {
    "jsd": lambda loss, student, teacher: kernels.jsd(student, teacher, loss.beta),
    "forward_kl": lambda loss, student, teacher: kernels.kl(teacher, student),
    "reverse_kl": lambda loss, student, teacher: kernels.kl(student, teacher),
    "skewed_kl": lambda loss, student, teacher: kernels.skewed_kl(student, teacher, loss.skew_alpha),
    "total_variation": lambda loss, student, teacher: 0.5 * (student.exp() - teacher.exp()).abs().sum(-1),
}
