"""`patch_model`: make calls of a transformers model with labels compute the loss without the full logits."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from logitless.engine.head_view import view_of
from logitless.engine.plan import Plan
from logitless.errors import to_bytes, value_error, warn
from logitless.exchange import exchange, exchanged, instance_forward, state_of, withdraw
from logitless.models.heads import base_of, find_head
from logitless.models.logits import (
    Deferral,
    DeferredLogits,
    accepted,
    defer_logits,
    deferral_of,
    deferring_head,
    keywords_of,
    remove_deferral,
)
from logitless.models.probes import check_call, check_head
from logitless.parallel.groups import is_dtensor

logger = logging.getLogger(__name__)
KEY = "loss"
REMEDY = "Trainer removes the labels to smooth them; use SFTTrainer of logitless.trl_integration"
TRL_LOSS = (
    "a trainer of TRL that computes its own loss, where patch_model has no effect",
    "use the trainer of logitless.trl_integration with use_chunked_loss=True, or call apply_to(trainer)",
)
# Packages whose frames are between the code that computes a loss and the module that it calls.
BETWEEN = ("torch", "transformers", "accelerate", "peft", "deepspeed", "contextlib", "logitless.models")
BETWEEN = (*(f"{name}." for name in BETWEEN), "logitless.exchange.")


@dataclass(eq=False)
class Patch:
    """Handle of a patched model; calling it removes the patch.

    Attributes:
        checked: whether patched and original model were compared: "checked at attach", "checked at step 1",
            or the reason why not.
        last_plan: the plan of the last call with labels; None before it, and in a compiled graph.
    """

    model: nn.Module
    logits_budget: int | str | None
    unverified: bool
    labels_position: int | None  # position of `labels` among the arguments; None if given by name alone
    options: dict[str, Any]  # with which the forward pass returns a `ModelOutput`, if it takes any
    checked: str = "not checked yet: its parameters are on meta, sharded or offloaded until the first step"
    last_plan: Plan | None = None
    has_warned: bool = False  # about a training step whose loss is not computed by the patch
    has_warned_of_logits: bool = False  # about a trainer that predicts with a patched model
    deferral: Deferral = field(default_factory=Deferral, repr=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the patch is applied: that of a trainer, while it computes its loss."""
        deferring = deferring_head(find_head(self.model), self.deferral)
        with deferring, exchanged(self.model, KEY, _forward, self):
            yield

    def __call__(self) -> None:
        if state_of(self.model, KEY) is self:
            for module in self.model.modules():
                withdraw(module, KEY)
            remove_deferral(self.model)


def patch_model(
    model: nn.Module, *, logits_budget: int | str | None = None, unverified: bool = False
) -> Patch:
    """Make `model(..., labels=labels)` compute its loss without the full logits.

    The model's own forward pass runs; its LM head returns an object that holds the hidden states. Therefore
    the model's code still applies logit scale and softcap, the shift of the labels, `num_items_in_batch`, the
    router loss, the fields of the output and a `loss_function` that was set on the model. The output has no
    `logits`: read its fields by name, because `out[1]` is the field after them, such as `past_key_values`.
    Calls without labels, such as generation, run as before.

    Args:
        model: a causal language model of transformers, with PEFT adapters or without; LoRA may also be on the
            head. It may be wrapped by DDP, torch.compile, Lightning Fabric, DeepSpeed or accelerate.
        logits_budget: bytes that a chunk of logits and its temporaries may take; the default depends on
            the device.
        unverified: whether to accept a model whose head cannot be compared with its parameters before it is
            compiled.

    Returns:
        A `Patch`. Calling it removes the patch. It has the attributes `checked` and `last_plan`.

    Raises:
        ValueError: the model has no LM head, the patched loss differs from the model's own, or the model is
            patched already.
        TypeError: the head is of an unsupported class, such as a quantized one, or the model's loss is not a
            cross-entropy of its logits.
    """
    patch = make_patch(model, logits_budget, unverified=unverified)
    exchange(patch.model, KEY, _forward, patch)
    backbone = getattr(patch.model, "base_model", patch.model)
    if backbone is not patch.model:
        exchange(backbone, KEY, _backbone_forward, patch)
    deferral_of(patch.model, patch.deferral)
    size = patch.logits_budget
    budget = "the device's default" if size is None else f"{size / 2**20:,.1f} MiB"
    name = type(patch.model).__name__
    logger.info(
        "%s: patch_model: loss without full logits, logits_budget %s, %s", name, budget, patch.checked
    )
    return patch


def make_patch(model: nn.Module, logits_budget: int | str | None, *, unverified: bool = False) -> Patch:
    """Check a model and return its `Patch`, not yet applied. Raises as `patch_model` does."""
    if logits_budget is not None:
        logits_budget = to_bytes("logits_budget", logits_budget)
    base = base_of(model)
    head = find_head(base)
    remedy = "pass a model of AutoModelForCausalLM"
    keywords = keywords_of(base.forward)
    if keywords is not None and "labels" not in keywords:
        raise value_error("model", "a forward pass that takes labels", type(base).__name__, remedy)
    options = accepted(keywords, return_dict=True)
    patch = Patch(base, logits_budget, unverified, _labels_position(base), options)
    with deferring_head(head, patch.deferral):
        _probe(patch, head)
    return patch


def _forward(model: nn.Module, patch: Patch, original: Callable, *args: Any, **kwargs: Any) -> Any:
    position = patch.labels_position
    is_positional = position is not None and len(args) > position
    has_labels = (args[position] if is_positional else kwargs.get("labels")) is not None
    if not has_labels and kwargs.get("shift_labels") is None:
        if _may_warn(model, patch):
            package = _calling_package()
            # A trainer with the flag calls the model without labels, and defers its logits itself.
            if package != "logitless":
                loss = TRL_LOSS if package == "trl" else ("none: full logits", REMEDY)
                _warn_of_other_loss(patch, *loss)
        return original(*args, **kwargs)
    if not has_labels:
        # The model computes a loss only if there are labels; the loss then uses `shift_labels` alone.
        kwargs["labels"] = kwargs["shift_labels"]
    _warn_of_missing_logits(model, patch)
    return_dict = kwargs.get("return_dict")
    if return_dict not in (None, True):
        remedy = "a tuple needs logits, which are not computed"
        raise value_error("return_dict", "True for a labelled call", return_dict, remedy)
    kwargs |= patch.options
    with defer_logits(model, patch.logits_budget, unverified=patch.unverified) as deferral:
        out = original(*args, **kwargs)
    patch.last_plan = deferral.last_plan
    if deferral.is_checked and not patch.checked.startswith("checked"):
        patch.checked = "checked at step 1"
    return _without_logits(out, model)


def _labels_position(model: nn.Module) -> int | None:
    """Return the position of `labels` among the arguments of the forward pass; None if it has none."""
    for cls in type(model).__mro__:
        if "forward" not in vars(cls):
            continue
        _, *parameters = inspect.signature(cls.forward).parameters.values()
        names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        if "labels" in names:
            return names.index("labels")
        # `*args` go to the forward pass of the class that this one extends.
        if not any(x.kind is x.VAR_POSITIONAL for x in parameters):
            break
    return None


def _without_logits(output: Any, model: nn.Module) -> Any:
    """Return the output of a labelled call without the deferred logits: None in their place in a tuple.

    Raises:
        ValueError: it is neither a `ModelOutput` with a loss nor a tuple.
    """
    if isinstance(output, tuple):
        values = [None if isinstance(x, DeferredLogits) else x for x in output]
        return type(output)(*values) if hasattr(output, "_fields") else tuple(values)
    if not isinstance(output, dict) or output.get("loss") is None:
        got = f"{type(output).__name__} without one from {type(model).__name__}"
        remedy = "return it from its forward pass, or use a loss with head_of(model)"
        raise value_error("model", "outputs with a loss for labels", got, remedy)
    return type(output)(**{name: x for name, x in output.items() if not isinstance(x, DeferredLogits)})


def _backbone_forward(
    backbone: nn.Module, patch: Patch, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Forward pass of the backbone, which trainers of TRL call to compute the loss without the model."""
    if _may_warn(backbone, patch) and _calling_package() == "trl":
        _warn_of_other_loss(patch, *TRL_LOSS)
    return original(*args, **kwargs)


def _may_warn(module: nn.Module, patch: Patch) -> bool:
    if torch.compiler.is_compiling() or patch.has_warned:
        return False
    return module.training and torch.is_grad_enabled()


def _warn_of_other_loss(patch: Patch, got: str, remedy: str) -> None:
    patch.has_warned = True
    warn(f"labels: expected labels in a training step, got {got}; {remedy}.", UserWarning)


def _warn_of_missing_logits(model: nn.Module, patch: Patch) -> None:
    """Warn once if transformers' Trainer calls the model for its logits, in `predict` or for its metrics."""
    if torch.compiler.is_compiling() or patch.has_warned_of_logits or model.training:
        return
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "prediction_step":
        frame = frame.f_back
    if frame is None or frame.f_locals.get("prediction_loss_only") is not False:
        return
    patch.has_warned_of_logits = True
    remedy = "predict without the patch, or use apply_to(trainer) of logitless.trl_integration"
    text = "expected a prediction step that reads the loss alone, got one that reads logits"
    warn(f"logits: {text}; {remedy}.", UserWarning)


def _calling_package() -> str:
    """Return the package whose code called the model or its backbone.

    It is "logitless" if the patched model called its backbone, or a trainer of TRL with our flag did.
    """
    package = ""
    frame = sys._getframe(2)
    while frame is not None and package in ("", "trl"):
        name = f"{frame.f_globals.get('__name__')}."
        if frame.f_code is _forward.__code__ or name.startswith("logitless.trl_integration."):
            return "logitless"
        if not package and not name.startswith(BETWEEN):
            package = name.partition(".")[0]
        frame = frame.f_back
    return package


def _probe(patch: Patch, head: nn.Module) -> None:
    """Run the probes of head and model if their parameters are on this rank; none is gathered."""
    model = patch.model
    view = view_of(head, "model", called=True)
    if not all(map(_is_materialized, head.parameters())):
        is_offloaded = "_hf_hook" in head.__dict__
        remedy = "assign the head to a device in device_map"
        if is_offloaded:
            raise value_error("model", "an LM head on a device", "one that is offloaded", remedy)
        return
    check_head(head, head.forward, view.weight[:1])
    patch.deferral.is_checked = True
    patch.deferral.checked_forward = instance_forward(head)
    patch.checked = "checked at attach"
    if all(map(_is_materialized, model.parameters())):
        reason = check_call(model, model.forward, partial(_forward, model, patch, model.forward))
        patch.last_plan = None
        if reason is not None:
            patch.checked = f"checked at attach, its head alone ({reason})"


def _is_materialized(x: Tensor) -> bool:
    return x.device.type != "meta" and x.numel() > 0 and not is_dtensor(x)


def check_trainer_arguments(args: Any) -> None:
    """Check that `transformers.Trainer` uses a patched model's loss.

    Args:
        args: the trainer's `TrainingArguments`.

    Raises:
        ValueError: with label smoothing, the trainer computes the loss itself, from full logits.
    """
    label_smoothing = getattr(args, "label_smoothing_factor", 0)
    if label_smoothing:
        raise value_error("label_smoothing_factor", "0 with a patched model", label_smoothing, REMEDY)
