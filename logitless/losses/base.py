"""The two base classes for custom losses, `TokenLoss` and `LogitsLoss`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.readers.logits import LogitsReader
from logitless.engine.readers.tokens import TokenReader
from logitless.engine.terms import Term
from logitless.errors import value_error
from logitless.kernels.head.transform import LogitTransform
from logitless.losses.linear import LinearLoss
from logitless.losses.output import LossOutput

__all__ = ["LinearLoss", "LogitsLoss", "LossOutput", "TokenLoss"]


@dataclass(frozen=True, kw_only=True)
class TokenLoss(LinearLoss):
    """Base class of losses that are functions of per-token statistics of the logits.

    A subclass implements `terms(stats: TokenStats, batch: Batch)`. The class attribute `differentiates` lists
    the statistics through which the loss is differentiated. `observes` lists the statistics that the loss or
    its metrics use as constants. logps and lse are available without declaration.

    Args:
        return_logps: return the per-token statistics, such as the log-probabilities, in `LossOutput.tokens`.
        return_predictions: return the id of the largest logit at each position, and the lowest id among equal
            logits. This reads every chunk of logits once more.
    """

    return_logps: bool = False
    return_predictions: bool = False

    differentiates: ClassVar[tuple[str, ...]] = ("logps",)
    observes: ClassVar[tuple[str, ...]] = ()
    reader: ClassVar[type] = TokenReader


@dataclass(frozen=True, kw_only=True)
class LogitsLoss(LinearLoss):
    """Base class of losses that are differentiable functions of the logits, with one value per token.

    A subclass implements `terms(logits: Tensor, batch: Batch)` for logits (n, V). With the class attribute
    `teacher = True`, the call also takes teacher_hidden (..., H'), teacher_weight (V, H') and teacher_bias
    (V,), and `batch.teacher_logits` (n, V) are available, without gradient.

    Args:
        teacher_softcap: `softcap` of the teacher's head.
        teacher_logit_scale: `logit_scale` of the teacher's head.
    """

    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0

    reader: ClassVar[type] = LogitsReader
    vocab_parallel: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope != "token":
            raise value_error(
                "scope", "'token' for a LogitsLoss", repr(self.scope), "write it as a TokenLoss"
            )

    @property
    def teacher_transform(self) -> LogitTransform:
        return LogitTransform(self.teacher_softcap, self.teacher_logit_scale, self.temperature)

    def has_kernel(
        self, device: torch.device, dtype: torch.dtype, inputs: Mapping[str, Tensor | None]
    ) -> bool:
        """Whether `kernel` replaces `terms` and its derivative in this call."""
        return False

    def kernel(
        self,
        logits: Tensor,
        bias: Tensor | None,
        batch: Batch,
        factors: Tensor | None,
        gradient: Tensor | None,
    ) -> tuple[dict[str, Term], dict[str, Term]]:
        """Compute the result of `terms` in a kernel. `logits` (n, V) are products before the logit transform.

        With `factors` (n,), the kernel also writes d sum(factors * loss) / d products to `gradient` (n, V).
        """
        raise NotImplementedError
