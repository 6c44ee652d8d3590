"""Logits that a trainer of TRL is handed and that nobody computes, for trainers that take `model(...).logits`
apart themselves.

While such a trainer computes its loss, its models answer with `DeferredLogits`: hidden states and the head.
TRL's code slices them, divides them by a temperature and picks the log-probabilities of tokens as it always
did; a divergence of the whole vocabulary goes to one of our losses. Anything else that needs the logits
themselves raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from logitless.errors import expect
from logitless.losses.logprobs import TokenNumbers
from logitless.models.logits import deferred

from .adapter import Adapter, ChunkedLoss, Seam, base_of, swapped
from .head import projected

REMEDY = "the flag never builds them, so set use_chunked_loss=False."


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
        if not isinstance(index, tuple) or len(index) != 3 or index[2] != slice(None):
            raise TypeError(
                f"logits: expected an index [rows, positions, :] of deferred logits, got {index}; {REMEDY}"
            )
        return replace(self, hidden=self.hidden[index[:2]])

    def __truediv__(self, temperature: float) -> "DeferredLogits":
        if self.normalized:
            raise TypeError(
                f"logits: expected to be divided before they are normalized, got log-probabilities; {REMEDY}"
            )
        return replace(self, temperature=self.temperature * temperature)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        if not self.normalized or dim != -1 or index.shape[-1] != 1:
            shape = tuple(index.shape)
            raise TypeError(
                f"logits: expected one token's log-probability per position, got an index {shape} of dim "
                f"{dim}; {REMEDY}"
            )
        return self.logps(index[..., 0])[..., None]

    @classmethod
    def __torch_function__(
        cls, function: Any, classes: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function in (F.log_softmax, torch.log_softmax) and kwargs.get("dim") == -1:
            return replace(args[0], normalized=True)
        raise TypeError(f"logits: expected a use without the full logits, got {function.__name__}; {REMEDY}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"logits: expected a use without the full logits, got {name!r}; {REMEDY}")


def picked_logps(chunked: ChunkedLoss, stock: Callable, given: Any) -> Tensor:
    """TRL's `selective_log_softmax`."""
    return given.logits.logps(given.index)


def whole_models(trainer: Any) -> None:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    expect(
        not trainer.is_fsdp_enabled and (plugin is None or plugin.zero_stage != 3),
        "use_chunked_loss",
        f"whole models in {type(trainer).__name__}",
        "sharded ones, whose heads are gone once their forward has run",
        "train it with DDP or ZeRO up to stage 2, or set use_chunked_loss=False",
    )


def deferred_heads(chunked: ChunkedLoss) -> Iterator[Callable[[], None]]:
    """On the student, and on the teacher where it is another model."""
    trainer = chunked.trainer
    student, teacher = trainer.model, getattr(trainer, "teacher_model", None)
    models = [base_of(trainer, model) for model in (student, teacher) if model is not None]
    for model in models[:1] if models[0] is models[-1] else models:
        yield chunked.exchanged(model, deferred_forward, chunked)


@contextmanager
def deferring(chunked: ChunkedLoss) -> Iterator[None]:
    """The models answer with deferred logits, under the autocast that Accelerate has inside of a forward."""
    with swapped(chunked, deferring=True), chunked.trainer.accelerator.autocast():
        yield


def deferred_adapter(
    stock: str,
    patches: dict[str, Seam],
    checks: tuple[Callable[[Any], None], ...] = (),
    during: tuple[str, ...] = ("compute_loss",),
    predicts: bool = False,
) -> Adapter:
    return Adapter(
        stock,
        checks=(*checks, whole_models),
        heads=deferred_heads,
        patches=patches,
        during=during,
        around=deferring,
        predicts=predicts,
    )


def deferred_forward(model: Any, chunked: ChunkedLoss, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    if not chunked.deferring:
        return stock(*args, **kwargs)
    kwargs |= {"use_cache": False, "return_dict": True}
    with deferred(model, summed=False):
        out = stock(*args, **kwargs)
    # The head as it is now: an adapter may be switched off for a teacher, and on again before anybody reads
    # the logits. A view, not the parameter: DDP looks for the parameters in use behind the outputs of the
    # forward, and a leaf has nothing behind it.
    hidden, view = out.logits.operands()
    hidden, weight, bias = projected(hidden, view)
    weight, bias = (x.view_as(x) if isinstance(x, Tensor) else x for x in (weight, bias))
    return CausalLMOutputWithPast(logits=DeferredLogits(chunked, hidden, weight, bias, **view.options))
