"""Distillation over a support: the most probable ids of student or teacher for each token."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.readers.support import SupportReader
from logitless.engine.spec import Fault
from logitless.engine.terms import Term
from logitless.errors import check_choice, type_error, value_error
from logitless.kernels.head import divergence as kernels
from logitless.kernels.head.divergence import MIN_LOGPROB
from logitless.kernels.head.transform import LogitTransform
from logitless.losses.declarations import cached_loss
from logitless.losses.divergences import DIVERGENCES, TOPK_MODES, log_of_others
from logitless.losses.linear import LinearLoss
from logitless.losses.teachers import topk_faults

# Support -> the number of sets of k ids per token.
SUPPORTS: Mapping[str, int] = {"teacher": 1, "student": 1, "union": 2}


def check_support(loss: LinearLoss) -> None:
    """Check `support`, `k` and `shared_vocabulary` of a `DistillationLoss`.

    Raises TypeError or ValueError if one is invalid, or if `divergence` does not support `support`.
    """
    check_choice("support", loss.support, (None, *SUPPORTS))
    k = loss.k
    shared = loss.shared_vocabulary
    for name, value in (("k", k), ("shared_vocabulary", shared)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise type_error(name, "a whole number or None", repr(value), "pass a number of token ids")
        if value is not None and value < 1:
            raise value_error(name, "at least 1", value, "pass a number of token ids")
    if loss.support is None and k is not None:
        raise value_error("k", "None without support", k, "set support to 'teacher', 'student' or 'union'")
    if loss.support is not None:
        if loss.divergence not in DIVERGENCES:
            divergences = ", ".join(map(repr, DIVERGENCES))
            raise value_error(
                "divergence", f"one of {divergences} with support", repr(loss.divergence), "leave support out"
            )


def on_support(loss: LinearLoss, *, teacher_is_topk: bool) -> "SupportDistillation":
    """Return the `SupportDistillation` that implements `loss`.

    Args:
        loss: a `DistillationLoss` over a subset of ids per token (`loss.support`).
        teacher_is_topk: whether the teacher is passed as `teacher_logprobs_topk`.

    Raises:
        ValueError: `support` or `k` does not fit the teacher.
    """
    if teacher_is_topk:
        if loss.support != "teacher":
            raise value_error(
                "support",
                "'teacher' with teacher_logprobs_topk",
                repr(loss.support),
                "pass teacher_hidden and teacher_weight",
            )
        if loss.k is not None:
            remedy = "k is the last dimension of teacher_logprobs_topk"
            raise value_error("k", "None with teacher_logprobs_topk", loss.k, remedy)
    else:
        if loss.k is None:
            raise value_error("k", "a number of token ids, with support", None, "set it, for example to 64")
    return cached_loss(
        SupportDistillation,
        **{name: getattr(loss, name) for name in SHARED_FIELDS},
        teacher_is_topk=teacher_is_topk,
    )


@dataclass(frozen=True, kw_only=True)
class SupportDistillation(LinearLoss):
    """The implementation of `DistillationLoss` with a support. `DistillationLoss` documents the fields."""

    divergence: str = "jsd"
    beta: float = 0.5
    skew_alpha: float = 0.1
    hard_loss_weight: float = 0.0
    topk_mode: str = "tail"
    support: str = "teacher"
    k: int | None = None
    shared_vocabulary: int | None = None
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_is_topk: bool = False

    reader: ClassVar[type] = SupportReader
    teacher: ClassVar = True
    token_inputs: ClassVar = ("labels",)
    prediction_inputs: ClassVar = ("ids", "teacher_logps")
    observes: ClassVar = (
        "rest",
        "entropy",
        "teacher_logps",
        "teacher_rest",
        "agreement",
        "hard",
        "token_accuracy",
    )

    @property
    def differentiates(self) -> tuple[str, ...]:
        soft = ("logps", "rest") if self.topk_mode == "tail" else ("logps",)
        return (*soft, "hard") if self.hard_loss_weight else soft

    @property
    def cancels(self) -> bool:
        """Whether the partition function cancels, so that the loss depends only on the logits of the ids."""
        return self.teacher_is_topk and self.topk_mode == "renormalize" and not self.hard_loss_weight

    @property
    def metric_names(self) -> tuple[str, ...]:
        every = ("soft_loss", "hard_loss", "entropy", "token_accuracy", "agreement")
        return every[:1] if self.cancels else every

    @property
    def teacher_transform(self) -> LogitTransform:
        return LogitTransform(self.teacher_softcap, self.teacher_logit_scale, self.temperature)

    def slots(self, inputs: Mapping[str, Tensor | None]) -> int:
        """The number of id slots per token; a slot may be empty."""
        return inputs["ids"].shape[-1] if self.teacher_is_topk else self.k * SUPPORTS[self.support]

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        # In empty slots, both log-probabilities are -inf.
        student, teacher = (x.clamp(min=MIN_LOGPROB) for x in (stats.logps, stats.teacher_logps))
        if self.topk_mode == "renormalize":
            student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        elif self.topk_mode == "tail":
            student = torch.cat((student, stats.rest.clamp(min=MIN_LOGPROB)[:, None]), -1)
            teacher = self._with_rest(teacher, stats, batch)
        soft = TOPK_MODES[self.topk_mode][self.divergence](self, student, teacher)
        if self.cancels:
            return {"distillation": Term(soft)}, {"soft_loss": Term(soft)}
        weight = self.hard_loss_weight
        hard = -stats.hard
        loss = weight * hard + (1 - weight) * soft if weight else soft
        statistics = (soft, hard, stats.entropy, stats.token_accuracy, stats.agreement)
        metrics = zip(self.metric_names, statistics, strict=True)
        return {"distillation": Term(loss)}, {name: Term(x) for name, x in metrics}

    def has_gathered_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether `gathered_kernel` can compute the loss from the logits of the ids (see `cancels`)."""
        return kernels.has_kernel(self.divergence, device, dtype)

    def gathered_kernel(
        self, student: Tensor, teacher: Tensor, factors: Tensor, gradient: Tensor | None
    ) -> tuple[dict[str, Term], dict[str, Term]]:
        """Compute `terms` from logits (n, k), with -inf in empty slots.

        With `gradient`, also write the gradient of the logits, multiplied by `factors` (n,), to it.
        """
        soft, *_ = kernels.fused_divergence(
            student.clamp(min=MIN_LOGPROB),
            teacher.clamp(min=MIN_LOGPROB),
            None,
            factors,
            gradient=gradient,
            divergence=self.divergence,
            beta=self.beta,
            hard_weight=0.0,
            transform=LogitTransform(),
            teacher_transform=LogitTransform(),
        )
        return {"distillation": Term(soft)}, {"soft_loss": Term(soft)}

    def faults(self, targets: Tensor, inputs: Mapping[str, Tensor | None], V: int) -> list[Fault]:
        return topk_faults(inputs["ids"], inputs["teacher_logps"], V, self.shared_vocabulary)

    def _with_rest(self, teacher: Tensor, stats: TokenStats, batch: Batch) -> Tensor:
        """(n, slots + 1) log-probabilities of the teacher; the last entry is that of all other ids."""
        if not self.teacher_is_topk:
            return torch.cat((teacher, stats.teacher_rest.clamp(min=MIN_LOGPROB)[:, None]), -1)
        rest = log_of_others(teacher, batch.teacher_logps.dtype)
        # If the slots contain all ids of the student, the teacher's probability of other ids is 0 as well.
        rest = torch.where(stats.rest[:, None] == -torch.inf, MIN_LOGPROB, rest)
        return torch.cat((teacher, rest), -1).log_softmax(-1)


SHARED_FIELDS = tuple(field.name for field in fields(SupportDistillation) if field.name != "teacher_is_topk")
