"""The source of a module's forward pass, and its fingerprint together with all functions that it calls."""

import ast
import hashlib
import inspect
import textwrap
from types import FunctionType

from torch import nn

# Wrappers (module, function name) of a class's forward that do not change its result. Other wrappers may.
HARMLESS_WRAPPERS = {
    ("transformers.modeling_layers", "forward_with_checkpointing"),
    ("logitless.exchange", "exchanged_forward"),
}


class UnrecognizedSource(Exception):
    """A module's computation cannot be recognized by its source. The message is the reason in a report."""


def forward_of(module: nn.Module) -> FunctionType:
    """Return the forward pass in the source of the module's class.

    Raises:
        UnrecognizedSource: the module runs another function: one that is set on the instance, or a wrapper.
    """
    if "forward" in module.__dict__:
        raise UnrecognizedSource("a forward attribute is set on this instance")
    function = type(module).forward
    while (wrapped := getattr(function, "__wrapped__", None)) is not None:
        code = function.__code__
        module_name = function.__globals__.get("__name__")
        if (module_name, code.co_name) not in HARMLESS_WRAPPERS:
            raise UnrecognizedSource(f"its forward pass is wrapped by {code.co_name} of {module_name}")
        function = wrapped
    if not isinstance(function, FunctionType):
        raise UnrecognizedSource("its forward pass is not a Python function")
    return function


def tree_of(function: FunctionType) -> ast.FunctionDef:
    """Return the syntax tree of a function without docstring, decorators and annotations.

    Line numbers are those of the file.

    Raises:
        UnrecognizedSource: the source is not available, or is not that of a function.
    """
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
