"""`apply_to`: chunked loss, fused layers and activation budget in a trainer, TRL's or transformers' own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers

from logitless.errors import value_error
from logitless.models.patch import make_patch

from .adapter import Adapter, ChunkedLoss, Seam, base_of
from .layers import switch_on
from .pairs import ADAPTERS, check_budget


def apply_to(
    trainer: transformers.Trainer,
    *,
    use_chunked_loss: bool = True,
    use_fused_layers: bool = False,
    logits_budget: int | None = None,
    activation_budget: int | str | None = None,
) -> Callable[[], None]:
    """Switch on the chunked loss, fused layers or an activation budget in an existing trainer.

    A trainer of TRL then computes its loss as the trainer of that name in `logitless.trl_integration` with
    `use_chunked_loss=True`. For any other `transformers.Trainer`, `patch_model` is called on its model. The
    trainer's class does not change. Layers are fused by `fuse_layers` in the models of any trainer;
    `trainer.fused_layers.reports` lists them.

    Args:
        trainer: TRL's (or a subclass of it), or transformers'.
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
    expected = "a transformers.Trainer, TRL's among them"
    trainer_name = type(trainer).__name__
    if not isinstance(trainer, transformers.Trainer):
        remedy = "for a model there is patch_model(model)"
        raise value_error("trainer", expected, trainer_name, remedy)
    remedy = "ask for one of them, or leave apply_to out"
    fits = activation_budget is not None
    some = use_chunked_loss or use_fused_layers or fits
    if not some:
        expected = "True, or use_fused_layers=True or an activation_budget"
        raise value_error("use_chunked_loss", expected, use_chunked_loss, remedy)
    asked = {"chunked_loss": use_chunked_loss, "fused_layers": use_fused_layers, "fitted_activations": fits}
    for name, wanted in asked.items():
        expected = f"one without the {name.replace('_', ' ')}"
        has = f"a {trainer_name} that has it"
        if wanted and name in trainer.__dict__:
            raise value_error("trainer", expected, has, "leave apply_to out")
    check_budget(logits_budget, use_chunked_loss)
    adapter = adapter_of(type(trainer)) if use_chunked_loss else None
    asked = {"layers": use_fused_layers, "activations": activation_budget}
    return switch_on(trainer, adapter, logits_budget, **asked)


def remove_from(trainer: transformers.Trainer) -> None:
    """Switch off all options of a trainer, those of its config's flags and those of `apply_to`.

    The trainer then computes TRL's own loss, with the models, optimizer and state that it has; the models are
    as TRL has made them.

    Raises:
        ValueError: neither the chunked loss nor fused layers nor an activation budget are on in the trainer.
    """
    parts = [getattr(trainer, name, None) for name in ("chunked_loss", "fused_layers", "fitted_activations")]
    if not any(parts):
        expected = "one with the chunked loss, fused layers or an activation budget"
        found = f"a {type(trainer).__name__} without"
        raise value_error("trainer", expected, found, "leave remove_from out")
    for part in parts:
        if part is not None:
            part.undo()


def adapter_of(trainer: type) -> Adapter:
    """The adapter of the TRL trainer that a class is, or extends; `PLAIN` for one outside of TRL."""
    for cls in trainer.__mro__:
        if cls.__module__.split(".")[0] == "trl":
            name = cls.__name__.removesuffix("Trainer")
            if name not in ADAPTERS:
                expected = f"one of TRL's {', '.join(ADAPTERS)}, or a trainer outside of TRL"
                remedy = "train it without the chunked loss"
                raise value_error("trainer", expected, cls.__name__, remedy)
            return ADAPTERS[name]
    return PLAIN


def patched(chunked: ChunkedLoss) -> Callable[[transformers.PreTrainedModel], AbstractContextManager]:
    chunked.patch = make_patch(base_of(chunked.trainer, chunked.trainer.model), chunked.budget)
    return lambda model: chunked.patch.active()


def model_loss(chunked: ChunkedLoss, stock: Callable, given: Any) -> Any:
    inputs = dict(given.inputs)  # as Trainer takes labels out of them
    loss, outputs = stock(return_outputs=True)
    if isinstance(outputs, dict) and outputs.get("loss") is not None and outputs.get("logits") is None:
        chunked.note(chunked.patch.last_plan)
    if chunked.wants_logits:
        with torch.no_grad():
            outputs = given.model(**{name: x for name, x in inputs.items() if name != "labels"})
    return (loss, outputs) if getattr(given, "return_outputs", False) else loss


def no_smoothing(trainer: Any) -> None:
    expected = "0 in a trainer outside of TRL"
    smoothing = trainer.args.label_smoothing_factor
    if smoothing:
        remedy = "it smooths full logits: use the SFTTrainer of logitless.trl_integration, or no smoothing"
        raise value_error("label_smoothing_factor", expected, smoothing, remedy)


PLAIN = Adapter(
    "transformers:",
    checks=(no_smoothing,),
    heads={"model": patched},
    patches={"compute_loss": Seam(model_loss, train=True, evaluate=True, replaces=False)},
)
