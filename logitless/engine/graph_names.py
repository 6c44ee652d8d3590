"""Names of the constants of a compiled graph: the signature of a call, its loss, the module of its layers.

A graph carries only tensors and strings. An operator finds the constants of its call by their key.
"""

import copy
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import NamedTuple

import torch
from torch import nn

from logitless.engine.call import PackedHead, Signature, TrainedIndices
from logitless.engine.spec import LossSpec
from logitless.errors import value_error

# A compiled graph contains the key of its call as a string. A backward pass, an exported program and a graph
# that constructs its loss run without a live loss object, and there is no event when a graph is freed.
# Therefore entries are never removed. There is one entry for each different call that was compiled; eager
# calls add no entries.
_SIGNATURES: dict[str, "Registered"] = {}
_LOSSES: dict[str, LossSpec] = {}
_GROUPS: dict[str, dict[str, weakref.ref]] = {}
_MODULES: dict[str, nn.Module] = {}
_LOCK = threading.Lock()
_NUMBERS = itertools.count()


class Registered(NamedTuple):
    """A signature whose loss has no process groups, and weak references to the groups.

    A strong reference would keep a process group alive.
    """

    signature: Signature
    groups: Mapping[str, weakref.ref]  # by field name of the loss

    def complete(self) -> Signature:
        """Return the signature with its process groups. Raises ValueError if a group was destroyed."""
        if not self.groups:
            return self.signature
        groups = {name: reference() for name, reference in self.groups.items()}
        for name, group in groups.items():
            if group is None:
                raise value_error(
                    name,
                    "the group that a graph was compiled with",
                    "none",
                    "call torch._dynamo.reset() after a process group was destroyed",
                )
        loss = self.signature.loss
        values = [groups.get(field.name, getattr(loss, field.name)) for field in fields(loss)]
        return self.signature._replace(loss=_restored(type(loss), values, loss.identity))


def signature_of(key: str) -> Signature:
    return _SIGNATURES[key].complete()


def constant_in_graphs(function):
    """Decorator: Dynamo calls the function while tracing, and treats its result as a constant.

    `torch.compiler.assume_constant_result` sets the same attribute, but imports Dynamo.
    """
    function._dynamo_marked_constant = True
    return function


@constant_in_graphs
def _registered(
    loss: str,
    dtype: torch.dtype,
    needs: tuple,
    parts: tuple,
    autocast: bool,
    module: str,
    add_targets: bool,
) -> str:
    """Register a signature, and return its key. `loss` and `module` are names in graphs."""
    key = f"{loss} of {dtype}, {needs}, {parts}, {autocast}, {module}, {add_targets}"
    with _LOCK:
        if key not in _SIGNATURES:
            heads = tuple(map(_part, parts))
            signature = Signature(
                _LOSSES[loss], dtype, needs, heads, autocast, _MODULES.get(module), add_targets
            )
            _SIGNATURES[key] = Registered(signature, _GROUPS[loss])
        return key


def register_loss(loss: LossSpec) -> str:
    """Register a loss that was constructed outside of graphs, and return its name in graphs: its identity."""
    values = [getattr(loss, field.name) for field in fields(loss)]
    return _register(type(loss), values, loss.identity)


@constant_in_graphs
def _register_values(loss: type, values: tuple) -> str:
    """Register a loss that a graph constructs from these field values, and return its name in graphs."""
    values = _from_constants(values)
    return _register(loss, values, f"{loss.__module__}.{loss.__qualname__}{values} made in a graph")


class _Record(NamedTuple):
    """A frozen dataclass, such as a `SamplerCorrection`, which is no constant for Dynamo."""

    kind: type
    values: tuple


# Types of fields of a loss that are constants for Dynamo. torch 2.11 cannot trace `is_dataclass` of them.
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, type)


def _to_constants(value: object) -> object:
    if isinstance(value, CONSTANTS):
        return value
    if isinstance(value, tuple):
        return tuple([_to_constants(x) for x in value])
    if is_dataclass(value):
        return _Record(type(value), tuple([getattr(value, field.name) for field in fields(value)]))
    return value


def _from_constants(value: object) -> object:
    if type(value) is tuple:
        return tuple([_from_constants(x) for x in value])
    if isinstance(value, _Record):
        names = [field.name for field in fields(value.kind)]
        return value.kind(**dict(zip(names, value.values, strict=True)))
    return value


def _register(loss: type, values: Sequence, name: str) -> str:
    with _LOCK:
        if name not in _LOSSES:
            named = dict(zip([field.name for field in fields(loss)], values, strict=True))
            groups = {name: named[name] for name in ("tp_group", "cp_group")}
            groups = {name: x for name, x in groups.items() if x is not None and not isinstance(x, str)}
            _GROUPS[name] = {name: weakref.ref(x) for name, x in groups.items()}
            _LOSSES[name] = _restored(loss, [None if x in groups else named[x] for x in named], name)
        return name


def _restored(loss: type, values: Sequence, identity: str):
    """Construct a loss from the values of its fields, without checks."""
    made = object.__new__(loss)
    object.__setattr__(made, "identity", identity)
    for field, value in zip(fields(loss), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def _part(plain: tuple) -> PackedHead:
    coefficient, (hidden, weight, bias, layers), head, names = plain
    return PackedHead(coefficient, TrainedIndices(hidden, weight, bias, layers), head, names)


def register_module(module: nn.Module) -> str:
    """Register a module with layers, and return its name in graphs.

    A copy on the meta device is kept, because the graph passes the tensors of the module.
    """
    memo = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in module.parameters()}
    memo |= {id(x): x.to("meta") for x in module.buffers()}
    name = f"{type(module).__qualname__}#{next(_NUMBERS)}"
    _MODULES[name] = copy.deepcopy(module, memo)
    return name


def graph_key(signature: Signature) -> str:
    """Return the key of a signature. Dynamo traces this function, and guards on the loss and the module."""
    loss, dtype, needs, parts, autocast, module, add_targets = signature
    if loss.identity:
        name = loss.name_in_graphs()
    else:
        values = _to_constants(tuple([getattr(loss, field.name) for field in fields(loss)]))
        name = _register_values(type(loss), values)
    plain = tuple([(part.coefficient, tuple(part.indices), part.head, part.names) for part in parts])
    layers = ""
    if module is not None:
        id(module)  # makes Dynamo guard on the identity of the module: another instance may differ
        layers = module.name_in_graphs()
    return _registered(name, dtype, needs, plain, autocast, layers, add_targets)
