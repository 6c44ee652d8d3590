"""`fuse_layers`: replace norms, rotations, gates and LoRA layers of an existing model by fused operators."""

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import NamedTuple

from torch import nn

from logitless.errors import type_error, value_error
from logitless.exchange import exchange, state_of, withdraw
from logitless.layers import fused_forwards, lora
from logitless.layers.bodies import (
    Rotation,
    activation_agrees,
    activation_of,
    layer_norm_agrees,
    norm_of,
    rotations_of,
)
from logitless.layers.expert_gates import METHOD, NO_GATE, calls_gate, expert_gate_of
from logitless.layers.fused_forwards import GATE_KEY, KEY, LAYER_NORM
from logitless.layers.modules import LayerNorm, RMSNorm
from logitless.layers.rewrite import Rewritten, rewrite
from logitless.layers.source import (
    Definition,
    Recognized,
    UnrecognizedSource,
    activations_of,
    definitions_of,
    forward_of,
)
from logitless.layers.statements import FusibleNames

# Reason for a module that `norm_of` knows no norm for.
NO_NORM = (
    "no fused norm gives its results in a test run, which takes one argument (two with a gate), an attribute "
    "for eps, no parameter but a weight, no buffers and no submodules"
)
logger = logging.getLogger(__name__)

# Classes of modules for which a report has a reason if they are not fused.
REPORTED_CLASSES = re.compile("Norm|MLP|Mlp|FeedForward|Attention|DecoderLayer|Experts")
# Names in rewritten forward passes -> functions.
HELPERS = {
    "_fused_add_norm": fused_forwards.add_norm,
    "_fused_norm_add": fused_forwards.norm_add,
    "_fused_gate": fused_forwards.gate,
    "_fused_gate_packed": fused_forwards.gate_packed,
    "_fused_projections": lora.project_group,
}


class Fusion(NamedTuple):
    """What one step of `fuse_layers` did to a module.

    Attributes:
        replaced: descriptions of what was fused; empty if nothing was.
        undo: undoes the fusion; None if nothing was fused.
        reason: why the module, or a part of it, was not fused; "" if there is nothing to say. The message of
            an `UnrecognizedSource` that the step raises is also such a reason.
    """

    replaced: tuple[str, ...] = ()
    undo: Callable[[], None] | None = None
    reason: str = ""


@dataclass
class FusionReport:
    """Result of `fuse_layers`; `str()` counts modules by class.

    Attributes:
        fused: name of a module -> descriptions of what was fused in it.
        skipped: name of a module -> reason why it, or a part of it, was not fused.
        classes: name of a module -> name of its class.
        stock_calls: reason -> number of calls of fused LoRA layers that ran PEFT's own forward pass so far.
    """

    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    stock_calls: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = []
        for title, entries in (("fused", self.fused), ("not fused", self.skipped)):
            counts: Counter[tuple[str, str]] = Counter()
            for name, replaced in entries.items():
                for part in (replaced,) if isinstance(replaced, str) else replaced:
                    counts[self.classes[name], part] += 1
            lines.append(f"{title}:" if counts else f"{title}: none")
            lines += [f"  {number} x {cls}: {replaced}" for (cls, replaced), number in counts.items()]
        if self.stock_calls:
            lines.append("calls that ran PEFT's own forward pass:")
            lines += [f"  {number} x {reason}" for reason, number in self.stock_calls.items()]
        return "\n".join(lines)

    def summary(self) -> str:
        """Return one line: the number of fused modules of each class, and of modules that are not fused."""
        counts = Counter(self.classes[module] for module in self.fused)
        parts = [f"{number} {cls}" for cls, number in counts.items()]
        if self.skipped:
            parts.append(f"{len(self.skipped)} not fused")
        return ", ".join(parts)


@dataclass(frozen=True)
class FusionHandle:
    """Handle of a fused model; calling it undoes the fusion. `report` lists what was fused, and what not."""

    report: FusionReport
    _undo_functions: tuple[Callable[[], None], ...] = field(repr=False)

    def __call__(self) -> None:
        for undo in self._undo_functions:
            undo()


def fuse_layers(model: nn.Module) -> FusionHandle:
    """Fuse the elementwise operations between a model's matrix products: norms, rotations, gates, LoRA.

    A residual addition is fused with the norm before or after it, the norms of queries and keys with their
    rotation, the activation of a gated MLP with its product, the additions, scalings and casts of PEFT's LoRA
    layers with their products, and LoRA layers of one input with each other. Loss and gradients change by
    rounding only; weights, names, hooks, checkpointing and `state_dict` do not change. Only the modules of
    this model are changed; other models of its class are not.

    Args:
        model: a model of transformers, or a module with such layers. It may have PEFT adapters, and may be
            sharded by FSDP2 before or after. Add adapters first: LoRA layers that are added later run PEFT's
            own code.

    Returns:
        A `FusionHandle`. Calling it undoes the fusion. Its `report` lists the fused modules, and the others
        with the reason.

    Raises:
        TypeError: `model` is not a module.
        ValueError: nothing in the model can be fused, or it is fused already.

    Example:

        fused = fuse_layers(model)
        print(fused.report)
        ...
        fused()
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "a module", type(model).__name__, "pass a model")
    fused_modules = [name for name, module in model.named_modules() if _is_fused(module)]
    if fused_modules:
        raise value_error(
            "model", "one that is not fused", f"{len(fused_modules)} fused modules", "undo that first"
        )
    report = FusionReport()
    undo_functions = []
    try:
        fuse_lora = functools.partial(_fuse_lora, stock_calls=report.stock_calls)
        for fuse in (_fuse_norm, fuse_lora, _fuse_other_layers):
            for name, module in model.named_modules():
                if name not in report.fused:
                    _try_fuse(fuse, name, module, report, undo_functions)
    except BaseException:
        FusionHandle(report, tuple(undo_functions))()
        raise
    if not undo_functions:
        raise value_error(
            "model",
            "norms, rotary embeddings, gated MLPs or LoRA layers that are recognized",
            f"{type(model).__name__} with none ({_summarize_reasons(report)})",
            "use the model without fuse_layers, or see docs/layers.md",
        )
    logger.info("%s: fuse_layers fused %s", type(model).__name__, report.summary())
    return FusionHandle(report, tuple(undo_functions))


# All keys under which `fuse_layers` exchanges forward passes.
_KEYS = (KEY, GATE_KEY, lora.KEY)


def _is_fused(module: nn.Module) -> bool:
    return any(state_of(module, key) is not None for key in _KEYS)


def withdraw_fusions(model: nn.Module) -> None:
    """Undo every fusion in the model, of any call of `fuse_layers`."""
    for module in model.modules():
        for key in _KEYS:
            withdraw(module, key)


def _try_fuse(
    fuse: Callable[[nn.Module], Fusion],
    name: str,
    module: nn.Module,
    report: FusionReport,
    undo_functions: list,
) -> None:
    """Apply one of the functions `_fuse_...` to a module, and record the result."""
    report.classes[name] = type(module).__name__
    try:
        fusion = fuse(module)
    except UnrecognizedSource as error:
        fusion = Fusion(reason=str(error))
    if fusion.undo is not None:
        report.fused[name] = fusion.replaced
        undo_functions.append(fusion.undo)
        report.skipped.pop(name, None)
    is_reported = REPORTED_CLASSES.search(type(module).__name__) or lora.is_lora_layer(module)
    if fusion.reason and is_reported:
        report.skipped[name] = fusion.reason


def _fuse_norm(module: nn.Module) -> Fusion:
    """Fuse a norm."""
    if type(module) is nn.LayerNorm:
        return Fusion(reason="torch's LayerNorm is one kernel; an addition before it may be fused")
    if type(module) in (LayerNorm, RMSNorm):
        return Fusion(reason="it calls the fused operator already")
    body = norm_of(module)
    if body is None:
        return Fusion(reason=NO_NORM)
    definitions = *definitions_of(type(module), "forward"), *activations_of(type(module), body.options)
    state = Recognized(body, definitions)
    description = "norm" if body.gate is None else "gated norm"
    return Fusion((description,), exchange(module, KEY, fused_forwards.norm_forward, state))


def _fuse_lora(module: nn.Module, stock_calls: Counter[str]) -> Fusion:
    """Fuse a LoRA layer of PEFT."""
    if not lora.is_lora_layer(module):
        return Fusion()
    lora.check_fusible(module)
    state = lora.Fused(type(module).forward, stock_calls)
    return Fusion(("LoRA",), exchange(module, lora.KEY, lora.projection_forward, state))


def _fuse_other_layers(module: nn.Module) -> Fusion:
    """Fuse the additions, norms, rotations and gates in a forward pass."""
    if lora.is_lora_layer(module):
        return Fusion()
    if calls_gate(module):
        return _fuse_expert_gate(module)
    # Not named_children, which omits the second name of a module.
    children = {name: child for name, child in module._modules.items() if child is not None}
    bodies = {name: fused_forwards.body_of(child) for name, child in children.items()}
    if LAYER_NORM in bodies.values() and not layer_norm_agrees():
        bodies = {name: None if body is LAYER_NORM else body for name, body in bodies.items()}
    bodies = {name: body for name, body in bodies.items() if body is not None}
    activations = {name for name, child in children.items() if activation_of(child) is not None}
    activations = {name for name in activations if activation_agrees(children[name])}
    function = forward_of(module)
    rotations, unrecognized = rotations_of(function)
    reason = f"{', '.join(unrecognized)}: not a rotation that can be fused" if unrecognized else ""
    rms_norms = {name for name, body in bodies.items() if not body.center}
    projections = {name for name, child in children.items() if state_of(child, lora.KEY) is not None}
    single = {name for name, rotation in rotations.items() if rotation.value[1].single}
    names = FusibleNames(*map(frozenset, (bodies, rms_norms, activations, rotations, projections, single)))
    named_rotations = tuple((name, *rotation.value) for name, rotation in rotations.items())
    rewritten = _rewrite_cached(function, names, named_rotations) if any(names) else None
    if rewritten is None:
        # The report already names the norm.
        is_norm = "Norm" in type(module).__name__
        return Fusion(reason=reason or ("" if is_norm else "no statements that can be fused"))
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if hasattr(module, METHOD) and implementation not in (None, "eager"):
        # The decorator of transformers' experts calls their forward pass for "eager" only.
        return Fusion(reason=f"experts_implementation {implementation!r} runs other code")
    definitions = [Definition(type(module), "forward", function)]
    for rotation in rotations.values():
        definitions += rotation.definitions
    # Norms of the model are fused modules, with definitions of their own.
    torch_norms = {nn.LayerNorm for body in bodies.values() if body is LAYER_NORM}
    for cls in torch_norms | {type(children[name]) for name in activations}:
        definitions += definitions_of(cls, "forward")
    state = Recognized(rewritten.function, tuple(definitions))
    undo = exchange(module, KEY, fused_forwards.rewritten_forward, state)
    return Fusion(rewritten.replaced, undo, reason)


def _fuse_expert_gate(module: nn.Module) -> Fusion:
    """Fuse the gate that experts apply to the products of all experts at once."""
    state = expert_gate_of(module)
    if state is None:
        return Fusion(reason=NO_GATE)
    description = "expert gate" if state.value.clamped is None else "clamped expert gate"
    undo = exchange(module, GATE_KEY, fused_forwards.expert_gate, state, method=METHOD)
    return Fusion((description,), undo)


@functools.cache
def _rewrite_cached(
    function: FunctionType, names: FusibleNames, rotations: tuple[tuple[str, Callable, Rotation], ...]
) -> Rewritten | None:
    """Rewrite a forward pass once for all modules with the same class and names."""
    bindings = {}
    for name, original, rotation in rotations:
        rotate = fused_forwards.RotateOne if rotation.single else fused_forwards.Rotate
        bindings[name] = rotate(original, rotation)
    return rewrite(function, names, HELPERS | bindings)


def _summarize_reasons(report: FusionReport) -> str:
    """Return the three most frequent reasons as text."""
    reasons = Counter((report.classes[name], reason) for name, reason in report.skipped.items())
    return (
        "; ".join(f"{number} {cls}: {reason}" for (cls, reason), number in reasons.most_common(3))
        or "no candidates"
    )
