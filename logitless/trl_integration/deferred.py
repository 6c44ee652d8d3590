"""Logits that a trainer of TRL is handed and that nobody computes, for trainers that take `model(...).logits`
apart themselves.

While such a trainer computes its loss, its models answer with `PickedLogits`: hidden states and the head.
TRL's code slices them, divides them by a temperature and picks tokens and their log-probabilities as it
always did; a divergence of the whole vocabulary goes to `DistillationLoss`. Any other use raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from logitless import DistillationLoss
from logitless.engine.head_view import HeadView
from logitless.errors import expect
from logitless.losses.base import LossOutput
from logitless.losses.logprobs import TokenNumbers
from logitless.losses.several_ids import IdsNumbers, logprobs_of_ids
from logitless.models.logits import Deferral, DeferredLogits, deferred

from .adapter import ChunkedLoss, base_of, swapped
from .head import exchanged


@dataclass(frozen=True)
class PickedLogits(DeferredLogits):
    """Logits (B, T, V), or with `normalized` their log-probabilities, with the head of their forward pass: an
    adapter may be switched off for a teacher, and on again before anybody reads the logits."""

    chunked: ChunkedLoss | None = None
    normalized: bool = False

    operations: ClassVar = {
        F.log_softmax: "log_softmax",
        torch.log_softmax: "log_softmax",
        torch.gather: "gather",
    }
    usable: ClassVar = "a use without the full logits"
    remedy: ClassVar = "the flag never builds them, so set use_chunked_loss=False"

    def computed(self, function: Callable[[Tensor, HeadView], Any]) -> Any:
        return function(self.hidden, self.view_now())

    def log_softmax(self, dim: int, **kwargs: Any) -> "PickedLogits":
        return replace(self, normalized=True) if dim == -1 else self._refused(f"log_softmax over {dim}")

    def __mul__(self, factor: Any) -> "PickedLogits":
        return self._refused("a product after log_softmax") if self.normalized else super().__mul__(factor)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        if not self.normalized or dim != -1:
            return self._refused(f"gather of dim {dim} with log_softmax={self.normalized}")
        return self.logps(index[..., 0])[..., None] if index.shape[-1] == 1 else self.logps(index)

    def logps(self, ids: Tensor) -> Tensor:
        """Log-probabilities of ids (B, T) or (B, T, k), fp32 and differentiable; 0 where an id is -100."""
        ids, budget = ids.to(self.device), {"logits_budget": self.chunked.budget}
        with self.chunked.saving():
            if ids.dim() < self.dim():
                found, plan = TokenNumbers(**budget).numbers(self.hidden, self.view_now(), ids)
            else:
                found, plan = logprobs_of_ids(self.hidden, self.view_now(), ids, None, IdsNumbers(**budget))
        self.chunked.note(plan)
        return found["logps"]

    def argmax(self, dim: int) -> Tensor:
        """The best id of each token (B, T); of equal logits, which bf16 makes, the first in fp32."""
        if dim != -1:
            return self._refused(f"argmax over {dim}")
        best = IdsNumbers(k=1, logits_budget=self.chunked.budget, logits_dtype=torch.float32)
        nobody = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        with torch.no_grad():
            return best.numbers(self.hidden, self.view_now(), nobody, None)[0]["ids"][..., 0]


def divergence(
    student: PickedLogits, teacher: PickedLogits, mask: Tensor, num_items: Any = None, **options: Any
) -> LossOutput:
    """`DistillationLoss` of the tokens in `mask` (B, T)."""
    loss = DistillationLoss(logits_budget=student.chunked.budget, **options)
    taught = {"teacher_hidden": teacher.hidden.to(student.device), "teacher_weight": teacher.view_now()}
    given = {"mask": mask, "num_items": num_items, **taught}
    return student.chunked.solved(loss, student.hidden, student.view_now(), **given)


def picked_logps(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's `selective_log_softmax`."""
    return given.logits.logps(given.index)


def whole_models(trainer: Any) -> None:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    whole = not trainer.is_fsdp_enabled and (plugin is None or plugin.zero_stage != 3)
    expected, found = f"whole models in {type(trainer).__name__}", "sharded ones, whose heads come and go"
    expect(whole, "use_chunked_loss", expected, found, "train with DDP or ZeRO up to stage 2")


def deferred_heads(chunked: ChunkedLoss) -> Iterator[Callable[[], None]]:
    """On the student, and on the teacher where it is another model."""
    trainer = chunked.trainer
    models = (trainer.model, getattr(trainer, "teacher_model", None))
    for model in dict.fromkeys(base_of(trainer, model) for model in models if model is not None):
        yield exchanged(model, deferred_forward, chunked)


@contextmanager
def deferring(chunked: ChunkedLoss) -> Iterator[None]:
    """The models answer with deferred logits, under the autocast that Accelerate has inside of a forward."""
    with swapped(chunked, deferring=True), chunked.trainer.accelerator.autocast():
        yield


# What the adapters of these trainers share
DEFERRED = {"heads": deferred_heads, "around": deferring}


def deferred_forward(model: Any, chunked: ChunkedLoss, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    if not chunked.deferring:
        return stock(*args, **kwargs)
    kwargs |= {"use_cache": False, "return_dict": True}
    with deferred(model, summed=False):
        out = stock(*args, **kwargs)

    def held(hidden: Tensor, head: HeadView) -> PickedLogits:
        # Views, not the parameters: DDP looks for the parameters in use behind the outputs of the forward
        # pass, and a leaf has nothing behind it.
        weight, bias = (x.view_as(x) if isinstance(x, Tensor) else x for x in (head.weight, head.bias))
        own, head = Deferral(logits_budget=chunked.budget), head._replace(weight=weight, bias=bias)
        return PickedLogits(hidden, head, own, *head.shape[:1], head.logit_scale, head.softcap, chunked)

    return CausalLMOutputWithPast(logits=out.logits.computed(held))
