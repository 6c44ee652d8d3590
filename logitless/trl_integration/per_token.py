"""Per-token numbers in the shape that TRL's trainers read them in."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from logitless.engine.plan import Plan
from logitless.losses.logprobs import TokenNumbers

from .head import head_options

# TRL's names of what a trainer may ask for beside the log-probabilities, and ours.
FIELDS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "sum_logits",
    "is_top1": "is_top1",
}


class PerTokenScore:
    """A scorer (see `head.Score`) that hands out log-probabilities and what else TRL asked for,
    differentiable as TRL's are.

    The head is walked twice where it trains (4 products) and once where it is frozen (2): one vector per
    token is kept for it.
    """

    def __init__(
        self,
        trainer: Any,
        model: PreTrainedModel,
        *,
        differentiable_entropy: bool = False,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ):
        self.trainer, self.outputs, self.exact = trainer, outputs, cast_lm_head_to_fp32
        asked = tuple(FIELDS[name] for name in outputs if name in FIELDS and name != "entropy")
        self.head = {
            "temperature": temperature,
            "logits_budget": trainer.args.logits_budget,
            **head_options(model.config),
        }
        if cast_lm_head_to_fp32:
            self.head["logits_dtype"] = torch.float32
        self.loss = TokenNumbers(
            entropy=("entropy" in outputs) and (differentiable_entropy or "metric"), also=asked, **self.head
        )
        self.every_position = TokenNumbers(also=("sum_logits",), **self.head)

    def numbers(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool
    ) -> tuple[dict, Plan | None]:
        return self.loss.numbers(hidden, weight, labels, bias=bias, shift=shift)

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool
    ) -> dict[str, Tensor]:
        if self.exact:
            # The head's own precision, whatever autocast would make of it.
            hidden = hidden.to(weight.dtype)
        with torch.autocast(
            hidden.device.type, enabled=torch.is_autocast_enabled(hidden.device.type) and not self.exact
        ):
            found, self.trainer.last_plan = self.numbers(hidden, weight, bias, labels, shift)
        mask = labels != -100
        if shift:
            # TRL's fields have an entry for each label but the first of a row.
            found, mask = {name: x[:, :-1] for name, x in found.items()}, mask[:, 1:]
        fields = {"log_probs": found["logps"], "label_mask": mask}
        for name in self.outputs:
            if name in FIELDS:
                fields[name] = found[FIELDS[name]]
        if "mean_logits" in fields:
            fields["mean_logits"] = fields["mean_logits"] / weight.shape[0]
        if "is_top1" in fields:
            fields["is_top1"] = fields["is_top1"].bool()
        return fields
