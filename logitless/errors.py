"""Errors in one form, `argument: expected X, got Y; remedy.`, and warnings that point at the caller's own
line."""

import math
import os
import sys
import warnings
from collections.abc import Iterable
from numbers import Integral, Real

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


def check_choice(argument: str, value: object, choices: Iterable) -> None:
    """Raise ValueError unless the value is one of the choices, which the message lists."""
    if value not in choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        raise value_error(argument, expected, repr(value), "pick one of these")


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
