"""The source of a forward pass and of the functions that it calls: decorators, names, changes."""

import ast
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

from torch import nn

logger = logging.getLogger(__name__)


class UnrecognizedSource(Exception):
    """A module's computation cannot be recognized by its source. The message is the reason in a report."""


def forward_of(module: nn.Module) -> FunctionType:
    """Return the forward pass of the module's class, with its decorators.

    Raises:
        UnrecognizedSource: the module runs another function, or one that is not written in Python.
    """
    if "forward" in module.__dict__:
        raise UnrecognizedSource("a forward attribute is set on this instance")
    function = type(module).forward
    if not isinstance(inspect.unwrap(function), FunctionType):
        raise UnrecognizedSource("its forward pass is not a Python function")
    return function


def undecorated_forward_of(module: nn.Module) -> FunctionType:
    """Return as `forward_of`, for a module whose whole forward pass is replaced, decorators included.

    Raises:
        UnrecognizedSource: as for `forward_of`, or the forward pass has a decorator.
    """
    function = forward_of(module)
    _check_undecorated(function)
    return function


def _check_undecorated(function: Callable) -> None:
    if hasattr(function, "__wrapped__"):
        raise UnrecognizedSource(f"its forward pass is wrapped by {_describe(function)}")


def rewrap(function: FunctionType, new: FunctionType) -> FunctionType:
    """Return a copy of a decorated function whose decorators call `new` instead of the written function.

    A decorator (made with `functools.wraps`) holds the function that it calls in its closure. Its code before
    and after the call is kept, whatever it does: convert arguments, checkpoint, choose another function.

    Raises:
        UnrecognizedSource: a decorator does not hold the function that it calls in its closure.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None:
        return new
    cells = getattr(function, "__closure__", None) or ()
    is_held = [_contents(cell) is wrapped for cell in cells]
    if not any(is_held):
        raise UnrecognizedSource(f"its forward pass is wrapped by {_describe(function)}")
    inner = rewrap(wrapped, new)
    closure = tuple(CellType(inner) if held else cell for cell, held in zip(cells, is_held))
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    copy.__wrapped__ = inner
    return copy


def _contents(cell: CellType) -> object:
    """Return the value in a cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _describe(function: Callable) -> str:
    """Return name and module of a decorator's code."""
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{code.co_name} of {function.__globals__.get('__name__')}"


def tree_of(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of a function without docstring, decorators and annotations.

    Line numbers are those of the file.

    Raises:
        UnrecognizedSource: the source is not available, is not that of a function, or does not tell what a
            decorator adds.
    """
    _check_undecorated(function)
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise UnrecognizedSource("its source is not available") from error
    if not isinstance(tree, ast.FunctionDef):
        raise UnrecognizedSource("its forward pass is not written as a function")
    ast.increment_lineno(tree, start - 1)
    tree.decorator_list = []
    tree.returns = None
    signature = tree.args
    parameters = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    for argument in [*parameters, signature.vararg, signature.kwarg]:
        if argument is not None:
            argument.annotation = None
    if ast.get_docstring(tree) is not None and len(tree.body) > 1:
        del tree.body[0]
    return tree


class Definition(NamedTuple):
    """A name of a class or of a module's globals, and the value that it had when a model was fused."""

    namespace: type | dict[str, Any]
    name: str
    value: Any


class Recognized(NamedTuple):
    """State of a fused module: what was recognized in its code, and the definitions of that code.

    The code may be replaced later, for example by `LlamaMLP.forward = mine`. A fused forward pass therefore
    starts with `is_current`, and runs the module's own forward pass if it is False.
    """

    value: Any
    definitions: tuple[Definition, ...]

    def is_current(self) -> bool:
        """Whether the code is still the one that was recognized; if not, a warning is logged once."""
        for namespace, name, value in self.definitions:
            if _look_up(namespace, name) is not value:
                _warn_of_change(namespace, name)
                return False
        return True

    def __deepcopy__(self, memo: dict) -> "Recognized":
        # A copy of a namespace would not see changes.
        return self


def _look_up(namespace: type | dict[str, Any], name: str) -> Any:
    # transformers' table of activations is a dict whose [] makes a module; `get` returns the entry.
    return namespace.get(name) if isinstance(namespace, dict) else getattr(namespace, name, None)


def _warn_of_change(namespace: type | dict[str, Any], name: str) -> None:
    is_class = isinstance(namespace, type)
    where = namespace.__qualname__ if is_class else namespace.get("__name__", type(namespace).__name__)
    _warn_once(f"{where}.{name}", id(_look_up(namespace, name)))


@functools.cache
def _warn_once(name: str, value_id: int) -> None:
    """Log a change of `name`; once for each new value."""
    logger.warning("%s was replaced after fuse_layers; fused modules that use it run the model's code", name)


def definitions_of(namespace: type | dict[str, Any], name: str) -> tuple[Definition, ...]:
    """Return the definition of a function, and of every function that it calls, for a `Recognized`.

    Args:
        namespace: the class of a method, or the globals in which a function is called.
        name: the function's name there.

    Raises:
        UnrecognizedSource: the source of one of the functions is not available.
    """
    function = _look_up(namespace, name)
    calls = calls_of(function, namespace if isinstance(namespace, type) else None)
    return Definition(namespace, name, function), *calls


def calls_of(function: FunctionType, owner: type | None = None) -> tuple[Definition, ...]:
    """Return the definitions of all functions that a function calls, directly or through others, in order.

    These are functions of its file or imported into it, and methods of `self`.

    Args:
        function: a function of a Python module, or a method of `owner`.
        owner: the class of `self`.

    Raises:
        UnrecognizedSource: the source of one of the functions is not available.
    """
    definitions: dict[tuple[int, str], Definition] = {}
    queue = [function]
    for current in queue:
        for is_method, name in _names_of(current):
            namespace = owner if is_method else current.__globals__
            value = _look_up(namespace, name)
            key = id(namespace), name
            if isinstance(value, FunctionType) and key not in definitions:
                definitions[key] = Definition(namespace, name, value)
                queue.append(value)
    return tuple(definitions.values())


def functions_of(function: FunctionType, owner: type | None = None) -> tuple[FunctionType, ...]:
    """Return a function and all functions that it calls, each once. Arguments and errors: see `calls_of`."""
    return tuple(dict.fromkeys([function, *(call.value for call in calls_of(function, owner))]))


def is_activation_table(value: object) -> bool:
    """Whether the value is transformers' `ACT2FN`, of which `ACT2FN[name]` makes a new activation."""
    return isinstance(value, dict) and type(value).__module__ == "transformers.activations"


def activations_of(cls: type, attributes: tuple[tuple[str, Any], ...]) -> tuple[Definition, ...]:
    """Return the definitions of the activations that a forward pass takes from transformers' table.

    Args:
        cls: the class of a module.
        attributes: (name, value) of the module's attributes that the forward pass reads; the values that
            are keys of the table name the activations.
    """
    definitions: list[Definition] = []
    for function in functions_of(cls.forward, cls):
        for is_method, name in _names_of(function):
            table = None if is_method else function.__globals__.get(name)
            if is_activation_table(table):
                definitions.append(Definition(function.__globals__, name, table))
                for key in [value for _, value in attributes if isinstance(value, str) and value in table]:
                    definitions.append(Definition(table, key, table.get(key)))
                    definitions += definitions_of(type(table[key]), "forward")
    return tuple(definitions)


@functools.cache
def _names_of(function: FunctionType) -> tuple[tuple[bool, str], ...]:
    """Return (whether it is an attribute of self, name) of all names in a function, in order."""
    names = []
    for node in ast.walk(tree_of(function)):
        if isinstance(node, ast.Name):
            names.append((False, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.append((True, node.attr))
    return tuple(dict.fromkeys(names))
