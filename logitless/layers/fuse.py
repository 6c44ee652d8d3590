"""`fuse_layers`: replace norms, rotations and gates of an existing model by fused operators."""

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType

from torch import nn

from logitless.errors import type_error, value_error
from logitless.exchange import exchange, state_of
from logitless.layers import fused_forwards
from logitless.layers.bodies import (
    Rotation,
    activation_agrees,
    activation_of,
    norm_of,
    rotations_of,
)
from logitless.layers.fused_forwards import KEY
from logitless.layers.rewrite import Rewritten, rewrite
from logitless.layers.source import Unknown, forward_of
from logitless.layers.statements import Known

logger = logging.getLogger(__name__)

# Modules that one would expect to be fused: a report gives a reason for those that are not.
EXPECTED = re.compile("Norm|MLP|Mlp|FeedForward|Attention|DecoderLayer|Experts")
HELPERS = {
    "_fused_add_norm": fused_forwards.add_norm,
    "_fused_norm_add": fused_forwards.norm_add,
    "_fused_gate": fused_forwards.gate,
    "_fused_gate_packed": fused_forwards.gate_packed,
}


@dataclass
class Report:
    """What `fuse_layers` did, by the modules' names in the model; `str()` of it counts them by class."""

    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for title, entries in (("fused", self.fused), ("left as they are", self.left)):
            counts: Counter[tuple[str, str]] = Counter()
            for name, what in entries.items():
                for each in (what,) if isinstance(what, str) else what:
                    counts[self.classes[name], each] += 1
            lines.append(f"{title}:" if counts else f"{title}: none")
            lines += [f"  {number} x {cls}: {what}" for (cls, what), number in counts.items()]
        return "\n".join(lines)

    def summary(self) -> str:
        """One line: the number of fused modules of each class, and of those left alone."""
        counts = Counter(self.classes[module] for module in self.fused)
        parts = [f"{number} {cls}" for cls, number in counts.items()]
        if self.left:
            parts.append(f"{len(self.left)} left alone")
        return ", ".join(parts)


@dataclass(frozen=True)
class Fused:
    """Handle of a fused model; calling it undoes the fusion.

    `report` says what was fused, and what was not and why."""

    report: Report
    _undos: tuple[Callable[[], None], ...] = field(repr=False)

    def __call__(self) -> None:
        for undo in self._undos:
            undo()


def fuse_layers(model: nn.Module) -> Fused:
    """Fuse the elementwise operations between a model's matrix products: norms, rotary embeddings, gates.

    A residual addition is fused with the norm before or after it, the norms of queries and keys with their
    rotation, and the activation of a gated MLP with its product. Loss and gradients change by rounding only;
    weights, names, hooks, checkpointing and `state_dict` do not change. Only the modules of this model are
    changed; other models of its class are not.

    Args:
        model: a model of transformers, or a module with layers like theirs; with PEFT adapters or without,
            before or after FSDP2.

    Returns:
        A `Fused`. Calling it undoes the fusion. Its `report` lists the fused modules, and the others with the
        reason.

    Raises:
        TypeError: `model` is not a module.
        ValueError: nothing in the model is recognized, or it is fused already.

    Example:

        fused = fuse_layers(model)
        print(fused.report)
        ...
        fused()
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "a module", type(model).__name__, "pass a model")
    again = [name for name, module in model.named_modules() if state_of(module, KEY) is not None]
    if again:
        raise value_error("model", "one that is not fused", f"{len(again)} fused modules", "undo that first")
    report = Report()
    undos = []
    try:
        for change in (_change_norm, _change_rest):
            for name, module in model.named_modules():
                if name not in report.fused:
                    _attempt(change, name, module, report, undos)
    except BaseException:
        Fused(report, tuple(undos))()
        raise
    if not undos:
        raise value_error(
            "model",
            "norms, rotary embeddings or gated MLPs whose source is one of those that we know",
            f"{type(model).__name__} with none ({_reasons(report)})",
            "leave it as it is, or see docs/layers.md",
        )
    logger.info("%s: fuse_layers fused %s", type(model).__name__, report.summary())
    return Fused(report, tuple(undos))


def _attempt(change: Callable, name: str, module: nn.Module, report: Report, undos: list) -> None:
    report.classes[name] = type(module).__name__
    try:
        what, undo, unknown = change(module)
    except Unknown as reason:
        what = ()
        undo = None
        unknown = str(reason)
    if undo is not None:
        report.fused[name] = what
        undos.append(undo)
        report.left.pop(name, None)
    if unknown and EXPECTED.search(type(module).__name__):
        report.left[name] = unknown


def _change_norm(module: nn.Module) -> tuple[tuple[str, ...], Callable[[], None] | None, str]:
    """(what was fused in a module, the function that undoes it, what was not fused)."""
    if type(module) is nn.LayerNorm:
        return (), None, "torch's own is one kernel; an addition before it may be fused"
    body = norm_of(module)
    if body is None:
        return (), None, "its source is none of those that we know"
    return ("norm",), exchange(module, KEY, fused_forwards.norm, body), ""


def _change_rest(module: nn.Module) -> tuple[tuple[str, ...], Callable[[], None] | None, str]:
    # Not named_children, which has one name for a module that has two.
    children = {name: child for name, child in module._modules.items() if child is not None}
    bodies = {name: fused_forwards.body_of(child) for name, child in children.items()}
    bodies = {name: body for name, body in bodies.items() if body is not None}
    activations = {name for name, child in children.items() if activation_of(child) is not None}
    activations = {name for name in activations if activation_agrees(children[name])}
    function = forward_of(module)
    rotations, unknown = rotations_of(function)
    reason = f"{', '.join(unknown)}: not one of those that we know" if unknown else ""
    rms_norms = {name for name, body in bodies.items() if not body.center}
    known = Known(*map(frozenset, (bodies, rms_norms, activations, rotations)))
    new = _rewritten(function, known, tuple(rotations.items())) if any(known) else None
    if new is None:
        # The report already names the norm.
        is_norm = "Norm" in type(module).__name__
        return (), None, reason or ("" if is_norm else "no statements that we could fuse")
    return new.replaced, exchange(module, KEY, fused_forwards.rewritten, new.function), reason


@functools.cache
def _rewritten(
    function: FunctionType, known: Known, rotations: tuple[tuple[str, tuple[Callable, Rotation]], ...]
) -> Rewritten | None:
    """One new function serves all layers, and all models of the class."""
    bound = {name: fused_forwards.Rotate(*value) for name, value in rotations}
    return rewrite(function, known, HELPERS | bound)


def _reasons(report: Report) -> str:
    reasons = Counter((report.classes[name], why) for name, why in report.left.items())
    return (
        "; ".join(f"{number} {cls}: {why}" for (cls, why), number in reasons.most_common(3))
        or "no candidates"
    )
