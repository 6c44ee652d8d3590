"""Errors in one form, `argument: expected X, got Y; remedy.`, and warnings that point at the caller's own
line."""

import difflib
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from types import MappingProxyType

import torch

# Where the frames between a caller and a warning come from.
_BETWEEN = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))


def message(argument: str, expected: str, got: object, remedy: str) -> str:
    """The text of an error."""
    return f"{argument}: expected {expected}, got {got}; {remedy}."


def value_error(argument: str, expected: str, got: object, remedy: str) -> ValueError:
    """A ValueError with the text of `message`."""
    return ValueError(message(argument, expected, got, remedy))


def type_error(argument: str, expected: str, got: object, remedy: str) -> TypeError:
    """A TypeError with the text of `message`."""
    return TypeError(message(argument, expected, got, remedy))


def check_choice(
    argument: str, value: object, choices: Iterable, remedies: Mapping[object, str] = MappingProxyType({})
) -> None:
    """Raise ValueError unless the value is one of the choices, which the message lists.

    `remedies` has those for values that other libraries take.
    """
    if value not in choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        remedy = remedies.get(value) if isinstance(value, str) else None
        remedy = remedy or meant(value, choices, "pick one of these")
        raise value_error(argument, expected, repr(value), remedy)


# Units of `to_bytes`, in lower case.
UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}


def to_bytes(argument: str, size: int | str) -> int:
    """Convert a size to bytes: an int, or text such as "12GiB", "12GB" or "1.5 GiB".

    Raises:
        TypeError: the size is neither an int nor text.
        ValueError: the text has another form, or the size is not positive.
    """
    expected = "a positive number of bytes"
    remedy = 'write "12GiB", or pass the bytes as an int'
    number = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        unit = UNITS.get(match[2].lower()) if match else None
        if unit is None:
            raise value_error(argument, expected, repr(size), remedy)
        number = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if not isinstance(number, int) or isinstance(number, bool):
        raise type_error(argument, expected, repr(size), remedy)
    if number <= 0:
        raise value_error(argument, expected, repr(size), remedy)
    return number


to_bytes._dynamo_marked_constant = True  # Dynamo does not trace it: its arguments are constants


def meant(value: object, choices: Iterable, otherwise: str) -> str:
    """The remedy for a misspelled name: the most similar one of the choices, if any is similar."""
    names = [choice for choice in choices if isinstance(choice, str)]
    close = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    return f"perhaps {close[0]} is meant" if close else otherwise


def check_number(
    argument: str, value: object, expected: str = "a finite number", *, whole: bool = False
) -> None:
    """Raise unless the value is a finite number (with `whole`: an integer), not text and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise type_error(argument, expected, repr(value), "pass a number")
    if not math.isfinite(value):
        remedy = "check the computation that it comes from"
        raise value_error(argument, expected, value, remedy)


def warn(message: str, category: type[Warning]) -> None:
    """A warning at the line that called the library: the first frame outside of it and of torch."""
    level = 1
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        level = level + 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
