"""Calls as the engine sees them, made as a public call makes them."""

from torch import Tensor

from logitless.engine.call import Call, Given, Options, prepare
from logitless.engine.operands import Operands
from logitless.engine.packing import pack, unpack


def given(loss, hidden: Tensor, weight, targets: Tensor, bias: Tensor | None = None, **inputs) -> Given:
    options = {name: inputs.pop(name) for name in Options._fields if name in inputs}
    return prepare(loss, Operands(hidden, weight, targets, bias), Options(**options), inputs)


def call(*args, **options) -> Call:
    (found,) = unpack(*pack([given(*args, **options)]))
    return found
