"""Functions that match the statements that `rewrite.py` replaces, and generate the new ones."""

import ast
from collections.abc import Iterator
from typing import NamedTuple


class FusibleNames(NamedTuple):
    """The names in a module's source that can be fused.

    Attributes:
        norms: attributes of the module that are norms.
        rms_norms: those of `norms` that are RMS norms.
        activations: attributes of the module that are activations.
        rotations: functions that rotate queries and keys.
        projections: attributes of the module that are LoRA layers.
        single_rotations: those of `rotations` that rotate one tensor.
    """

    norms: frozenset[str]
    rms_norms: frozenset[str]
    activations: frozenset[str]
    rotations: frozenset[str]
    projections: frozenset[str] = frozenset()
    single_rotations: frozenset[str] = frozenset()


class NormCall(NamedTuple):
    """`target = self.norm(argument)`, or `target = self.norm(argument).transpose(1, 2)`."""

    target: str
    norm: str
    argument: ast.expr
    transpose: ast.Call | None


def is_loaded(node: ast.AST) -> bool:
    """Whether the node reads a variable or attribute."""
    return isinstance(getattr(node, "ctx", None), ast.Load)


def is_name(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_self_attribute(node: ast.expr) -> bool:
    """Whether the node is `self.name`."""
    return isinstance(node, ast.Attribute) and is_name(node.value, "self")


def self_attribute(name: str) -> ast.expr:
    """Return `self.name`."""
    return ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())


def make_helper_call(helper: str, norm: str, **arguments: ast.expr) -> ast.Call:
    """Return `helper(self.norm, **arguments)`."""
    keywords = [ast.keyword(name, value) for name, value in arguments.items()]
    return ast.Call(ast.Name(helper, ast.Load()), [self_attribute(norm)], keywords)


def make_assignment(value: ast.expr, *names: str, at: ast.stmt) -> ast.Assign:
    """Return `names = value` with the line number of the statement `at`."""
    targets = [ast.Name(name, ast.Store()) for name in names]
    target = targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())
    return ast.copy_location(ast.Assign([target], value), at)


def replace_node(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Replace the node `old` inside `root`."""
    for node in ast.walk(root):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list) and any(each is old for each in value):
                setattr(node, field, [new if each is old else each for each in value])


def _target(statement: ast.stmt) -> str | None:
    """Return the name of `name = value`; None for any other statement."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def match_sum(statement: ast.stmt) -> tuple[str, ast.expr, ast.expr] | None:
    """Return (name, left, right) of `name = left + right`; None for any other statement."""
    name = _target(statement)
    if name is None or not isinstance(statement.value, ast.BinOp):
        return None
    value = statement.value
    return (name, value.left, value.right) if isinstance(value.op, ast.Add) else None


def match_copy(statement: ast.stmt, name: str) -> str | None:
    """Return the target of `target = name`; None for any other statement."""
    if not isinstance(statement, ast.Assign) or not is_name(statement.value, name):
        return None
    return _target(statement)


def match_norm_call(statement: ast.stmt, fusible: FusibleNames) -> NormCall | None:
    """Return the `NormCall` of a statement; None if it is none."""
    target = _target(statement)
    transpose = None
    if target is None or not isinstance(call := statement.value, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "transpose":
        transpose = call
        call = call.func.value
        arguments = [argument.value for argument in transpose.args if isinstance(argument, ast.Constant)]
        if transpose.keywords or len(transpose.args) != 2 or arguments != [1, 2]:
            return None
    if (
        not isinstance(call, ast.Call)
        or not is_self_attribute(call.func)
        or call.func.attr not in fusible.norms
    ):
        return None
    if call.keywords or len(call.args) != 1 or isinstance(call.args[0], ast.Starred):
        return None
    return NormCall(target, call.func.attr, call.args[0], transpose)


def match_rotation_call(statement: ast.stmt, fusible: FusibleNames) -> ast.Call | None:
    """Return the call in `q, k = rotate(q, k, cos, sin)` of two names q and k; None for any other statement.

    With other targets the code could use the values before the rotation again.
    """
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    call = statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        return None
    if call.func.id not in fusible.rotations or len(call.args) != 4:
        return None
    names = call.args[:2]
    target = statement.targets[0]
    targets = target.elts if isinstance(target, ast.Tuple) else []
    if len(targets) != 2 or not all(isinstance(each, ast.Name) for each in (*names, *targets)):
        return None
    is_in_place = [each.id for each in targets] == [each.id for each in names]
    return call if is_in_place and names[0].id != names[1].id else None


def match_single_rotation_call(statement: ast.stmt, fusible: FusibleNames) -> ast.Call | None:
    """Return the call in `x = rotate(x, cos, sin)`, of any further arguments by name; None for any other."""
    target = _target(statement)
    if target is None or not isinstance(call := statement.value, ast.Call):
        return None
    if not isinstance(call.func, ast.Name) or call.func.id not in fusible.single_rotations:
        return None
    if len(call.args) != 3 or any(keyword.arg is None for keyword in call.keywords):
        return None
    return call if is_name(call.args[0], target) else None


def find_norm_before(
    block: list[ast.stmt], end: int, name: str, fusible: FusibleNames
) -> tuple[int, NormCall] | None:
    """Return (position, `NormCall`) of the last statement before `end` with `name`, if it is its norm."""
    for position in range(end - 1, -1, -1):
        if any(is_name(node, name) for node in ast.walk(block[position])):
            call = match_norm_call(block[position], fusible)
            is_rms_norm_of_name = call is not None and call.target == name and call.norm in fusible.rms_norms
            return (position, call) if is_rms_norm_of_name else None
    return None


def match_halves(statement: ast.stmt) -> tuple[str, str] | None:
    """Return (a, b) of `a, b = x.chunk(2, dim=-1)`; None for any other statement."""
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
    arguments = [ast.unparse(argument) for argument in call.args] + [
        ast.unparse(x.value) for x in call.keywords
    ]
    return (target.elts[0].id, target.elts[1].id) if arguments == ["2", "-1"] else None


def match_gate(node: ast.BinOp, fusible: FusibleNames) -> tuple[ast.Attribute, ast.expr, ast.expr] | None:
    """Return (self.act, a, b) of `self.act(a) * b` or `b * self.act(a)`; None for any other node."""
    if not isinstance(node.op, ast.Mult):
        return None
    for call, b in ((node.left, node.right), (node.right, node.left)):
        if (
            isinstance(call, ast.Call)
            and is_self_attribute(call.func)
            and call.func.attr in fusible.activations
        ):
            if len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred):
                return call.func, call.args[0], b
    return None


# Attributes of a tensor that changes of its values do not affect.
METADATA = ("shape", "dtype", "device", "ndim")
# Expressions with parts that may not be evaluated, or several times.
CONDITIONAL = (
    ast.IfExp,
    ast.BoolOp,
    ast.Compare,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


class ProjectionGroup(NamedTuple):
    """Calls `self.a(x)`, `self.b(x)`, ... of one input, in the order of evaluation."""

    position: int  # of the statement with the first call, in its block
    calls: list[ast.Call]


def find_projections(block: list[ast.stmt], fusible: FusibleNames) -> list[ProjectionGroup]:
    """Return the calls of different LoRA layers of one input x that can be one call before the first.

    Their statements follow each other in one block: assignments to names, and possibly a `return` at the end.
    Each call is evaluated exactly once. From the first statement to the last, x is used in nothing else, and
    neither assigned nor changed in place.
    """
    calls_of = [_projection_calls(statement, fusible) for statement in block]
    inputs = dict.fromkeys(call.args[0].id for calls in calls_of for call in calls)
    return [group for x in inputs for group in _find_projections_of(x, block, calls_of)]


def _find_projections_of(
    x: str, block: list[ast.stmt], calls_of: list[list[ast.Call]]
) -> Iterator[ProjectionGroup]:
    group = ProjectionGroup(0, [])
    for position, (statement, calls) in enumerate(zip(block, calls_of)):
        calls = [call for call in calls if call.args[0].id == x]
        if not _has_no_other_use(x, statement, calls):
            yield from _complete(group)
            group = ProjectionGroup(0, [])
            continue
        names = [call.func.attr for call in (*group.calls, *calls)]
        if len(set(names)) < len(names):
            yield from _complete(group)
            group = ProjectionGroup(0, [])
        group = ProjectionGroup(group.position if group.calls else position, [*group.calls, *calls])
        if x in _assigned_names(statement):
            yield from _complete(group)
            group = ProjectionGroup(0, [])
    yield from _complete(group)


def _complete(group: ProjectionGroup) -> list[ProjectionGroup]:
    names = {call.func.attr for call in group.calls}
    return [group] if 1 < len(names) == len(group.calls) else []


def _projection_calls(statement: ast.stmt, fusible: FusibleNames) -> list[ast.Call]:
    """Return all calls `self.a(x)` of LoRA layers with a name x that the statement evaluates exactly once."""
    if not isinstance(statement, (ast.Assign, ast.Return)):
        return []
    found = []
    nodes = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, CONDITIONAL):
            continue
        # In reverse, as the last is popped first.
        nodes += reversed(list(ast.iter_child_nodes(node)))
        if (
            isinstance(node, ast.Call)
            and is_self_attribute(node.func)
            and node.func.attr in fusible.projections
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Name)
            and not node.keywords
        ):
            found.append(node)
    return found


def _has_no_other_use(x: str, statement: ast.stmt, calls: list[ast.Call]) -> bool:
    """Whether the statement may be between two of the calls of x, or hold some: see `find_projections`."""
    if not isinstance(statement, (ast.Assign, ast.Return)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    for target in targets:
        if not all(isinstance(node, (ast.Name, ast.Tuple, ast.expr_context)) for node in ast.walk(target)):
            return False
    allowed = {id(call.args[0]) for call in calls}
    nodes = [] if statement.value is None else list(ast.walk(statement.value))
    for node in nodes:
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) or _is_in_place(node):
            return False
        if isinstance(node, ast.Attribute) and node.attr in METADATA:
            allowed.add(id(node.value))
    return not any(is_name(node, x) and id(node) not in allowed for node in nodes)


def _is_in_place(node: ast.AST) -> bool:
    """Whether the node is a call that by its name changes a tensor in place: `y.mul_(2)`, `f(y, out=x)`."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    names_a_change = name.endswith("_") and not name.endswith("__")
    return names_a_change or any(keyword.arg in ("out", "inplace") for keyword in node.keywords)


def _assigned_names(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
