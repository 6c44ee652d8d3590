"""Whether a function's result depends only on its arguments and on named attributes of `self`.

A test run tells what such a function computes. The functions of norms and rotations are short: assignments to
names, arithmetic, and operators of torch. Anything else is refused: loops, branches on tensors, assignments
to attributes, globals that are no functions. Random and in-place operators are refused too, and operators
that autocast runs in another dtype.
"""

import ast
import functools
import inspect
from types import FunctionType, ModuleType

from logitless.layers.source import UnrecognizedSource, is_activation_table, tree_of

STATEMENTS = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.If)
EXPRESSIONS = (
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Call,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Starred,
    ast.Tuple,
    ast.List,
    ast.Name,
    ast.Constant,
    ast.keyword,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
)
BUILTINS = ("len", "int", "float", "tuple", "slice")
# Parts of names of operators -> why a function that uses them is refused.
REFUSED_OPERATORS = {
    **dict.fromkeys(("rand", "dropout", "bernoulli"), "is random"),
    **dict.fromkeys(("rms_norm", "layer_norm", "normalize"), "autocast may run in another dtype"),
    **dict.fromkeys(("autocast", "no_grad", "hook"), "changes a state"),
}


def attributes_read(
    functions: tuple[FunctionType, ...], num_passed: int, owner: type | None = None
) -> set[str]:
    """Return the names of the attributes of `self`, other than methods, that the functions read.

    Args:
        functions: a function, and all functions that it calls (`source.functions_of`).
        num_passed: number of arguments that are passed to the function, `self` included.
        owner: the class of `self`; None if the first function is no method.

    Raises:
        UnrecognizedSource: a function depends on something else than its arguments and these attributes.
    """
    read: set[str] = set()
    for index, function in enumerate(functions):
        num_arguments = num_passed if index == 0 else len(inspect.signature(function).parameters)
        read |= _Reader(function, functions, num_arguments, owner).read
    return read


@functools.lru_cache(maxsize=256)
def _tree_of(function: FunctionType) -> ast.FunctionDef:
    return tree_of(function)


class _Reader:
    """Visits the source of one function; see `attributes_read` for the arguments."""

    def __init__(
        self,
        function: FunctionType,
        functions: tuple[FunctionType, ...],
        num_passed: int,
        owner: type | None,
    ):
        self.read: set[str] = set()
        self._function, self._functions, self._owner = function, functions, owner
        tree = _tree_of(function)
        arguments = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
        if tree.args.vararg or tree.args.kwarg:
            self._refuse("takes *args or **kwargs")
        if function.__code__.co_freevars:
            self._refuse("calls super() or is a closure")
        names = [argument.arg for argument in arguments]
        is_method = owner is not None and bool(names) and names[0] == "self"
        self._self = "self" if is_method else ""
        # Arguments that a call does not pass are constants.
        self._constant = {*names[num_passed:]}
        assigned = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        self._local = {*names, *assigned} - {self._self}
        for statement in tree.body:
            self._visit(statement)

    def _refuse(self, why: str) -> None:
        name = self._function.__qualname__
        raise UnrecognizedSource(f"its result may depend on more than its arguments: {name} {why}")

    def _visit(self, node: ast.AST) -> None:
        if not isinstance(node, (*STATEMENTS, *EXPRESSIONS)):
            self._refuse(f"has a {type(node).__name__}")
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if not isinstance(part, (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context)):
                        self._refuse("assigns to something else than names")
            self._visit(node.value)
            return
        if isinstance(node, (ast.If, ast.IfExp)):
            self._check_test(node.test)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == self._self
        ):
            self._attribute(node.attr)
            return
        if isinstance(node, ast.Subscript) and self._is_activation(node):
            self._visit(node.slice)
            return
        if isinstance(node, ast.Attribute):
            if node.attr.endswith("_") or node.attr == "data":
                self._refuse(f"uses {node.attr}, which may change its arguments")
            for part, why in REFUSED_OPERATORS.items():
                if part in node.attr:
                    self._refuse(f"uses {node.attr}, which {why}")
        if isinstance(node, ast.Name):
            self._name(node.id)
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _check_test(self, test: ast.expr) -> None:
        """A branch may depend on attributes of self, on arguments that a call does not pass, and on None."""
        compared_with_none = {
            id(node.left)
            for node in ast.walk(test)
            if isinstance(node, ast.Compare)
            and all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)
            and all(isinstance(other, ast.Constant) for other in node.comparators)
        }
        for node in ast.walk(test):
            is_name = isinstance(node, ast.Name) and id(node) not in compared_with_none
            if is_name and node.id != self._self and node.id not in self._constant:
                self._refuse("branches on its arguments")
            if isinstance(node, ast.Call):
                self._refuse("branches on a call")

    def _is_activation(self, node: ast.Subscript) -> bool:
        """Whether the node is `ACT2FN[self.name]`; `source.activations_of` names the activation."""
        is_table = isinstance(node.value, ast.Name) and node.value.id not in self._local
        key = node.slice
        return (
            is_table
            and is_activation_table(self._function.__globals__.get(node.value.id))
            and isinstance(key, ast.Attribute)
            and isinstance(key.value, ast.Name)
            and key.value.id == self._self
        )

    def _attribute(self, name: str) -> None:
        value = getattr(self._owner, name, None)
        if isinstance(value, FunctionType) and value in self._functions:
            return
        if value is not None:
            self._refuse(f"reads self.{name}, an attribute of its class")
        self.read.add(name)

    def _name(self, name: str) -> None:
        if name in self._local:
            return
        value = self._function.__globals__.get(name)
        is_torch = isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch"
        if is_torch or (isinstance(value, FunctionType) and value in self._functions):
            return
        if value is None and name in BUILTINS and name not in self._function.__globals__:
            return
        self._refuse(f"depends on {name}")
