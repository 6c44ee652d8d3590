"""An activation budget in a trainer: `activation_budget`, beside the other flags or alone."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from logitless.errors import value_error
from logitless.exchange import withdraw
from logitless.models import fit_activations
from logitless.models.activations import KEY, FitHandle

# Of transformers' checkpointing: settings of which a budget knows nothing.
KWARGS = ("every_n_layers", "offload", "selective")


@dataclass(frozen=True)
class FittedActivations:
    """A trainer's `fitted_activations`: what `fit_activations` returned for its model."""

    fitted: FitHandle
    undo: Callable[[], None] = field(default=lambda: None, repr=False)


def check_options(trainer: Any) -> None:
    """Raise ValueError for options of a trainer with which the budget would not hold.

    The value of `gradient_checkpointing`, which TRL's configs switch on, has no effect and is not refused.
    """
    args = trainer.args
    offloads = getattr(args, "activation_offloading", False)
    beside = "False with an activation_budget"
    if offloads:
        remedy = "both decide what saved tensors become: leave one of them out"
        raise value_error("activation_offloading", beside, offloads, remedy)
    if args.torch_compile:
        option = "torch._functorch.config.activation_memory_budget"
        remedy = f"Inductor decides what is saved, by {option}: leave one out"
        raise value_error("torch_compile", beside, args.torch_compile, remedy)
    kwargs = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    asked = {name: kwargs[name] for name in ("use_reentrant", *KWARGS) if kwargs.get(name)}
    expected = f"none of {', '.join(asked)} with an activation_budget"
    remedy = "the budget decides: leave it out"
    if asked:
        raise value_error("gradient_checkpointing_kwargs", expected, asked, remedy)
    sharding = getattr(args, "fsdp_config", None) or {}
    twice = sharding.get("activation_checkpointing", False)
    if twice:
        remedy = "layers would be run again twice: leave it out"
        raise value_error(
            "fsdp_config", "activation_checkpointing=False with an activation_budget", twice, remedy
        )
    state = trainer.accelerator.state
    fsdp = getattr(state, "fsdp_plugin", None)
    first = fsdp is not None and getattr(fsdp, "fsdp_version", 2) == 1
    remedy = "shard with FSDP2, or use gradient_checkpointing"
    if first:
        raise value_error("fsdp_version", "2 with an activation_budget", 1, remedy)
    deepspeed = getattr(state, "deepspeed_plugin", None)
    stage = getattr(deepspeed, "zero_stage", 0)
    if stage == 3:
        raise value_error("zero_stage", "at most 2 with an activation_budget", stage, remedy)


def fit(trainer: Any, activation_budget: int | str) -> Callable[[], None]:
    """Put a budget on the trainer's model; returns a function that takes it off.

    Other models of a trainer, a reference or a teacher, run without gradients and hold nothing.
    """
    check_options(trainer)
    for module in trainer.model.modules():
        withdraw(module, KEY)  # the model may come from another trainer
    with ExitStack() as undo:
        fitted = fit_activations(trainer.model, activation_budget)
        undo.callback(fitted)
        undo.callback(_explain_errors(trainer, fitted))
        undo.callback(trainer.__dict__.pop, "fitted_activations", None)
        take_off = undo.pop_all().close
    trainer.__dict__["fitted_activations"] = FittedActivations(fitted, take_off)
    return take_off


def _explain_errors(trainer: Any, fitted: FitHandle) -> Callable[[], None]:
    """Add a note to the error of a training step that runs out of memory outside of the layers too."""
    had = "training_step" in trainer.__dict__
    stock = trainer.training_step
    on = True

    @functools.wraps(stock)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        try:
            return stock(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if on and not getattr(error, "__notes__", ()):
                error.add_note(fitted.explain())
            raise

    trainer.__dict__["training_step"] = training_step

    def undo() -> None:
        nonlocal on
        on = False
        # A function that was put on top of it in between still calls it; it then only calls the original.
        if trainer.__dict__.get("training_step") is training_step:
            if had:
                trainer.__dict__["training_step"] = stock
            else:
                del trainer.__dict__["training_step"]

    return undo
