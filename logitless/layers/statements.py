"""The statements that `rewrite.py` matches in a forward pass, and those that it generates."""

import ast
from typing import NamedTuple


class Known(NamedTuple):
    """Names in a module's source that can be fused: attributes that are norms (and which of them are RMS
    norms) or activations, and functions that are rotations."""

    norms: frozenset[str]
    rms_norms: frozenset[str]
    activations: frozenset[str]
    rotations: frozenset[str]


class NormCall(NamedTuple):
    """`target = self.norm(argument)`, perhaps with `.transpose(...)` behind it."""

    target: str
    norm: str
    argument: ast.expr
    transpose: ast.Call | None


def is_loaded(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def is_name(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and is_name(node.value, "self")


def own(name: str) -> ast.expr:
    return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())


def call_of(helper: str, norm: str, **arguments: ast.expr) -> ast.Call:
    keywords = [ast.keyword(name, value) for name, value in arguments.items()]
    return ast.Call(ast.Name(helper, ast.Load()), [own(norm)], keywords)


def assign(value: ast.expr, *names: str, at: ast.stmt) -> ast.Assign:
    targets = [ast.Name(name, ast.Store()) for name in names]
    target = targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())
    return ast.copy_location(ast.Assign([target], value), at)


def replace_node(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for node in ast.walk(root):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list) and any(each is old for each in value):
                setattr(node, field, [new if each is old else each for each in value])


def _target(statement: ast.stmt) -> str | None:
    """The name that is assigned to, if it is one."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def sum_of(statement: ast.stmt) -> tuple[str, ast.expr, ast.expr] | None:
    """`name = left + right`."""
    name = _target(statement)
    if name is None or not isinstance(statement.value, ast.BinOp):
        return None
    value = statement.value
    return (name, value.left, value.right) if isinstance(value.op, ast.Add) else None


def copy_of(statement: ast.stmt, name: str) -> str | None:
    """The target of `target = name`."""
    return (
        _target(statement) if isinstance(statement, ast.Assign) and is_name(statement.value, name) else None
    )


def norm_call(statement: ast.stmt, known: Known) -> NormCall | None:
    target = _target(statement)
    transpose = None
    if target is None or not isinstance(call := statement.value, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "transpose":
        transpose = call
        call = call.func.value
        given = [argument.value for argument in transpose.args if isinstance(argument, ast.Constant)]
        if transpose.keywords or len(transpose.args) != 2 or given != [1, 2]:
            return None
    if not isinstance(call, ast.Call) or not is_own(call.func) or call.func.attr not in known.norms:
        return None
    if call.keywords or len(call.args) != 1 or isinstance(call.args[0], ast.Starred):
        return None
    return NormCall(target, call.func.attr, call.args[0], transpose)


def rotation_call(statement: ast.stmt, known: Known) -> ast.Call | None:
    """`..., ... = rotate(q, k, cos, sin)` of two names q and k."""
    call = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return None
    if call.func.id not in known.rotations or len(call.args) != 4:
        return None
    q, k = call.args[:2]
    return call if isinstance(q, ast.Name) and isinstance(k, ast.Name) and q.id != k.id else None


def norm_before(block: list[ast.stmt], end: int, name: str, known: Known) -> tuple[int, NormCall] | None:
    """The last statement before `end` that mentions the name, if it is `name = self.norm(...)`."""
    for position in range(end - 1, -1, -1):
        if any(is_name(node, name) for node in ast.walk(block[position])):
            call = norm_call(block[position], known)
            fits = call is not None and call.target == name and call.norm in known.rms_norms
            return (position, call) if fits else None
    return None


def halves_of(statement: ast.stmt) -> tuple[str, str] | None:
    """(a, b) of `a, b = x.chunk(2, dim=-1)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    call = statement.value
    if not isinstance(target, ast.Tuple) or not all(isinstance(each, ast.Name) for each in target.elts):
        return None
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Attribute)
        or call.func.attr != "chunk"
    ):
        return None
    if is_name(call.func.value, "torch") or len(target.elts) != 2 or target.elts[0].id == target.elts[1].id:
        return None
    given = [ast.unparse(argument) for argument in call.args] + [ast.unparse(x.value) for x in call.keywords]
    return (target.elts[0].id, target.elts[1].id) if given == ["2", "-1"] else None


def gate_of(node: ast.BinOp, known: Known) -> tuple[ast.Attribute, ast.expr, ast.expr] | None:
    """(self.act, a, b) of `self.act(a) * b` or `b * self.act(a)`."""
    if not isinstance(node.op, ast.Mult):
        return None
    for call, b in ((node.left, node.right), (node.right, node.left)):
        if isinstance(call, ast.Call) and is_own(call.func) and call.func.attr in known.activations:
            if len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred):
                return call.func, call.args[0], b
    return None
