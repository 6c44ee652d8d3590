"""Fused layers in a trainer's models: `use_fused_layers`, with the chunked loss or alone."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import TrainerCallback

from logitless.errors import value_error
from logitless.layers.fuse import FusionReport, withdraw_fusions
from logitless.models import fuse_layers

from .activations import apply_budget
from .adapter import MODEL_ATTRIBUTES, Adapter, enable

logger = logging.getLogger("logitless.trl_integration")


@dataclass(frozen=True)
class FusedLayers:
    """A trainer's `fused_layers`: the report of each of its models; `str()` of it is a line of counts.

    Attributes:
        reports: by the trainer's attribute.
        is_compiled: whether the trainer compiles its model, which then runs without the fused layers.
        undo: restores the layers of all models.
    """

    reports: dict[str, FusionReport]
    is_compiled: bool
    undo: Callable[[], None] = field(default=lambda: None, repr=False)

    def __str__(self) -> str:
        counts = "; ".join(f"fused in {name}: {report.summary()}" for name, report in self.reports.items())
        if self.is_compiled:
            return counts + " (torch.compile takes the model's own layers)"
        return counts


class FusedLayersLogger(TrainerCallback):
    """Logs after the first step which layers are fused; the chunked loss, if it is on, logs them itself."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.has_logged = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        has_chunked_loss = "chunked_loss" in vars(self.trainer)
        if not self.has_logged and state.is_world_process_zero and not has_chunked_loss:
            logger.info(f"{type(self.trainer).__name__}: {self.trainer.fused_layers}")
        self.has_logged = True


def switch_on(
    trainer: Any,
    adapter: Adapter | None,
    logits_budget: int | str | None,
    *,
    fuse: bool,
    activation_budget: int | str | None = None,
) -> Callable[[], None]:
    """Switch on the options of a trainer.

    Args:
        trainer: the trainer.
        adapter: its adapter, for the chunked loss; None leaves the loss as it is.
        logits_budget: of the chunked loss.
        fuse: whether to fuse the layers of its models.
        activation_budget: as `fit_activations` takes it; None for no budget.

    Returns:
        A function that switches all of them off again.

    Raises:
        ValueError, ImportError: as `enable`, `fuse_layers` and `fit_activations` do; then no option stays on.
    """
    if getattr(trainer, "model_init", None) is not None and (fuse or activation_budget is not None):
        option = "use_fused_layers" if fuse else "activation_budget"
        remedy = "its train() makes another model: call fuse_layers or fit_activations in model_init"
        raise value_error("model_init", f"None with {option}", "a function", remedy)
    with ExitStack() as undo:
        if adapter is not None:
            undo.callback(enable(trainer, adapter, logits_budget))
        if fuse:
            undo.callback(_fuse(trainer))
        if activation_budget is not None:
            undo.callback(apply_budget(trainer, activation_budget))
        return undo.pop_all().close


def _fuse(trainer: Any) -> Callable[[], None]:
    """Fuse the layers of the trainer's models; returns a function that restores the layers."""
    use_liger_kernel = trainer.args.use_liger_kernel
    if use_liger_kernel:
        remedy = "both replace the same layers: leave one of them out"
        raise value_error("use_liger_kernel", "False with use_fused_layers=True", use_liger_kernel, remedy)
    models: dict[nn.Module, str] = {}
    for name in MODEL_ATTRIBUTES:
        model = getattr(trainer, name, None)
        if isinstance(model, nn.Module):
            models.setdefault(model, name)  # a student may be its own teacher
    for model in models:
        withdraw_fusions(model)  # it may come from another trainer, or be the copy of a fused one
    reports = {}
    with ExitStack() as stack:
        for model, name in models.items():
            fused = fuse_layers(model)
            stack.callback(fused)
            reports[name] = fused.report
        log_callback = FusedLayersLogger(trainer)
        trainer.add_callback(log_callback)
        stack.callback(trainer.remove_callback, log_callback)
        stack.callback(trainer.__dict__.pop, "fused_layers", None)
        undo = stack.pop_all().close
    trainer.__dict__["fused_layers"] = FusedLayers(reports, bool(trainer.args.torch_compile), undo)
    return undo
