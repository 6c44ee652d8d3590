"""TRL's distillation from another model, beside GKD and Distillation: IW-OPD, GOLD, and ServerDistillation,
whose teacher is served.

TRL's code picks tokens and log-probabilities out of deferred logits; the divergences are ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.experimental.gold import GOLDConfig as StockGOLDConfig
from trl.experimental.gold import GOLDTrainer as StockGOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig as StockIWOPDConfig
from trl.experimental.iw_opd import IWOPDTrainer as StockIWOPDTrainer
from trl.experimental.server_distillation import ServerDistillationConfig as StockServerDistillationConfig
from trl.experimental.server_distillation import ServerDistillationTrainer as StockServerDistillationTrainer

from .deferred import DeferredLogits, DeferredLogitsTrainerMixin
from .mixins import ChunkedLossConfigMixin
from .support_divergence import divergence


def chunked_jsd(
    student: DeferredLogits,
    teacher: DeferredLogits,
    *,
    labels: Tensor,
    beta: float,
    temperature: float,
    num_items_in_batch: Tensor | int | None,
    top_k: int = 0,
    add_tail: bool = True,
) -> Tensor:
    """TRL's `generalized_jsd_loss` of deferred logits."""
    options = {"beta": float(beta), "num_items": num_items_in_batch}
    if 0 < top_k < student.weight.shape[0]:
        best = {0.0: ("teacher",), 1.0: ("student",)}.get(float(beta), ("teacher", "student"))
        options |= {"support": best, "top_k": top_k, "topk_mode": topk_mode(add_tail)}
    return divergence(student / temperature, teacher, labels, labels != -100, **options).loss


def topk_mode(add_tail: bool) -> str:
    return "tail" if add_tail else "renormalize"


class SparseDivergenceTrainerMixin(DeferredLogitsTrainerMixin):
    """The divergences over a few tokens that IW-OPD and ServerDistillation share."""

    def _compute_sparse_top_1_divergence_loss(
        self,
        student_log_probs: Any,
        teacher_top1_token_ids: Tensor,
        teacher_top1_logprobs: Tensor,
        reverse_token_ids: Tensor,
        reverse_teacher_logprobs: Tensor,
        labels: Tensor,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Over the teacher's best token and the sampled one, whose log-probabilities a server gave."""
        if not isinstance(student_log_probs, DeferredLogits):
            return super()._compute_sparse_top_1_divergence_loss(
                student_log_probs,
                teacher_top1_token_ids,
                teacher_top1_logprobs,
                reverse_token_ids,
                reverse_teacher_logprobs,
                labels,
                num_items_in_batch,
            )
        values, ids = reverse_teacher_logprobs, reverse_token_ids
        if self.beta == 1:
            served = (values[..., None], ids[..., None])
        else:
            # An id counts once.
            values = values.masked_fill(ids == teacher_top1_token_ids, -torch.inf)
            served = (
                torch.stack((teacher_top1_logprobs, values), -1),
                torch.stack((teacher_top1_token_ids, ids), -1),
            )
        return self._served_loss(student_log_probs, served, labels, num_items_in_batch)

    def _compute_server_forward_kl_loss(
        self, teacher_result: dict[str, Tensor], student_log_probs: Any, labels: Tensor
    ) -> Tensor:
        if not isinstance(student_log_probs, DeferredLogits):
            return super()._compute_server_forward_kl_loss(teacher_result, student_log_probs, labels)
        return self._served_loss(
            student_log_probs, (teacher_result["topk_logprobs"], teacher_result["topk_token_ids"]), labels
        )

    def _served_loss(
        self, student: DeferredLogits, served: tuple[Tensor, Tensor], labels: Tensor, num_items: Any = None
    ) -> Tensor:
        options = {"beta": float(self.beta), "topk_mode": topk_mode(self.loss_add_tail)}
        return divergence(student, served, labels, labels != -100, num_items=num_items, **options).loss


@dataclass
class ServerDistillationConfig(ChunkedLossConfigMixin, StockServerDistillationConfig):
    """TRL's `ServerDistillationConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class ServerDistillationTrainer(SparseDivergenceTrainerMixin, StockServerDistillationTrainer):
    """TRL's `ServerDistillationTrainer`; with `ServerDistillationConfig(use_chunked_loss=True)` the student
    builds no logits."""


@dataclass
class IWOPDConfig(ChunkedLossConfigMixin, StockIWOPDConfig):
    """`trl.experimental.iw_opd.IWOPDConfig` with `use_chunked_loss` (default False) and `logits_budget`
    (bytes, default the library's)."""


class IWOPDTrainer(SparseDivergenceTrainerMixin, StockIWOPDTrainer):
    """`trl.experimental.iw_opd.IWOPDTrainer`; with `IWOPDConfig(use_chunked_loss=True)` neither student nor
    teacher build logits."""

    @staticmethod
    def generalized_jsd_loss(student_logits: Any, teacher_logits: Any, *args: Any, **options: Any) -> Tensor:
        if not isinstance(student_logits, DeferredLogits):
            return StockIWOPDTrainer.generalized_jsd_loss(student_logits, teacher_logits, *args, **options)
        return chunked_jsd(student_logits, teacher_logits, *args, **options)

    def _compute_local_sparse_top_1_divergence_loss(
        self,
        student_logits: Any,
        teacher_logits: Any,
        completion_tokens: Tensor,
        labels: Tensor,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        if not isinstance(student_logits, DeferredLogits):
            return super()._compute_local_sparse_top_1_divergence_loss(
                student_logits, teacher_logits, completion_tokens, labels, num_items_in_batch
            )
        reverse = "student" if self.reverse_kl_top_1_mode == "argmax" else "target"
        return divergence(
            student_logits / self.temperature,
            teacher_logits,
            completion_tokens,
            labels != -100,
            num_items=num_items_in_batch,
            support=(reverse,) if self.beta == 1 else ("teacher", reverse),
            beta=float(self.beta),
            topk_mode=topk_mode(self.loss_add_tail),
        ).loss


def check_one_vocabulary(args: Any) -> None:
    if args.use_uld_loss:
        raise ValueError(
            "use_uld_loss: expected False with use_chunked_loss=True, got True; to compare two vocabularies "
            "it merges the probabilities of "
            "several positions and sorts them, for which it needs them all at once: set "
            "use_chunked_loss=False."
        )


@dataclass
class GOLDConfig(ChunkedLossConfigMixin, StockGOLDConfig):
    """`trl.experimental.gold.GOLDConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's).

    Raises:
        ValueError: the flag is on with `use_uld_loss`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_chunked_loss:
            check_one_vocabulary(self)


class GOLDTrainer(DeferredLogitsTrainerMixin, StockGOLDTrainer):
    """`trl.experimental.gold.GOLDTrainer` for one tokenizer; with `GOLDConfig(use_chunked_loss=True)` neither
    student nor teacher build logits."""

    check_options = staticmethod(check_one_vocabulary)

    @staticmethod
    def generalized_jsd_loss(student_logits: Any, teacher_logits: Any, *args: Any, **options: Any) -> Tensor:
        if not isinstance(student_logits, DeferredLogits):
            return StockGOLDTrainer.generalized_jsd_loss(student_logits, teacher_logits, *args, **options)
        return chunked_jsd(student_logits, teacher_logits, *args, **options)
