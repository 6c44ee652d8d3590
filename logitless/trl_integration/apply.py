"""`apply_to`: chunked loss, fused layers and activation budget in an existing trainer of TRL or
transformers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from logitless.errors import value_error
from logitless.models.patch import make_patch

from .adapter import (
    EVERY_STEP,
    Adapter,
    Attach,
    ChunkedLossSession,
    Replacement,
    swap_attributes,
    unwrapped_base,
)
from .layers import switch_on
from .pairs import ADAPTERS, check_budget


def apply_to(
    trainer: transformers.Trainer,
    *,
    use_chunked_loss: bool = True,
    use_fused_layers: bool = False,
    logits_budget: int | str | None = None,
    activation_budget: int | str | None = None,
) -> Callable[[], None]:
    """Switch on the chunked loss, fused layers or an activation budget in an existing trainer.

    A trainer of TRL then computes its loss as the trainer of that name in `logitless.trl_integration` with
    `use_chunked_loss=True`. For any other `transformers.Trainer`, `patch_model` is called on its model. The
    trainer's class does not change. Layers are fused by `fuse_layers` in the models of any trainer;
    `trainer.fused_layers.reports` lists them.

    Args:
        trainer: a trainer of TRL (or of a subclass), or a `transformers.Trainer`.
        use_chunked_loss: compute its loss without the full logits.
        use_fused_layers: fuse the layers of its model, and of a reference or teacher that it holds.
        logits_budget: bytes that a chunk of logits and its temporaries may take; the default depends on the
            device.
        activation_budget: bytes that the decoder layers of its model may keep between forward and backward,
            as `fit_activations` takes them; None for no budget. `trainer.fitted_activations.fitted` is what
            that returns.

    Returns:
        A function that switches off what this call has switched on. `remove_from(trainer)` switches off
        everything.

    Raises:
        ValueError: no option is set; `trainer` is no transformers.Trainer, has one of the options already, is
            a trainer of TRL whose loss is not supported, or has options that the config's flags refuse;
            `fuse_layers` finds no layer to fuse, or `fit_activations` refuses a model.
    """
    trainer_name = type(trainer).__name__
    if not isinstance(trainer, transformers.Trainer):
        expected = "a transformers.Trainer, TRL's among them"
        remedy = "for a model there is patch_model(model)"
        raise value_error("trainer", expected, trainer_name, remedy)
    has_activation_budget = activation_budget is not None
    if not (use_chunked_loss or use_fused_layers or has_activation_budget):
        expected = "True, or use_fused_layers=True or an activation_budget"
        remedy = "ask for one of them, or leave apply_to out"
        raise value_error("use_chunked_loss", expected, use_chunked_loss, remedy)
    requested = {
        "chunked_loss": use_chunked_loss,
        "fused_layers": use_fused_layers,
        "fitted_activations": has_activation_budget,
    }
    for attribute, is_requested in requested.items():
        if is_requested and attribute in trainer.__dict__:
            expected = f"one without the {attribute.replace('_', ' ')}"
            got = f"a {trainer_name} that has it"
            raise value_error("trainer", expected, got, "leave apply_to out")
    logits_budget = check_budget(logits_budget, use_chunked_loss)
    adapter = adapter_of(type(trainer)) if use_chunked_loss else None
    return switch_on(
        trainer, adapter, logits_budget, fuse=use_fused_layers, activation_budget=activation_budget
    )


def remove_from(trainer: transformers.Trainer) -> None:
    """Switch off all options of a trainer, those of its config's flags and those of `apply_to`.

    The trainer then computes TRL's loss, with the models, optimizer and state that it has; the models are as
    TRL has made them.

    Raises:
        ValueError: neither the chunked loss nor fused layers nor an activation budget are on in the trainer.
    """
    attributes = ("chunked_loss", "fused_layers", "fitted_activations")
    options = [value for name, value in vars(trainer).items() if name in attributes]
    if not options:
        expected = "one with the chunked loss, fused layers or an activation budget"
        got = f"a {type(trainer).__name__} without"
        raise value_error("trainer", expected, got, "leave remove_from out")
    for option in reversed(options):  # the last one's methods call those before
        option.undo()


def adapter_of(trainer_class: type) -> Adapter:
    """The adapter of a trainer class of TRL, or of the one that it extends; `PLAIN` for classes outside of
    TRL."""
    for cls in trainer_class.__mro__:
        if cls.__module__.split(".")[0] == "trl":
            name = cls.__name__.removesuffix("Trainer")
            if name in ADAPTERS:
                return ADAPTERS[name]
            expected = f"one of TRL's {', '.join(ADAPTERS)}, or a trainer outside of TRL"
            got, remedy = trainer_class.__name__, "train it without the chunked loss"
            if trainer_class is not cls:
                got = f"{got} of {trainer_class.__module__}, which extends TRL's {cls.__name__}"
            if trainer_class.__name__.removesuffix("Trainer") in ADAPTERS:
                subclass = f"a subclass of TRL's {trainer_class.__name__}"
                remedy = f"a copy's loss may differ: make it {subclass}, or {remedy}"
            raise value_error("trainer", expected, got, remedy)
    return PLAIN


def attach_patch(session: ChunkedLossSession) -> Attach:
    """Check the model as `patch_model` does, and each further model that `model_init` makes."""

    def attach(model: PreTrainedModel) -> AbstractContextManager:
        if session.patch is None or session.patch.model is not model:
            session.patch = make_patch(model, session.logits_budget)
        return nullcontext()  # the adapter's context applies it

    attach(unwrapped_base(session.trainer, session.trainer.model))
    return attach


def apply_patch(session: ChunkedLossSession) -> AbstractContextManager:
    """Context manager in which the patch is applied: while `compute_loss` runs. A prediction step without
    labels calls the model itself, and needs its logits."""
    return session.patch.active()


def compute_model_loss(session: ChunkedLossSession, original: Callable, arguments: Any) -> Any:
    """Replacement of `Trainer.compute_loss`: run it on the patched model, which returns no logits. If these
    outputs of the model are needed for predictions, call the model once more without labels."""
    inputs = dict(arguments.inputs)  # Trainer may remove the labels from them
    deferral = session.patch.deferral
    with swap_attributes(deferral, was_called=False):  # a call may be inside of another one
        found = original()
        was_called = deferral.was_called
    if was_called:
        session.record_plan(session.patch.last_plan)
    if not (session.needs_logits and getattr(arguments, "return_outputs", False)):
        return found
    loss, outputs = found
    if _lacks_logits(outputs):
        with torch.no_grad():
            outputs = arguments.model(**{name: x for name, x in inputs.items() if name != "labels"})
        if isinstance(outputs, tuple):  # which has no loss, in a call without labels
            outputs = (loss, *outputs)
    return loss, outputs


def _lacks_logits(outputs: Any) -> bool:
    """Whether these are outputs of the patched model: with a field for logits, which is None."""
    if isinstance(outputs, tuple):
        return any(x is None for x in outputs)
    if isinstance(outputs, ModelOutput):
        return getattr(outputs, "logits", outputs) is None
    return isinstance(outputs, dict) and outputs.get("logits", outputs) is None


def check_no_label_smoothing(trainer: Any) -> None:
    smoothing = trainer.args.label_smoothing_factor
    if smoothing:
        expected = "0 in a trainer outside of TRL"
        remedy = "it smooths full logits: use the SFTTrainer of logitless.trl_integration, or no smoothing"
        raise value_error("label_smoothing_factor", expected, smoothing, remedy)


PLAIN = Adapter(
    "transformers:",
    checks=(check_no_label_smoothing,),
    attachments={"model": attach_patch},
    context=apply_patch,
    remedy="call the model with labels in it and take its loss",
    replacements={"compute_loss": Replacement(compute_model_loss, EVERY_STEP, calls_original=True)},
)
