"""The source of a module's forward pass: whose it is, and what it says together with all that it calls."""

import ast
import hashlib
import inspect
import textwrap
from types import FunctionType

from torch import nn

# Wrappers of a class's forward that add nothing to what it computes: (file, name). All others might.
HARMLESS_WRAPPERS = {
    ("transformers.modeling_layers", "forward_with_checkpointing"),
    ("logitless.exchange", "exchanged_forward"),
}


class Unknown(Exception):
    """Why a module's computation cannot be told from its source; the text goes into a report."""


def forward_of(module: nn.Module) -> FunctionType:
    """The forward pass that the module's class was written with.

    Raises:
        Unknown: what runs is something else, put on the instance or around the class's forward.
    """
    if "forward" in module.__dict__:
        raise Unknown("a forward pass has been put on this instance")
    function = type(module).forward
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        code = function.__code__
        file = function.__globals__.get("__name__")
        if (file, code.co_name) not in HARMLESS_WRAPPERS:
            raise Unknown(f"its forward pass is wrapped by {code.co_name} of {file}")
        function = inner
    if not isinstance(function, FunctionType):
        raise Unknown("its forward pass is not a Python function")
    return function


def tree_of(function: FunctionType) -> ast.FunctionDef:
    """The function's definition, without docstring, decorators and annotations; its lines are those of the
    file.

    Raises:
        Unknown: the source is not available, or does not say it all.
    """
    try:
        lines, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise Unknown("its source is not available") from error
    if not isinstance(tree, ast.FunctionDef):
        raise Unknown("its forward pass is not written as a function")
    ast.increment_lineno(tree, start - 1)
    tree.decorator_list = []
    tree.returns = None
    arguments = tree.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in [*named, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    if ast.get_docstring(tree) is not None and len(tree.body) > 1:
        del tree.body[0]
    return tree


def fingerprint(function: FunctionType, owner: type | None = None) -> str:
    """Twelve digits that stand for the source of a function and of every one that it calls.

    Args:
        function: a function of a module, or a method of `owner`.
        owner: the class whose methods `self` has.

    Raises:
        Unknown: the source of one of them is not available.
    """
    texts = []
    waiting = [function]
    seen = set()
    while waiting:
        each = waiting.pop(0)
        if each in seen:
            continue
        seen.add(each)
        tree = tree_of(each)
        texts.append(ast.unparse(tree))
        waiting += _called(tree, each, owner)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _called(tree: ast.FunctionDef, function: FunctionType, owner: type | None) -> list[FunctionType]:
    """The Python functions of the same file and the methods of `self` that are mentioned, in that order."""
    callees = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            callees.append(function.__globals__.get(node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            callees.append(getattr(owner, node.attr, None))
    return [each for each in callees if isinstance(each, FunctionType)]
