"""The source of a module's forward pass, and its fingerprint together with all functions that it calls."""

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from types import CellType, FunctionType

from torch import nn


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
    if hasattr(function, "__wrapped__"):
        raise UnrecognizedSource(f"its forward pass is wrapped by {_describe(function)}")
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


def fingerprint(function: FunctionType, owner: type | None = None) -> str:
    """Return a hash of 12 hex digits of the source of a function and of every function that it calls.

    Args:
        function: a function of a Python module, or a method of `owner`.
        owner: the class of `self`.

    Raises:
        UnrecognizedSource: the source of one of the functions is not available.
    """
    sources = []
    queue = [function]
    seen = set()
    while queue:
        current = queue.pop(0)
        if current in seen:
            continue
        seen.add(current)
        tree = tree_of(current)
        sources.append(ast.unparse(tree))
        queue += _find_callees(tree, current, owner)
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:12]


def _find_callees(tree: ast.FunctionDef, function: FunctionType, owner: type | None) -> list[FunctionType]:
    """Return the functions of the same file and the methods of `self` that occur in the tree, in order."""
    callees = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            callees.append(function.__globals__.get(node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            callees.append(getattr(owner, node.attr, None))
    return [callee for callee in callees if isinstance(callee, FunctionType)]
