"""TRL's distillation trainers: GKD, which builds the full logits of student and teacher, and
DistillationTrainer, which takes eight products for what takes four."""

from dataclasses import dataclass
from typing import Any

import torch
import trl
import trl.trainer.distillation_trainer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_peft_available
from trl.experimental.gkd import GKDConfig as StockGKDConfig
from trl.experimental.gkd import GKDTrainer as StockGKDTrainer

from logitless import JSDLoss

from .head import head_options, head_parameters
from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin, swapped


@dataclass
class DistillationConfig(ChunkedLossConfigMixin, trl.DistillationConfig):
    """`trl.DistillationConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default
    the library's)."""


class DistillationTrainer(ChunkedLossTrainerMixin, trl.DistillationTrainer):
    """`trl.DistillationTrainer`; with `DistillationConfig(use_chunked_loss=True)` its divergence is
    `JSDLoss`."""

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if not self.uses_chunked_loss:
            return super()._compute_loss(*args, **kwargs)
        with swapped(trl.trainer.distillation_trainer, _chunked_divergence_loss=self._divergence):
            return super()._compute_loss(*args, **kwargs)

    def _divergence(
        self,
        hidden: Tensor,
        teacher_hidden: Tensor,
        weight: Tensor,
        teacher_weight: Tensor,
        mask: Tensor,
        beta: float,
        num_items_in_batch: Tensor | int | None = None,
        student_lm_head_bias: Tensor | None = None,
        teacher_lm_head_bias: Tensor | None = None,
        student_logit_scale: float = 1.0,
        teacher_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_final_logit_softcapping: float | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What TRL's `_chunked_divergence_loss` returns: the loss, the sum of the student's entropies, and
        how many tokens count."""
        loss = JSDLoss(
            beta=beta,
            temperature=temperature,
            softcap=student_final_logit_softcapping,
            logit_scale=student_logit_scale,
            teacher_softcap=teacher_final_logit_softcapping,
            teacher_logit_scale=teacher_logit_scale,
            logits_budget=self.args.logits_budget,
        )
        out = loss(
            hidden,
            weight,
            bias=student_lm_head_bias,
            teacher_hidden=teacher_hidden,
            teacher_weight=teacher_weight,
            teacher_bias=teacher_lm_head_bias,
            mask=mask,
            num_items=num_items_in_batch,
        )
        self.last_plan = out.plan
        count = mask.sum()
        return out.loss, out.metrics["entropy"] * count, count


@dataclass
class GKDConfig(ChunkedLossConfigMixin, StockGKDConfig):
    """`trl.experimental.gkd.GKDConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class GKDTrainer(ChunkedLossTrainerMixin, StockGKDTrainer):
    """`trl.experimental.gkd.GKDTrainer`; with `GKDConfig(use_chunked_loss=True)` neither student nor teacher
    build logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.uses_chunked_loss:
            self._add_chunked_head(_base(self.accelerator.unwrap_model(self.model)))

    def chunked_score(self, model: PreTrainedModel, **stock_options: Any) -> Any:
        teacher_options = {
            f"teacher_{name}": value for name, value in head_options(self._teacher.config).items()
        }
        loss = JSDLoss(
            beta=self.beta,
            logits_budget=self.args.logits_budget,
            **head_options(model.config),
            **teacher_options,
        )

        def score(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool
        ) -> dict[str, Tensor]:
            teacher_hidden, teacher_weight, teacher_bias = self._taught
            # The label at the next position, as the student is to predict it; the last position has none.
            targets = torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), -100)), dim=1)
            out = loss(
                hidden,
                weight,
                targets,
                bias=bias,
                teacher_hidden=teacher_hidden.to(hidden.device),
                teacher_weight=teacher_weight,
                teacher_bias=teacher_bias,
                num_items=self._num_items,
            )
            self.last_plan = out.plan
            return {"log_probs": -out.loss, "label_mask": (targets != -100).sum()}

        return score

    @property
    def _teacher(self) -> PreTrainedModel:
        return _base(self.accelerator.unwrap_model(self.teacher_model))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not self.uses_chunked_loss:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        self.teacher_model.eval()
        with torch.no_grad():
            teacher = self._teacher
            self._taught = (
                teacher.base_model(**given, use_cache=False).last_hidden_state,
                *head_parameters(teacher),
            )
        self._num_items = num_items_in_batch
        out = model(**given, labels=inputs["labels"], fused_lm_head=True)
        loss = -out.log_probs
        del self._taught
        return (loss, out) if return_outputs else loss


def _base(model: Any) -> PreTrainedModel:
    """The transformers model under an adapter."""
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model
