"""TRL's TPO, which builds the full logits of three sequences for each prompt: the better, the worse and the
gold answer."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .adapter import Adapter, ChunkedLoss, Seam
from .per_token import per_token_score
from .preference import attached

FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1")


class LogitsOf:
    """Per-token numbers that answer what TRL's loss asks of the logits, so that the loss and its metrics stay
    TRL's code.

    The fields have the shape (B, T - 1) of labels that are shifted already. Anything else that is asked of it
    raises.
    """

    def __init__(self, **fields: Tensor):
        self.fields = fields

    def _each(self, change: Callable[[Tensor], Tensor]) -> "LogitsOf":
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

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return -args[0].fields["log_probs"].mean() if function is F.cross_entropy else NotImplemented


def logps_and_entropy(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    """TRL's `selective_log_softmax_and_entropy`."""
    fields = given.logits.fields
    return fields["log_probs"], fields["entropy"]


def compute_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    ids, completion, model = given.inputs["input_ids"], given.inputs["completion_mask"].bool(), given.model

    def scored(**inputs: Any) -> SimpleNamespace:
        out = model(**inputs, labels=ids.masked_fill(~completion, -100), fused_lm_head=True)
        fields = {name: getattr(out, name) for name in FIELDS}
        return SimpleNamespace(logits=LogitsOf(labels=ids[:, 1:], **fields))

    return stock(model=scored)


TPO = Adapter(
    "trl.experimental.tpo:TPO",
    heads=lambda chunked: attached(chunked, partial(per_token_score, outputs=FIELDS)),
    patches={
        "_compute_loss": Seam(compute_loss, train=True, evaluate=True, replaces=False),
        "trl.experimental.tpo.tpo_trainer:selective_log_softmax_and_entropy": Seam(logps_and_entropy),
    },
    during=("_compute_loss",),
    predicts=True,
)
