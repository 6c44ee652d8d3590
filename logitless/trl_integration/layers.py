"""Fused layers in a trainer's models: `use_fused_layers`, beside the chunked loss or alone."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import TrainerCallback

from logitless.errors import value_error
from logitless.exchange import withdraw
from logitless.layers.fuse import FusionReport
from logitless.layers.fused_forwards import KEY
from logitless.models import fuse_layers

from .activations import fit
from .adapter import Adapter, enable

logger = logging.getLogger("logitless.trl_integration")

# Rollouts come from the first, or from an engine that runs a model of its own.
MODELS = ("model", "ref_model", "teacher_model")


@dataclass(frozen=True)
class FusedLayers:
    """A trainer's `fused_layers`: the report of each of its models; `str()` of it is a line of counts."""

    reports: dict[str, FusionReport]
    compiled: bool
    undo: Callable[[], None] = field(default=lambda: None, repr=False)

    def __str__(self) -> str:
        lines = [f"fused in {name}: {report.summary()}" for name, report in self.reports.items()]
        return "; ".join(lines) + " (torch.compile takes the model's own layers)" * self.compiled


class FirstStep(TrainerCallback):
    """Logs after the first step what was fused, unless the chunked loss has logged it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.said = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.said and state.is_world_process_zero and "chunked_loss" not in vars(self.trainer):
            logger.info(f"{type(self.trainer).__name__}: {self.trainer.fused_layers}")
        self.said = True


def switch_on(
    trainer: Any,
    adapter: Adapter | None,
    budget: int | None,
    *,
    layers: bool,
    activations: int | str | None = None,
) -> Callable[[], None]:
    """Switch on what the flags of a config ask for; without an adapter, not the loss.

    Returns a function that switches everything off again.

    Raises:
        ValueError, ImportError: as `enable`, `fuse_layers` and `fit_activations` do; then nothing stays on.
    """
    with ExitStack() as undo:
        if adapter is not None:
            undo.callback(enable(trainer, adapter, budget))
        if layers:
            undo.callback(_fuse(trainer))
        if activations is not None:
            undo.callback(fit(trainer, activations))
        return undo.pop_all().close


def _fuse(trainer: Any) -> Callable[[], None]:
    liger = trainer.args.use_liger_kernel
    remedy = "both replace the same layers: leave one of them out"
    if liger:
        raise value_error("use_liger_kernel", "False with use_fused_layers=True", liger, remedy)
    models: dict[nn.Module, str] = {}
    for name in MODELS:
        if isinstance(model := getattr(trainer, name, None), nn.Module):
            models.setdefault(model, name)  # a student may be its own teacher
    for model in models:
        for module in model.modules():
            withdraw(module, KEY)  # it may come from another trainer, or be the copy of a fused one
    reports = {}
    with ExitStack() as undo:
        for model, name in models.items():
            fused = fuse_layers(model)
            undo.callback(fused)
            reports[name] = fused.report
        line = FirstStep(trainer)
        trainer.add_callback(line)
        undo.callback(trainer.remove_callback, line)
        undo.callback(trainer.__dict__.pop, "fused_layers", None)
        take_off = undo.pop_all().close
    trainer.__dict__["fused_layers"] = FusedLayers(reports, bool(trainer.args.torch_compile), take_off)
    return take_off
