"""Logits that a trainer of TRL is handed and that nobody computes, for trainers that take `model(...).logits`
apart themselves.

While such a trainer computes its loss, its models answer with `DeferredLogits`: hidden states and the head.
    TRL's code slices them,
divides them by a temperature and picks the log-probabilities of tokens as it always did; a divergence of the
whole vocabulary goes to one of our losses. Anything else that needs the logits themselves raises.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from logitless.losses.logprobs import TokenNumbers

from .distillation_trainers import _base
from .head import head_options, head_parameters, replace_forward
from .mixins import ChunkedLossTrainerMixin, swapped

REMEDY = "the flag never builds them, so set use_chunked_loss=False."


@dataclass(frozen=True)
class DeferredLogits:
    """What logits (B, T, V), or with `normalized` their log-probabilities, are made of."""

    trainer: Any
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
        return own | {"logits_budget": self.trainer.args.logits_budget}

    def logps(self, targets: Tensor) -> Tensor:
        """Log-probabilities of `targets` (B, T), fp32 and differentiable."""
        numbers = TokenNumbers(**self.head)
        found, self.trainer.last_plan = numbers.numbers(
            self.hidden, self.weight, targets.to(self.hidden.device), bias=self.bias
        )
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


def picked_logps(logits: DeferredLogits, index: Tensor) -> Tensor:
    """TRL's `selective_log_softmax`."""
    return logits.logps(index)


class DeferredLogitsTrainerMixin(ChunkedLossTrainerMixin):
    """For the trainers that compute a loss of `model(...).logits`: with the flag on these are deferred while
    they do.

    Raises:
        ValueError: the flag is on with `compute_metrics` or `compute_loss_func`, which ask for logits, or for
            a sharded model.
    """

    # The TRL module whose `selective_log_softmax` the stock loss calls; None if it calls none
    loss_module: ClassVar[ModuleType | None] = None
    deferring = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.uses_chunked_loss:
            self.defer_heads()

    @property
    def deferred_models(self) -> list[PreTrainedModel]:
        """The student, and the teacher where it is another model."""
        found = [model for model in (self.model, getattr(self, "teacher_model", None)) if model is not None]
        models = [_base(self.accelerator.unwrap_model(model)) for model in found]
        return models[:1] if models[0] is models[-1] else models

    @staticmethod
    def check_options(args: Any) -> None:
        """Raises for options that the flag cannot serve."""

    def defer_heads(self) -> None:
        self.check_options(self.args)
        for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
            if getattr(self, name, None) is not None:
                raise ValueError(
                    f"{name}: expected None with use_chunked_loss=True, got a function of the full logits; "
                    f"leave it out."
                )
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3):
            raise ValueError(
                f"use_chunked_loss: expected whole models in {type(self).__name__}, got sharded ones, whose "
                f"heads are gone once their "
                "forward has run; train it with DDP or ZeRO up to stage 2, or set use_chunked_loss=False."
            )
        for model in self.deferred_models:
            attach_deferred_head(self, model)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A context in which the models answer with deferred logits."""
        if not self.uses_chunked_loss:
            yield
            return
        with swapped(self, deferring=True), self.accelerator.autocast():
            if self.loss_module is None:
                yield
                return
            with swapped(self.loss_module, selective_log_softmax=picked_logps):
                yield

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.deferred():
            return super().compute_loss(*args, **kwargs)


def attach_deferred_head(trainer: Any, model: PreTrainedModel) -> None:
    """Makes `model(...)` return deferred logits while `trainer.deferring`; every other call runs as
    before."""
    original_forward = model.forward

    # `generate` checks its arguments against the signature, and trainers read from it what the model accepts
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if trainer.deferring:
            return _deferred_forward(trainer, self, *args, **kwargs)
        return original_forward(*args, **kwargs)

    replace_forward(model, forward)


def _deferred_forward(
    trainer: Any, model: PreTrainedModel, *args: Any, logits_to_keep: int = 0, **kwargs: Any
) -> CausalLMOutputWithPast:
    kwargs["use_cache"] = False
    # `base_model`, not `get_decoder()`, which leaves the images of a vision-language model out
    hidden = model.base_model(*args, **kwargs).last_hidden_state
    # The head as it is now: an adapter may be switched off for a teacher, and on again before anybody reads
    # the logits. A view, not the parameter: DDP looks for the parameters in use behind the outputs of the
    # forward, and a leaf has nothing behind it.
    weight, bias = (None if x is None else x.view_as(x) for x in head_parameters(model))
    hidden = hidden[:, -logits_to_keep:].to(weight.device)
    return CausalLMOutputWithPast(
        logits=DeferredLogits(trainer, hidden, weight, bias, **head_options(model.config))
    )
