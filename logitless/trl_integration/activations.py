"""An activation budget in a trainer: `activation_budget`, with the other flags or alone."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from logitless.activations.fit import KEY, FitHandle
from logitless.errors import value_error
from logitless.exchange import withdraw
from logitless.models import fit_activations

# `gradient_checkpointing_kwargs` that a budget does not support
CHECKPOINTING_KWARGS = ("use_reentrant", "every_n_layers", "offload", "selective")


@dataclass(frozen=True)
class FittedActivations:
    """A trainer's `fitted_activations`: what `fit_activations` returned for its model."""

    fitted: FitHandle
    undo: Callable[[], None] = field(default=lambda: None, repr=False)


def check_activation_options(trainer: Any) -> None:
    """Raise ValueError for options of a trainer with which the budget would not hold.

    The value of `gradient_checkpointing`, which TRL's configs switch on, has no effect and is not refused.
    """
    args = trainer.args
    offloading = getattr(args, "activation_offloading", False)
    if offloading:
        expected = "False with an activation_budget"
        remedy = "both decide what saved tensors become: leave one of them out"
        raise value_error("activation_offloading", expected, offloading, remedy)
    if args.torch_compile:
        expected = "False with an activation_budget"
        option = "torch._functorch.config.activation_memory_budget"
        remedy = f"Inductor decides what is saved, by {option}: leave one out"
        raise value_error("torch_compile", expected, args.torch_compile, remedy)
    kwargs = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    unsupported = {name: kwargs[name] for name in CHECKPOINTING_KWARGS if kwargs.get(name)}
    if unsupported:
        expected = f"none of {', '.join(unsupported)} with an activation_budget"
        remedy = "the budget decides: leave it out"
        raise value_error("gradient_checkpointing_kwargs", expected, unsupported, remedy)
    fsdp_config = getattr(args, "fsdp_config", None) or {}
    fsdp_checkpointing = fsdp_config.get("activation_checkpointing", False)
    if fsdp_checkpointing:
        expected = "activation_checkpointing=False with an activation_budget"
        remedy = "layers would be recomputed twice: leave it out"
        raise value_error("fsdp_config", expected, fsdp_checkpointing, remedy)
    state = trainer.accelerator.state
    fsdp_plugin = getattr(state, "fsdp_plugin", None)
    remedy = "shard with FSDP2, or use gradient_checkpointing"
    if fsdp_plugin is not None and getattr(fsdp_plugin, "fsdp_version", 2) == 1:
        raise value_error("fsdp_version", "2 with an activation_budget", 1, remedy)
    deepspeed_plugin = getattr(state, "deepspeed_plugin", None)
    zero_stage = getattr(deepspeed_plugin, "zero_stage", 0)
    if zero_stage == 3:
        raise value_error("zero_stage", "at most 2 with an activation_budget", zero_stage, remedy)


def apply_budget(trainer: Any, activation_budget: int | str) -> Callable[[], None]:
    """Apply a budget to the trainer's model; returns a function that removes it.

    Other models of a trainer, a reference or a teacher, run without gradients and save no activations.
    """
    check_activation_options(trainer)
    for module in trainer.model.modules():
        withdraw(module, KEY)  # the model may come from another trainer
    with ExitStack() as stack:
        fitted = fit_activations(trainer.model, activation_budget)
        stack.callback(fitted)
        stack.callback(_explain_errors(trainer, fitted))
        stack.callback(trainer.__dict__.pop, "fitted_activations", None)
        undo = stack.pop_all().close
    trainer.__dict__["fitted_activations"] = FittedActivations(fitted, undo)
    return undo


def _explain_errors(trainer: Any, fitted: FitHandle) -> Callable[[], None]:
    """Let `training_step` add `fitted.explain()` to an out-of-memory error without a note, which was raised
    outside of the layers. Returns a function that undoes this."""
    has_instance_attribute = "training_step" in trainer.__dict__
    original = trainer.training_step
    is_active = True

    @functools.wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if is_active and not getattr(error, "__notes__", ()):
                error.add_note(fitted.explain())
            raise

    trainer.__dict__["training_step"] = training_step

    def undo() -> None:
        nonlocal is_active
        is_active = False
        # If another function has replaced it since, that still calls it, and it only calls the original.
        if trainer.__dict__.get("training_step") is training_step:
            if has_instance_attribute:
                trainer.__dict__["training_step"] = original
            else:
                del trainer.__dict__["training_step"]

    return undo
