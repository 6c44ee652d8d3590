"""TRL's TPO, which builds the full logits of three sequences for each prompt: the better, the worse and the
gold answer."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import trl.experimental.tpo.tpo_trainer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from trl.experimental.tpo import TPOConfig as StockTPOConfig
from trl.experimental.tpo import TPOTrainer as StockTPOTrainer

from .attached_head import AttachedHeadTrainerMixin
from .mixins import ChunkedLossConfigMixin, swapped
from .per_token import FIELDS, PerTokenScore


class LogitsOf:
    """Per-token numbers that answer what TRL's loss asks of the logits, so that the loss and its metrics stay
    TRL's code.

    The fields have the shape (B, T - 1) of labels that are shifted already. Anything else that is asked of it
    raises.
    """

    def __init__(self, **fields: Tensor):
        self.fields = fields

    def _each(self, change: Any) -> "LogitsOf":
        return LogitsOf(**{name: change(x) for name, x in self.fields.items()})

    def detach(self) -> "LogitsOf":
        return self._each(Tensor.detach)

    def chunk(self, chunks: int, dim: int) -> list["LogitsOf"]:
        parts = zip(*(x.chunk(chunks, dim) for x in self.fields.values()))
        return [LogitsOf(**dict(zip(self.fields, part))) for part in parts]

    def __getitem__(self, index: Any) -> "LogitsOf":
        if isinstance(index, Tensor):
            return self._each(lambda x: x[index])
        if index != (..., slice(None, -1), slice(None)):
            raise TypeError(
                f"index: expected a mask, or the shift that was made before, got {index}; this TRL wants "
                f"the logits themselves."
            )
        return self

    def mean(self, dim: int) -> Tensor:
        return self.fields["mean_logits"]

    def argmax(self, dim: int) -> Tensor:
        """The label itself where it is the most likely token, else an id that no label has."""
        return torch.where(self.fields["is_top1"], self.fields["labels"], -1)

    def scores(self, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """In place of TRL's `selective_log_softmax_and_entropy`."""
        return self.fields["log_probs"], self.fields["entropy"]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return -args[0].fields["log_probs"].mean() if function is F.cross_entropy else NotImplemented


@dataclass
class TPOConfig(ChunkedLossConfigMixin, StockTPOConfig):
    """`trl.experimental.tpo.TPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class TPOTrainer(AttachedHeadTrainerMixin, StockTPOTrainer):
    """`trl.experimental.tpo.TPOTrainer`; with `TPOConfig(use_chunked_loss=True)` the full logits disappear.

    Who asks for the logits (`predict`, `compute_metrics`) is given them.
    """

    def chunked_score(self, model: PreTrainedModel, **stock_options: Any) -> PerTokenScore:
        return PerTokenScore(
            self, model, outputs=("log_probs", *(name for name in FIELDS if name != "log_sum_sq_probs"))
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if not self.uses_chunked_loss or return_outputs:
            return super()._compute_loss(model, inputs, return_outputs)
        ids, completion = inputs["input_ids"], inputs["completion_mask"].bool()

        def scored(**given: Any) -> SimpleNamespace:
            out = model(**given, labels=ids.masked_fill(~completion, -100), fused_lm_head=True)
            fields = {name: getattr(out, name) for name in ("log_probs", "entropy", "mean_logits", "is_top1")}
            return SimpleNamespace(logits=LogitsOf(labels=ids[:, 1:], **fields))

        with swapped(trl.experimental.tpo.tpo_trainer, selective_log_softmax_and_entropy=LogitsOf.scores):
            return super()._compute_loss(scored, inputs, return_outputs)
