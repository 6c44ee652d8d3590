"""The divergence of TRL's self- and server-distillation: over the tokens that student or teacher rate best,
weighted token by token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from logitless import Batch, Term, TokenLoss, TokenStats
from logitless.losses.base import LossOutput
from logitless.losses.distillation import DistillationLoss

from .deferred import DeferredLogits

# Whose ids (n, k) the divergence is over.
SUPPORTS: Mapping[str, Callable[["SupportDivergence", Tensor, Batch], Tensor]] = {
    "student": lambda loss, logits, batch: logits.topk(loss.top_k, -1).indices,
    "teacher": lambda loss, logits, batch: batch.teacher_logits.topk(loss.top_k, -1).indices,
    "target": lambda loss, logits, batch: batch.targets[:, None],
}
# The log of an importance ratio is cut here, as TRL does.
LARGEST_LOG_RATIO = 20.0


def importance_ratio(logps: Tensor, old_logps: Tensor, clip: float) -> Tensor:
    return (logps.detach() - old_logps).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=clip)


@dataclass(frozen=True, kw_only=True)
class SupportDivergence(DistillationLoss):
    """`DistillationLoss` over the `top_k` best ids of everyone named in `support` (nobody: over the whole
    vocabulary), each id once.

    The call also takes `token_weights` (...), which multiply the loss and not the metrics, and `old_logps`
    (...) of the targets: then each token counts by its ratio to them, at most `clip`.
    """

    support: tuple[str, ...] = ()
    top_k: int = 1
    clip: float = float("inf")

    # The best ids of a shard are not those of the vocabulary.
    vocab_parallel: ClassVar = False
    token_inputs: ClassVar = (*DistillationLoss.token_inputs, "token_weights", "old_logps")

    def terms(self, logits: Tensor, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        if self.support:
            ids = torch.cat([SUPPORTS[name](self, logits, batch) for name in self.support], -1)
            repeated = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
            batch.topk_logprobs = (
                batch.teacher_logits.log_softmax(-1).gather(-1, ids).masked_fill(repeated, -torch.inf)
            )
            batch.topk_ids = ids
        terms, metrics = super().terms(logits, batch)
        value = terms["distillation"].values
        if batch.old_logps is not None:
            logps = logits.detach().log_softmax(-1).gather(-1, batch.targets.clamp(min=0)[:, None])[:, 0]
            value = value * importance_ratio(logps, batch.old_logps, self.clip)
            metrics["soft_loss"] = Term(value)
        return _weighted(value, batch), metrics

    def has_kernel(
        self, device: torch.device, dtype: torch.dtype, inputs: Mapping[str, Tensor | None]
    ) -> bool:
        return not self.support and inputs["old_logps"] is None and super().has_kernel(device, dtype, inputs)

    def kernel(
        self, logits: Tensor, bias: Any, batch: Batch, factors: Tensor | None, gradient: Tensor | None
    ) -> Any:
        weighted = batch.token_weights is not None and factors is not None
        terms, metrics = super().kernel(
            logits, bias, batch, factors * batch.token_weights if weighted else factors, gradient
        )
        return _weighted(terms["distillation"].values, batch), metrics


@dataclass(frozen=True, kw_only=True)
class SampledTokenDistillation(TokenLoss):
    """(log s - log t) log s of the sampled token, the first factor without gradient: the score-function
    estimate of KL(s||t).

    The call takes `teacher_logps` (...), and `token_weights` and `old_logps` as `SupportDivergence` does.
    """

    clip: float = float("inf")

    token_inputs: ClassVar = ("teacher_logps", "token_weights", "old_logps")
    metric_names: ClassVar = ("soft_loss",)

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        value = (stats.logps.detach() - batch.teacher_logps) * stats.logps
        if batch.old_logps is not None:
            value = value * importance_ratio(stats.logps, batch.old_logps, self.clip)
        return _weighted(value, batch), {"soft_loss": Term(value)}


def _weighted(value: Tensor, batch: Batch) -> dict[str, Term]:
    return {"distillation": Term(value if batch.token_weights is None else value * batch.token_weights)}


def divergence(
    student: DeferredLogits,
    teacher: DeferredLogits
    | tuple[Tensor, Tensor],  # or log-probabilities (B, T, k) and ids (B, T, k) that a server gave
    targets: Tensor,  # (B, T)
    mask: Tensor,  # (B, T)
    *,
    given: dict[str, Any],  # to the loss: `num_items`, `token_weights`, `old_logps`
    **options: Any,  # of `SupportDivergence`
) -> LossOutput:
    """The loss of `student`'s distribution to `teacher`'s, at their temperature."""
    if isinstance(teacher, DeferredLogits):
        options |= {"teacher_softcap": teacher.softcap, "teacher_logit_scale": teacher.logit_scale}
        given["teacher_hidden"] = teacher.hidden.to(student.hidden.device)
        given |= {"teacher_weight": teacher.weight, "teacher_bias": teacher.bias}
    else:
        given["teacher_logprobs_topk"] = teacher
    # The loss takes the temperature of both from the student.
    loss = SupportDivergence(**student.head, **options)
    with student.chunked.saving():
        out = loss(student.hidden, student.weight, targets, bias=student.bias, mask=mask.bool(), **given)
    student.chunked.note(out.plan)
    return out
