"""`patch_model`: a transformers model whose labelled calls compute their loss without logits."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from logitless.engine.head_view import view_of
from logitless.engine.plan import Plan
from logitless.errors import value_error, warn
from logitless.exchange import exchange, exchanged, state_of, withdraw
from logitless.models.heads import base_of, find_head
from logitless.models.logits import Deferral, DeferredLogits, answering, deferral_of, deferred, undeferred
from logitless.models.probes import check_call, check_head
from logitless.parallel.groups import is_dtensor

logger = logging.getLogger(__name__)
KEY = "loss"
REMEDY = "Trainer takes the labels away to smooth them; SFTTrainer of logitless.trl_integration does not"


@dataclass(eq=False)
class Patch:
    """Handle of a patched model; calling it removes the patch.

    Attributes:
        checked: how the model was compared with itself: "checked at attach", "checked at step 1", or why not
            yet.
        last_plan: what ran in the last labelled call; None before it, and in a compiled graph.
    """

    model: nn.Module
    logits_budget: int | None
    unverified: bool
    labels_at: int  # position of `labels` among the arguments
    checked: str = "not checked yet: its parameters are on meta, sharded or offloaded until the first step"
    last_plan: Plan | None = None
    warned: bool = False  # of a training step without labels
    deferral: Deferral = field(default_factory=Deferral, repr=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """For a patch that is on only while this is: a trainer's, while it computes its loss."""
        answers = answering(find_head(self.model), self.deferral)
        with answers, exchanged(self.model, KEY, _forward, self):
            yield

    def __call__(self) -> None:
        if state_of(self.model, KEY) is self:
            withdraw(self.model, KEY)
            undeferred(self.model)


def patch_model(model: nn.Module, *, logits_budget: int | None = None, unverified: bool = False) -> Patch:
    """Make `model(..., labels=labels)` compute its loss without the full logits.

    The model's own forward pass runs; its LM head returns a stand-in that holds the hidden states. So logit
    scale and softcap, the shift of the labels, `num_items_in_batch`, the router loss, the fields of the
    output and a `loss_function` that was set on the model are the model's own. The output has no `logits`.
    Calls without labels, such as generation, run as before.

    Args:
        model: a causal language model of transformers, under PEFT or not; LoRA may be on the head too. The
            wrappers of DDP, torch.compile, Lightning Fabric, DeepSpeed and accelerate may be around it.
        logits_budget: bytes that a chunk of logits and its temporaries may take; the default depends on
            the device.
        unverified: accept a model whose head cannot be compared with its parameters before it is compiled.

    Returns:
        A `Patch`. Calling it removes the patch. It has the attributes `checked` and `last_plan`.

    Raises:
        ValueError: the model has no LM head, the patched loss differs from the model's own, or the model is
            patched already.
        TypeError: the head is not supported (quantized heads, by name), or the model's loss is not a
            cross-entropy of its logits.
    """
    patch = checked_patch(model, logits_budget, unverified=unverified)
    exchange(patch.model, KEY, _forward, patch)
    deferral_of(patch.model, patch.deferral)
    budget = "the device's default" if logits_budget is None else f"{logits_budget / 2**20:,.1f} MiB"
    name = type(patch.model).__name__
    logger.info(
        "%s: patch_model: loss without full logits, logits_budget %s, %s", name, budget, patch.checked
    )
    return patch


def checked_patch(model: nn.Module, logits_budget: int | None, *, unverified: bool = False) -> Patch:
    """The `Patch` of a model, checked and not applied yet; raises as `patch_model` does."""
    base = base_of(model)
    head = find_head(base)
    remedy = "pass AutoModelForCausalLM's"
    names = list(inspect.signature(base.forward).parameters)
    if "labels" not in names:
        raise value_error("model", "a forward pass that takes labels", type(base).__name__, remedy)
    patch = Patch(base, logits_budget, unverified, names.index("labels"))
    with answering(head, patch.deferral):
        _check(patch, head)
    return patch


def _forward(model: nn.Module, patch: Patch, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    at = patch.labels_at
    given = kwargs.get("labels") is not None or len(args) > at and args[at] is not None
    if not given and kwargs.get("shift_labels") is None:
        trains = model.training and torch.is_grad_enabled()
        if trains and not patch.warned and not torch.compiler.is_compiling():
            patch.warned = True
            warn(f"labels: expected labels in a training step, got none: full logits; {REMEDY}.", UserWarning)
        return stock(*args, **kwargs)
    if not given:
        # The model's own loss looks at the aligned ones alone, once there are labels.
        kwargs["labels"] = kwargs["shift_labels"]
    as_dict = kwargs.get("return_dict")
    if as_dict not in (None, True):
        remedy = "its output has no logits to place"
        raise value_error("return_dict", "True for a labelled call", as_dict, remedy)
    kwargs["return_dict"] = True
    with deferred(model, patch.logits_budget, unverified=patch.unverified) as deferral:
        out = stock(*args, **kwargs)
    patch.last_plan = deferral.last_plan
    if deferral.checked and not patch.checked.startswith("checked"):
        patch.checked = "checked at step 1"
    return type(out)(**{name: x for name, x in out.items() if not isinstance(x, DeferredLogits)})


def _check(patch: Patch, head: nn.Module) -> None:
    """Run both probes if the parameters are local; no parameter is gathered from other ranks."""
    model = patch.model
    view = view_of(head, "model", called=True)
    if not all(map(_is_here, head.parameters())):
        offloaded = "_hf_hook" in head.__dict__
        remedy = "give it a device of its own in device_map"
        if offloaded:
            raise value_error("model", "an LM head on a device", "one that is offloaded", remedy)
        return
    check_head(head, head.forward, view.weight[:1])
    patch.deferral.checked = True
    patch.checked = "checked at attach"
    if all(map(_is_here, model.parameters())):
        reason = check_call(model, model.forward, partial(_forward, model, patch, model.forward))
        patch.last_plan = None
        if reason is not None:
            patch.checked = f"checked at attach, its head alone ({reason})"


def _is_here(x: Tensor) -> bool:
    return x.device.type != "meta" and x.numel() > 0 and not is_dtensor(x)


def check_trainer_arguments(args: Any) -> None:
    """Raise ValueError for arguments with which `transformers.Trainer` does not use a patched model's loss.

    Args:
        args: the trainer's `TrainingArguments`. With label smoothing the trainer computes the loss itself,
            from full logits.
    """
    smoothing = getattr(args, "label_smoothing_factor", 0)
    if smoothing:
        raise value_error("label_smoothing_factor", "0 with a patched model", smoothing, REMEDY)
