"""What the author of a loss class may get wrong before anything is called: checked when a loss is made."""

import functools
import inspect
from contextlib import suppress
from dataclasses import fields
from typing import ClassVar, get_origin
from weakref import WeakSet

import torch
from torch import Tensor

from logitless.errors import expect

_CHECKED: WeakSet[type] = WeakSet()


def check_class(cls: type, base: type) -> None:
    """A loss class needs `terms`, and the dataclass decorator if it has fields of its own.

    Checked once a class.
    """
    if torch.compiler.is_compiling() or cls in _CHECKED:
        return
    taken = sorted(cls.roles.keys() & inspect.signature(base.__call__).parameters.keys())
    expected, remedy = "names that no call of a loss has already", "give the input another name"
    expect(not taken, "inputs", expected, ", ".join(taken), remedy, TypeError)
    written = cls.terms is not base.terms
    remedy = "write terms(self, stats, batch), or terms(self, logits, batch) for a LogitsLoss"
    expect(written, "terms", f"a method of {cls.__name__}", "none", remedy, TypeError)
    for parent in cls.__mro__:
        if issubclass(parent, base) and "__dataclass_fields__" not in parent.__dict__:
            own = [
                name for name, kind in inspect.get_annotations(parent).items() if not _is_class_variable(kind)
            ]
            expected, remedy = "the decorator @dataclass(frozen=True, kw_only=True)", "decorate the class"
            expect(not own, parent.__name__, expected, f"fields {own} without it", remedy, TypeError)
    _CHECKED.add(cls)


def _is_class_variable(kind: object) -> bool:
    return kind is ClassVar or get_origin(kind) is ClassVar or (isinstance(kind, str) and "ClassVar" in kind)


def check_fields(loss) -> None:
    """Fields are constants: hashable, of the right kind, and no tensors."""
    for field in fields(loss):
        value = getattr(loss, field.name)
        remedy = f"declare {field.name!r} in shared_inputs and pass it to the call"
        constant = not _holds_tensor(value)
        expect(constant, field.name, "a constant as a field", "a tensor", remedy, TypeError)
    if not torch.compiler.is_compiling():
        _check_hashable(loss)
    budget, remedy = loss.logits_budget, "leave it None for the default; 1 GiB is 2**30"
    number = isinstance(budget, int) and not isinstance(budget, bool) if budget is not None else True
    expect(number, "logits_budget", "a whole number of bytes or None", repr(budget), remedy, TypeError)
    expect(budget is None or budget > 0, "logits_budget", "a positive number of bytes", budget, remedy)
    expect(loss.temperature > 0, "temperature", "a positive number", loss.temperature, "use 1.0 for none")
    softcap = loss.softcap
    expect(
        softcap is None or softcap > 0, "softcap", "a positive number or None", softcap, "use None for none"
    )
    for name in ("accum_dtype", "logits_dtype"):
        dtype, remedy = getattr(loss, name), "leave it None for the default"
        fits = dtype is None or dtype.is_floating_point
        expect(fits, name, "a floating-point dtype or None", dtype, remedy)


def _holds_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or isinstance(value, tuple) and any(map(_holds_tensor, value))


def _check_hashable(loss) -> None:
    for field in fields(loss):
        try:
            hash(getattr(loss, field.name))
        except TypeError:
            kind = type(getattr(loss, field.name)).__name__
            remedy = "use a tuple for a list, and a tuple of pairs for a dict"
            raise TypeError(f"{field.name}: expected a hashable value, got {kind}; {remedy}.") from None


def made(cls: type, **options):
    """`cls(**options)`, made and checked once for equal options, for calls that make a loss of their own."""
    # Whoever keeps a process group keeps its threads.
    shared = options.get("tp_group") is None and options.get("cp_group") is None
    if torch.compiler.is_compiling() or not shared:
        return cls(**options)
    with suppress(TypeError):  # of what cannot be hashed the class itself says it
        return _made(cls, **options)
    return cls(**options)


@functools.lru_cache(maxsize=256, typed=True)
def _made(cls: type, **options):
    return cls(**options)


# Types whose values are known by their text.
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def identity_of(loss) -> str:
    """Class and field values as a text, equal for equal losses and only for these."""
    cls = type(loss)
    values = ", ".join([_text(getattr(loss, field.name)) for field in fields(loss)])
    return f"{cls.__module__}.{cls.__qualname__}@{id(cls):x}({values})"


def _text(value: object) -> str:
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))},)"
    return f"{type(value).__qualname__}@{id(value):x}"
