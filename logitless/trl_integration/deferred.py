"""Logits that a trainer of TRL is handed and that nobody computes, for trainers that take `model(...).logits`
apart themselves.

While such a trainer computes its loss, its models answer with `DeferredLogits`: hidden states and the head.
TRL's code slices them, divides them by a temperature and picks the log-probabilities of tokens as it always
did; a divergence of the whole vocabulary goes to one of our losses. Anything else that needs the logits
themselves raises.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from logitless.engine.head_view import HeadView
from logitless.errors import expect
from logitless.losses.logprobs import TokenNumbers
from logitless.models.exchange import exchange
from logitless.models.logits import deferred, undeferred

from .adapter import ChunkedLoss, base_of, swapped
from .head import KEY, projected


@dataclass(frozen=True)
class DeferredLogits:
    """What logits (B, T, V), or with `normalized` their log-probabilities, are made of."""

    chunked: ChunkedLoss
    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float
    temperature: float = 1.0
    normalized: bool = False

    @property
    def head(self) -> dict[str, Any]:
        """Options for a loss of these logits."""
        own = {name: getattr(self, name) for name in ("softcap", "logit_scale", "temperature")}
        return own | {"logits_budget": self.chunked.budget}

    def logps(self, targets: Tensor) -> Tensor:
        """Log-probabilities of `targets` (B, T), fp32 and differentiable."""
        numbers = TokenNumbers(**self.head)
        with self.chunked.saving():
            found, plan = numbers.numbers(
                self.hidden, self.weight, targets.to(self.hidden.device), bias=self.bias
            )
        self.chunked.note(plan)
        return found["logps"]

    # The operations that TRL applies to logits

    def __getitem__(self, index: tuple[Any, ...]) -> "DeferredLogits":
        whole = isinstance(index, tuple) and len(index) == 3 and index[2] == slice(None)
        return replace(self, hidden=self.hidden[index[:2]]) if whole else refused(f"index {index}")

    def __truediv__(self, temperature: float) -> "DeferredLogits":
        if self.normalized:
            return refused("a division after log_softmax")
        return replace(self, temperature=self.temperature * temperature)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        if not self.normalized or dim != -1 or index.shape[-1] != 1:
            return refused(f"gather of dim {dim} with an index {tuple(index.shape)}")
        return self.logps(index[..., 0])[..., None]

    @classmethod
    def __torch_function__(
        cls, function: Any, classes: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function in (F.log_softmax, torch.log_softmax) and kwargs.get("dim") == -1:
            return replace(args[0], normalized=True)
        return refused(function.__name__)

    def __getattr__(self, name: str) -> Any:
        return refused(repr(name), AttributeError)


def refused(use: str, error: type[Exception] = TypeError) -> Any:
    raise error(
        f"logits: expected a use without the full logits, got {use}; the flag never builds them, so set "
        f"use_chunked_loss=False."
    )


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
    student, teacher = trainer.model, getattr(trainer, "teacher_model", None)
    models = [base_of(trainer, model) for model in (student, teacher) if model is not None]
    for model in models[:1] if models[0] is models[-1] else models:
        yield functools.partial(undeferred, model)
        yield exchange(model, KEY, deferred_forward, chunked)


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

    # The head as it is now: an adapter may be switched off for a teacher, and on again before anybody reads
    # the logits. A view, not the parameter: DDP looks for the parameters in use behind the outputs of the
    # forward, and a leaf has nothing behind it.
    def held(hidden: Tensor, view: HeadView) -> DeferredLogits:
        hidden, weight, bias = projected(hidden, view)
        weight, bias = (x.view_as(x) if isinstance(x, Tensor) else x for x in (weight, bias))
        return DeferredLogits(chunked, hidden, weight, bias, **view.options)

    return CausalLMOutputWithPast(logits=out.logits.computed(held))
