"""Rewrite a forward pass: replace some of its statements by fused ones, and keep all others.

Replacements in a module whose `norm` and `act` are known (for any names, and either order of a sum):

    h = r + x * m; r = h; h = self.norm(h)                  h, r = _fused_add_norm(self.norm, r, x, m)
    h = self.norm(h); h = r + h                             h = _fused_norm_add(self.norm, h, r)
    q = self.norm(e).transpose(1, 2) ... rotate(q, k, ..)   q = e.transpose(1, 2) ... rotate.normed(...)
    q, k = rotate(q, k, cos, sin)                           q, k = rotate(q, k, cos, sin), another `rotate`
    self.act(a) * b                                         _fused_gate(self.act, a, b)
    a, b = x.chunk(2, dim=-1); ... self.act(a) * b          _fused_gate_packed(self.act, x)

Every replacement computes the same as the statements it replaces, for any operands (`fused_forwards.py`), so
nothing else of the forward pass needs to be known. Therefore there is no table of decoder layers and
attentions: one forward pass of transformers is shared by 73 classes, and 119 others by one to seven.
"""

import ast
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from logitless.layers.source import Unknown, tree_of
from logitless.layers.statements import (
    Known,
    assign,
    call_of,
    copy_of,
    gate_of,
    halves_of,
    is_loaded,
    is_name,
    is_own,
    norm_before,
    norm_call,
    own,
    replace_node,
    rotation_call,
    sum_of,
)


class Rewritten(NamedTuple):
    function: FunctionType
    replaced: tuple[str, ...]  # in words


def rewrite(function: FunctionType, known: Known, bound: dict[str, Any]) -> Rewritten | None:
    """The function with fused statements, or None if it has none that could be fused.

    Args:
        bound: values of the names that the new statements use, and of rotations.

    Raises:
        Unknown: its source cannot be compiled outside of its class.
    """
    if not any(known):
        return None
    tree = tree_of(function)
    rewriter = _Rewriter(tree, known)
    tree = rewriter.visit(tree)
    if not rewriter.replaced:
        return None
    if function.__code__.co_freevars or any(
        name.startswith("__") and not name.endswith("__") for name in _names(tree)
    ):
        raise Unknown("its forward pass depends on where it is defined")
    return Rewritten(_compiled(function, tree, bound), tuple(dict.fromkeys(rewriter.replaced)))


def _names(tree: ast.AST) -> list[str]:
    nodes = list(ast.walk(tree))
    return [x.id for x in nodes if isinstance(x, ast.Name)] + [
        x.attr for x in nodes if isinstance(x, ast.Attribute)
    ]


def _compiled(function: FunctionType, tree: ast.FunctionDef, bound: dict[str, Any]) -> FunctionType:
    """Compile the function inside an outer one whose arguments are the new names.

    Its globals stay the live globals of the module."""
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [default and ast.Constant(None) for default in tree.args.kw_defaults]
    module = ast.parse(f"def make({', '.join(bound)}):\n    return {tree.name}")
    module.body[0].body.insert(0, tree)
    ast.fix_missing_locations(module)
    made: dict[str, Callable] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, made)
    new = made["make"](**bound)
    new.__defaults__, new.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    return new


class _Rewriter(ast.NodeTransformer):
    def __init__(self, tree: ast.FunctionDef, known: Known) -> None:
        self.tree = tree
        self.known = known
        self.replaced = []

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list):
                self._rotate_normed(block)
                self._unpack(block)
                setattr(node, field, self._joined(block))
        return super().visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        sides = gate_of(node, self.known)
        if sides is None:
            return node
        act, a, b = sides
        self.replaced.append(f"gate {act.attr}")
        # Keywords are evaluated in the order in which they are written, which is that of the product.
        order = [("a", a), ("b", b)] if node.right is b else [("b", b), ("a", a)]
        keywords = [ast.keyword(name, value) for name, value in order]
        return ast.copy_location(ast.Call(ast.Name("_fused_gate", ast.Load()), [act], keywords), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in self.known.rotations:
            self.replaced.append(node.func.id)
        return self.generic_visit(node)

    def _joined(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """Join sums and norms that follow each other to one statement."""
        done = []
        rest = block
        while rest:
            new, used = self._norm_add(rest) or self._add_norm(rest) or (rest[0], 1)
            done.append(new)
            rest = rest[used:]
        return done

    def _norm_add(self, rest: list[ast.stmt]) -> tuple[ast.stmt, int] | None:
        if len(rest) < 2:
            return None
        call = norm_call(rest[0], self.known)
        total = sum_of(rest[1])
        if call is None or call.transpose or total is None or total[0] != call.target:
            return None
        if call.norm not in self.known.rms_norms:
            return None
        h, left, right = total
        other = None
        if is_name(left, h):
            other = right
        elif is_name(right, h):
            other = left
        if not isinstance(other, ast.Name) or other.id == h:
            return None
        self.replaced.append(f"{call.norm} and the addition after it")
        value = call_of("_fused_norm_add", call.norm, x=call.argument, residual=other)
        return assign(value, h, at=rest[0]), 2

    def _add_norm(self, rest: list[ast.stmt]) -> tuple[ast.stmt, int] | None:
        total = sum_of(rest[0])
        if total is None:
            return None
        h, left, right = total
        copy = copy_of(rest[1], h) if len(rest) > 1 else None
        used = 2 if copy is None else 3
        call = norm_call(rest[used - 1], self.known) if len(rest) >= used else None
        if call is None or call.transpose or not is_name(call.argument, h):
            return None
        # The sum has two names at most, and needs one that the norm's result does not take.
        names = [name for name in (h, copy) if name is not None and name != call.target]
        if len(names) > 1:
            return None
        self.replaced.append(f"the addition before {call.norm}, and the norm")
        scaled = {}
        if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult) and is_own(right.right):
            right, scaled = right.left, {"multiplier": right.right}
        value = call_of("_fused_add_norm", call.norm, residual=left, x=right, **scaled)
        return assign(value, call.target, names[0] if names else "_fused_sum", at=rest[0]), used

    def _rotate_normed(self, block: list[ast.stmt]) -> None:
        """Move the norms of q and k into the rotation after them."""
        for index, statement in enumerate(block):
            call = rotation_call(statement, self.known)
            if call is None:
                continue
            found = [norm_before(block, index, argument.id, self.known) for argument in call.args[:2]]
            if None in found or bool(found[0][1].transpose) != bool(found[1][1].transpose):
                continue
            norms = []
            for position, call_before in found:
                norms.append(own(call_before.norm))
                value = call_before.argument
                if call_before.transpose:
                    value = call_before.transpose
                    value.func.value = call_before.argument
                block[position] = assign(value, call_before.target, at=block[position])
            order = ast.Constant(bool(found[0][1].transpose))
            call.func = ast.Attribute(call.func, "normed", ast.Load())
            call.args = [*norms, order, *call.args]
            self.replaced.append(f"{found[0][1].norm}, {found[1][1].norm} and the rotation after them")
            return

    def _unpack(self, block: list[ast.stmt]) -> None:
        """`a, b = x.chunk(2, dim=-1)` before the one use of a and b, a gate with a as its activation's
        argument, is left out."""
        for first, second in zip(block, block[1:]):
            names = halves_of(first)
            if names is None:
                continue
            products = [node for node in ast.walk(second) if isinstance(node, ast.BinOp)]
            for product in products:
                act, a, b = gate_of(product, self.known) or (None, None, None)
                if act is None or not (is_name(a, names[0]) and is_name(b, names[1])):
                    continue
                if not all(self._dies(name, first, second) for name in names):
                    continue
                block[block.index(first)] = assign(first.value.func.value, names[0], at=first)
                call = ast.Call(
                    ast.Name("_fused_gate_packed", ast.Load()), [act, ast.Name(names[0], ast.Load())], []
                )
                replace_node(second, product, ast.copy_location(call, product))
                self.replaced.append(f"gate {act.attr} of both halves of one tensor")

    def _dies(self, name: str, first: ast.stmt, second: ast.stmt) -> bool:
        """Whether the product in `second` is all that reads the value which `first` assigns to the name."""
        if sum(is_name(node, name) for node in ast.walk(second) if is_loaded(node)) != 1:
            return False
        if isinstance(second, ast.Assign) and any(is_name(target, name) for target in second.targets):
            return True
        within = {id(node) for statement in (first, second) for node in ast.walk(statement)}
        return not any(is_name(x, name) and is_loaded(x) and id(x) not in within for x in ast.walk(self.tree))
