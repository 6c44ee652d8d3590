"""Checks of a loss's class attributes and fields, when its class is defined or the loss is constructed."""

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import ClassVar, Literal, NamedTuple, Union, get_args, get_origin
from weakref import WeakSet

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.readers.logits import LogitsReader
from logitless.engine.readers.tokens import TokenReader
from logitless.errors import check_number, meant, type_error, value_error
from logitless.losses.arguments import SYNONYMS, synonym

_CHECKED: WeakSet[type] = WeakSet()


# Class variables of `LinearLoss` that a loss may offer as fields.
OPTIONAL_FIELDS = ("return_logps", "return_predictions")


def check_names(cls: type) -> None:
    """Raise TypeError if a field or an input of a user's loss hides an attribute that the library reads."""
    if _is_of_library(cls):
        return
    for name, kind in inspect.get_annotations(cls).items():
        if _is_class_variable(kind) or name in OPTIONAL_FIELDS:
            continue
        for base in cls.__mro__[1:]:
            if not _is_of_library(base) or name not in vars(base):
                continue
            if name not in [field.name for field in fields(base)]:
                expected = f"a name that {base.__name__} does not use, as a field of {cls.__name__}"
                remedy = f"rename the field, or annotate it as ClassVar to set {name} of the class"
                raise type_error(name, expected, repr(name), remedy)
    hidden = [name for name in cls.roles if name in _names_of_batches()]
    if hidden:
        expected = f"names that Batch does not use, as inputs of {cls.__name__}"
        raise type_error("inputs", expected, ", ".join(hidden), "rename the input")


def _is_of_library(cls: type) -> bool:
    return cls.__module__.startswith("logitless.")


@functools.cache
def _names_of_batches() -> frozenset[str]:
    return frozenset(dir(Batch(torch.zeros(1, dtype=torch.int64, device="cpu"), 1, {})))


def check_class(cls: type, base: type) -> None:
    """Raise TypeError unless a loss class defines `terms`, is a dataclass if it has fields, and may have the
    teacher or the reference that it declares.

    Each class is checked once.
    """
    if torch.compiler.is_compiling() or cls in _CHECKED:
        return
    taken = sorted(cls.roles.keys() & inspect.signature(base.__call__).parameters.keys())
    if taken:
        raise type_error(
            "inputs",
            "names that are not arguments of every loss",
            ", ".join(taken),
            "rename the input",
        )
    if cls.terms is base.terms:
        raise type_error(
            "terms",
            f"a method of {cls.__name__}",
            "none",
            "define terms(self, stats, batch), or terms(self, logits, batch) for a LogitsLoss",
        )
    if cls.teacher and cls.reader is TokenReader:
        raise type_error(
            "teacher",
            "False for a loss of statistics per token",
            True,
            "derive from LogitsLoss, whose terms get batch.teacher_logits",
        )
    if cls.reference and cls.reader is LogitsReader:
        raise type_error("reference", "False for a LogitsLoss", True, "derive from TokenLoss")
    if cls.reference and not (
        hasattr(cls, "ref_transform") or "ref_transform" in getattr(cls, "__dataclass_fields__", ())
    ):
        raise type_error(
            "reference",
            f"a property ref_transform of {cls.__name__}",
            "none",
            "define it, such as `return self.logit_transform` for a head with the same softcap and scale",
        )
    for parent in cls.__mro__:
        if issubclass(parent, base) and "__dataclass_fields__" not in parent.__dict__:
            undecorated = [
                name for name, kind in inspect.get_annotations(parent).items() if not _is_class_variable(kind)
            ]
            if undecorated:
                raise type_error(
                    parent.__name__,
                    "the decorator @dataclass(frozen=True, kw_only=True)",
                    f"fields {undecorated} without it",
                    "decorate the class",
                )
    _CHECKED.add(cls)


def check_constructor(cls: type, positional: Sequence, options: Mapping) -> None:
    """Raise TypeError unless the constructor of a loss takes these arguments.

    Called only if an argument is not a field by name: a user may have written another constructor.
    """
    with suppress(TypeError):
        inspect.signature(cls.__init__).bind(None, *positional, **options)
        return
    name = cls.__name__
    if positional:
        remedy = f"pass tensors to the call: {name}()(hidden, weight, targets)"
        raise type_error(name, "options by name", f"{len(positional)} positional arguments", remedy)
    names = [field.name for field in fields(cls)]
    unknown = [option for option in options if option not in names]
    remedy = meant(unknown[0], names, "leave it out")
    tensors = ("hidden", "weight", "targets", *cls.keywords)
    if unknown[0] in tensors:
        remedy = "pass it to the call of the loss"
    elif unknown[0] in SYNONYMS:
        remedy = f"{synonym(unknown[0], tensors)}, to the call of the loss"
    raise type_error("options", f"fields of {name} ({', '.join(names)})", ", ".join(unknown), remedy)


def check_statistics(cls: type, differentiates: object, observes: object) -> None:
    """Raise TypeError for unknown statistics in `observes` or non-differentiable ones in `differentiates`.

    Called when the class is defined and, as both may be properties, when the loss is constructed.
    """
    reader = cls.reader
    for field, declared, allowed, which in (
        ("differentiates", differentiates, reader.differentiable, "a gradient"),
        ("observes", observes, reader.statistics, "them"),
    ):
        if isinstance(declared, property):
            continue
        if not isinstance(declared, (tuple, list)):
            raise type_error(
                field, f"a tuple of names in {cls.__name__}", repr(declared), f"write ({declared!r},)"
            )
        for name in declared:
            if name not in allowed:
                expected = f"any of {', '.join(allowed) or 'none'} in {cls.__name__}, which have {which}"
                remedy = "leave it out"
                if field == "differentiates" and name in reader.statistics:
                    remedy = "put it into observes and take it as a constant, or write a LogitsLoss"
                raise type_error(field, expected, repr(name), remedy)


def _is_class_variable(kind: object) -> bool:
    return kind is ClassVar or get_origin(kind) is ClassVar or (isinstance(kind, str) and "ClassVar" in kind)


class NumericField(NamedTuple):
    """The allowed values of a field that is annotated as a number or as a sequence of numbers."""

    whole: bool  # integers only
    several: bool  # a sequence of numbers
    others: tuple  # allowed values that are not numbers, such as None

    @property
    def expected(self) -> str:
        """A description of the allowed values, for an error message."""
        if self.several:
            number = "a sequence of whole numbers" if self.whole else "a sequence of finite numbers"
        else:
            number = "a whole number" if self.whole else "a finite number"
        return " or ".join([number, *map(repr, self.others)])


def numeric_fields(cls: type) -> tuple[tuple[str, NumericField], ...]:
    """(name, field) of the numeric fields of a loss class, from its annotations and those of its bases."""
    numeric: dict[str, NumericField] = {}
    for parent in reversed(cls.__mro__):
        for name, annotation in inspect.get_annotations(parent).items():
            numeric.pop(name, None)
            field = _numeric_field(_resolved(annotation, parent))
            if field is not None:
                numeric[name] = field
    return tuple(numeric.items())


def _resolved(annotation: object, owner: type) -> object:
    """Evaluate an annotation if it is a string; None if the string cannot be evaluated."""
    if not isinstance(annotation, str):
        return annotation
    module = sys.modules.get(owner.__module__)
    try:
        return eval(annotation, dict(vars(module)) if module else {})
    except Exception:
        return None


def _numeric_field(annotation: object) -> NumericField | None:
    union = get_origin(annotation) in (Union, UnionType)
    numbers = set()
    several = False
    literals = []
    for option in get_args(annotation) if union else (annotation,):
        if option in (int, float):
            numbers.add(option)
        elif option is NoneType:
            literals.append(None)
        elif get_origin(option) is Literal:
            literals.extend(get_args(option))
        elif get_origin(option) in (Sequence, tuple, list):
            several = True
            numbers.update(get_args(option))
        else:
            return None
    numbers.discard(Ellipsis)
    if not numbers or not numbers <= {int, float}:
        return None
    return NumericField(numbers == {int}, several, tuple(literals))


def check_numbers(loss) -> None:
    """Raise TypeError or ValueError unless numeric fields are finite numbers (not strings or bools)."""
    for name, field in loss.numeric:
        value = getattr(loss, name)
        if any(value is literal or value == literal for literal in field.others):
            continue
        if field.several and not isinstance(value, tuple):
            raise TypeError(f"{name}: expected {field.expected}, got {value!r}; pass a tuple of numbers.")
        for number in value if field.several else (value,):
            check_number(name, number, field.expected, whole=field.whole)


def check_fields(loss) -> None:
    """Raise TypeError or ValueError unless all fields are hashable constants of the declared type.

    Tensors are refused.
    """
    for field in fields(loss):
        if _holds_tensor(getattr(loss, field.name)):
            name = field.name
            remedy = f"declare {name!r} in shared_inputs and pass it to the call"
            if name == "temperature":
                remedy = "pass a number; or, for a head without bias and softcap, divide hidden by it, with "
                remedy += "temperature=1.0"
            elif name in dict(loss.numeric):
                remedy = f"pass a number, such as {name}.item(), or {remedy}"
            raise type_error(name, "a constant as a field", "a tensor", remedy)
    if not torch.compiler.is_compiling():
        _check_hashable(loss)
    budget = loss.logits_budget
    remedy = 'leave it None for the default, or write "1GiB"'
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool)):
        raise type_error("logits_budget", "a whole number of bytes or None", repr(budget), remedy)
    check_numbers(loss)
    if budget is not None and budget <= 0:
        raise value_error("logits_budget", "a positive number of bytes", budget, remedy)
    if loss.temperature <= 0:
        raise value_error("temperature", "a positive number", loss.temperature, "use 1.0 for none")
    if loss.softcap is not None and loss.softcap <= 0:
        raise value_error("softcap", "a positive number or None", loss.softcap, "use None for none")
    for name in ("accum_dtype", "logits_dtype"):
        dtype = getattr(loss, name)
        if dtype is not None and not dtype.is_floating_point:
            raise value_error(name, "a floating-point dtype or None", dtype, "leave it None for the default")


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


def cached_loss(cls: type, **options):
    """Return `cls(**options)`, cached by its options, for functions that construct a loss in every call."""
    # A loss with a process group is not cached, because the cache would keep the group alive.
    shared = options.get("tp_group") is None and options.get("cp_group") is None
    if torch.compiler.is_compiling() or not shared:
        return cls(**options)
    with suppress(TypeError):  # the constructor below raises the error about unhashable options
        return _made(cls, **options)
    return cls(**options)


@functools.lru_cache(maxsize=256, typed=True)
def _made(cls: type, **options):
    return cls(**options)


def without_labels(loss):
    """Return the loss for a call without labels, whose targets say only which tokens are supervised.

    Its `ignore_index` is no id: a head of one row has no other id than 0 for the supervised tokens.
    """
    if loss.ignore_index != 0:
        return loss
    options = {field.name: getattr(loss, field.name) for field in fields(loss)}
    return cached_loss(type(loss), **options | {"ignore_index": -100})


# Types whose values are identified by their repr.
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def identity_of(loss) -> str:
    """A string of the class and its field values. Two losses are equal if and only if their strings are.

    A field may be a frozen dataclass, such as a `SamplerCorrection`.
    """
    cls = type(loss)
    values = ", ".join([_text(getattr(loss, field.name)) for field in fields(loss)])
    return f"{cls.__module__}.{cls.__qualname__}@{id(cls):x}({values})"


def _text(value: object) -> str:
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Real):  # such as numpy's
        return f"{type(value).__qualname__} {value!r}"
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))},)"
    if is_dataclass(value) and type(value).__dataclass_params__.frozen:
        return identity_of(value)
    return f"{type(value).__qualname__}@{id(value):x}"
