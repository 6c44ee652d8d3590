"""Rewrite a forward pass: replace some of its statements by fused ones, and keep all others.

Replacements in a module whose `norm` and `act` can be fused (for any names, and either order of a sum):

    h = r + x * m; r = h; h = self.norm(h)                  h, r = _fused_add_norm(self.norm, r, x, m)
    h = self.norm(h); h = r + h                             h = _fused_norm_add(self.norm, h, r)
    q = self.norm(e).transpose(1, 2) ... rotate(q, k, ..)   q = e.transpose(1, 2) .. rotate.norm_and_rotate()
    q, k = rotate(q, k, cos, sin)                           the same; `rotate` is a `fused_forwards.Rotate`
    q = self.norm(e); ... q = rotate(q, cos, sin)           q = e; ... q = rotate.norm_and_rotate_one(...)
    self.act(a) * b                                         _fused_gate(self.act, a, b)
    a, b = x.chunk(2, dim=-1); ... self.act(a) * b          _fused_gate_packed(self.act, x)

and in a module whose `a` and `b` are LoRA layers:

    y = self.a(x); z = self.b(x)                            g = _fused_projections(x, self.a, self.b)
                                                            y = g.pop(0) if g else self.a(x); z = ...

Every replacement computes the same as the statements that it replaces, for any operands
(`fused_forwards.py`). Therefore the rest of the forward pass does not matter, and no table of the forward
passes of decoder layers and attentions is needed.
"""

import ast
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from logitless.layers.source import UnrecognizedSource, rewrap, tree_of
from logitless.layers.statements import (
    FusibleNames,
    find_norm_before,
    find_projections,
    is_loaded,
    is_name,
    is_self_attribute,
    make_assignment,
    make_helper_call,
    match_copy,
    match_gate,
    match_halves,
    match_norm_call,
    match_rotation_call,
    match_single_rotation_call,
    match_sum,
    replace_node,
    self_attribute,
)


class Rewritten(NamedTuple):
    """A rewritten forward pass, and descriptions of the statements that were replaced."""

    function: FunctionType
    replaced: tuple[str, ...]


def rewrite(function: FunctionType, fusible: FusibleNames, bindings: dict[str, Any]) -> Rewritten | None:
    """Return the function with fused statements, or None if it has none that can be fused.

    Args:
        function: a forward pass. Its decorators are kept, around the rewritten function.
        fusible: the names in its source that can be fused.
        bindings: name -> value for the names in the new statements, and for the rotations.

    Raises:
        UnrecognizedSource: the source cannot be compiled outside of its class, or as for `rewrap`.
    """
    if not any(fusible):
        return None
    written = inspect.unwrap(function)
    tree = tree_of(written)
    rewriter = _Rewriter(tree, fusible)
    tree = rewriter.visit(tree)
    if not rewriter.replaced:
        return None
    if written.__code__.co_freevars or any(
        name.startswith("__") and not name.endswith("__") for name in _names_in(tree)
    ):
        raise UnrecognizedSource("its forward pass depends on where it is defined")
    new = rewrap(function, _compile(written, tree, bindings))
    return Rewritten(new, tuple(dict.fromkeys(rewriter.replaced)))


def _names_in(tree: ast.AST) -> list[str]:
    """Return all names of variables and attributes."""
    nodes = list(ast.walk(tree))
    return [x.id for x in nodes if isinstance(x, ast.Name)] + [
        x.attr for x in nodes if isinstance(x, ast.Attribute)
    ]


def _compile(function: FunctionType, tree: ast.FunctionDef, bindings: dict[str, Any]) -> FunctionType:
    """Compile the function inside an outer one whose arguments are the names of `bindings`.

    Its globals are still those of the module, so later changes of them take effect. For the functions in
    `bindings`, the caller compares them with what the names hold (`source.Recognized`).
    """
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [default and ast.Constant(None) for default in tree.args.kw_defaults]
    module = ast.parse(f"def make({', '.join(bindings)}):\n    return {tree.name}")
    module.body[0].body.insert(0, tree)
    ast.fix_missing_locations(module)
    namespace: dict[str, Callable] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, namespace)
    new = namespace["make"](**bindings)
    new.__defaults__ = function.__defaults__
    new.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(new, function)
    del new.__wrapped__  # `inspect.unwrap` would return the function before the rewriting
    return new


class _Rewriter(ast.NodeTransformer):
    def __init__(self, tree: ast.FunctionDef, fusible: FusibleNames) -> None:
        self.tree = tree
        self.fusible = fusible
        self.replaced = []
        self.num_groups = 0

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list):
                self._fuse_norms_into_rotation(block)
                self._fuse_norm_into_single_rotation(block)
                self._fuse_packed_gate(block)
                block = self._fuse_statements(block)
                self._group_projections(block)
                setattr(node, field, block)
        return super().visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        sides = match_gate(node, self.fusible)
        if sides is None:
            return node
        act, a, b = sides
        self.replaced.append(f"gate {act.attr}")
        # Keyword arguments are evaluated in the order in which they are written: that of the product.
        operands = [("a", a), ("b", b)] if node.right is b else [("b", b), ("a", a)]
        keywords = [ast.keyword(name, value) for name, value in operands]
        return ast.copy_location(ast.Call(ast.Name("_fused_gate", ast.Load()), [act], keywords), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in self.fusible.rotations:
            self.replaced.append(node.func.id)
        return self.generic_visit(node)

    def _fuse_statements(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """Replace each pair of an addition and a norm that follow each other by one statement."""
        statements = []
        rest = block
        while rest:
            new, num_used = self._match_norm_add(rest) or self._match_add_norm(rest) or (rest[0], 1)
            statements.append(new)
            rest = rest[num_used:]
        return statements

    def _match_norm_add(self, rest: list[ast.stmt]) -> tuple[ast.stmt, int] | None:
        """Return (fused statement, number of replaced ones) if `rest` begins with a norm and an addition."""
        if len(rest) < 2:
            return None
        call = match_norm_call(rest[0], self.fusible)
        addition = match_sum(rest[1])
        if call is None or call.transpose or addition is None or addition[0] != call.target:
            return None
        if call.norm not in self.fusible.rms_norms:
            return None
        h, left, right = addition
        residual = None
        if is_name(left, h):
            residual = right
        elif is_name(right, h):
            residual = left
        if not isinstance(residual, ast.Name) or residual.id == h:
            return None
        self.replaced.append(f"{call.norm} and the addition after it")
        value = make_helper_call("_fused_norm_add", call.norm, x=call.argument, residual=residual)
        return make_assignment(value, h, at=rest[0]), 2

    def _match_add_norm(self, rest: list[ast.stmt]) -> tuple[ast.stmt, int] | None:
        """Return (fused statement, number of replaced ones) if `rest` begins with an addition and a norm."""
        addition = match_sum(rest[0])
        if addition is None:
            return None
        h, left, right = addition
        copy_name = match_copy(rest[1], h) if len(rest) > 1 else None
        num_used = 2 if copy_name is None else 3
        call = match_norm_call(rest[num_used - 1], self.fusible) if len(rest) >= num_used else None
        if call is None or call.transpose or not is_name(call.argument, h):
            return None
        # The sum has two names at most, and needs one that the norm's result does not take.
        names = [name for name in (h, copy_name) if name is not None and name != call.target]
        if len(names) > 1:
            return None
        self.replaced.append(f"the addition before {call.norm}, and the norm")
        keywords = {}
        if isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult) and is_self_attribute(right.right):
            keywords = {"multiplier": right.right}
            right = right.left
        value = make_helper_call("_fused_add_norm", call.norm, residual=left, x=right, **keywords)
        return make_assignment(value, call.target, names[0] if names else "_fused_sum", at=rest[0]), num_used

    def _fuse_norms_into_rotation(self, block: list[ast.stmt]) -> None:
        """Replace the norms of q and k and the rotation after them by `Rotate.norm_and_rotate`."""
        for index, statement in enumerate(block):
            call = match_rotation_call(statement, self.fusible)
            if call is None:
                continue
            q_norm = find_norm_before(block, index, call.args[0].id, self.fusible)
            k_norm = find_norm_before(block, index, call.args[1].id, self.fusible)
            if q_norm is None or k_norm is None:
                continue
            is_transposed = q_norm[1].transpose is not None
            if is_transposed != (k_norm[1].transpose is not None):
                continue
            for position, norm_call in (q_norm, k_norm):
                value = norm_call.argument
                if is_transposed:
                    value = norm_call.transpose
                    value.func.value = norm_call.argument
                block[position] = make_assignment(value, norm_call.target, at=block[position])
            norms = [self_attribute(norm_call.norm) for _, norm_call in (q_norm, k_norm)]
            call.func = ast.Attribute(call.func, "norm_and_rotate", ast.Load())
            call.args = [*norms, ast.Constant(is_transposed), *call.args]
            self.replaced.append(f"{q_norm[1].norm}, {k_norm[1].norm} and the rotation after them")
            return

    def _fuse_norm_into_single_rotation(self, block: list[ast.stmt]) -> None:
        """Replace a norm and the rotation of one tensor after it by `RotateOne.norm_and_rotate_one`."""
        for index, statement in enumerate(block):
            call = match_single_rotation_call(statement, self.fusible)
            if call is None:
                continue
            found = find_norm_before(block, index, call.args[0].id, self.fusible)
            if found is None or found[1].transpose is not None:
                continue
            position, norm_call = found
            block[position] = make_assignment(norm_call.argument, norm_call.target, at=block[position])
            call.func = ast.Attribute(call.func, "norm_and_rotate_one", ast.Load())
            call.args = [self_attribute(norm_call.norm), *call.args]
            self.replaced.append(f"{norm_call.norm} and the rotation after it")

    def _fuse_packed_gate(self, block: list[ast.stmt]) -> None:
        """Replace `a, b = x.chunk(2, dim=-1)` and `act(a) * b`, the only use of a and b, by one call."""
        for first, second in zip(block, block[1:]):
            halves = match_halves(first)
            if halves is None:
                continue
            products = [node for node in ast.walk(second) if isinstance(node, ast.BinOp)]
            for product in products:
                act, a, b = match_gate(product, self.fusible) or (None, None, None)
                if act is None or not (is_name(a, halves[0]) and is_name(b, halves[1])):
                    continue
                if not all(self._is_only_use(name, first, second) for name in halves):
                    continue
                block[block.index(first)] = make_assignment(first.value.func.value, halves[0], at=first)
                call = ast.Call(
                    ast.Name("_fused_gate_packed", ast.Load()), [act, ast.Name(halves[0], ast.Load())], []
                )
                replace_node(second, product, ast.copy_location(call, product))
                self.replaced.append(f"gate {act.attr} of both halves of one tensor")

    def _group_projections(self, block: list[ast.stmt]) -> None:
        """Replace the projections of one input by one fused call; if it returns None, they run one by one."""
        groups = find_projections(block, self.fusible)
        # From the last, as each adds a statement; groups at one position in their order.
        for position, calls in sorted(reversed(groups), key=lambda group: group.position, reverse=True):
            name = f"_projections_{self.num_groups}"
            self.num_groups += 1
            value = ast.Call(
                ast.Name("_fused_projections", ast.Load()),
                [calls[0].args[0], *(self_attribute(call.func.attr) for call in calls)],
                [],
            )
            for index, call in enumerate(calls):
                results = ast.Name(name, ast.Load())
                result = ast.Call(ast.Attribute(results, "pop", ast.Load()), [ast.Constant(index)], [])
                either = ast.copy_location(ast.IfExp(results, result, call), call)
                for statement in block[position:]:
                    replace_node(statement, call, either)
            block.insert(position, make_assignment(value, name, at=block[position]))
        self.replaced += [
            f"{', '.join(call.func.attr for call in group.calls)} of one input" for group in groups
        ]

    def _is_only_use(self, name: str, first: ast.stmt, second: ast.stmt) -> bool:
        """Whether the product in `second` is the only use of the value that `first` assigns to the name."""
        if sum(is_name(node, name) for node in ast.walk(second) if is_loaded(node)) != 1:
            return False
        if isinstance(second, ast.Assign) and any(is_name(target, name) for target in second.targets):
            return True
        own_nodes = {id(node) for statement in (first, second) for node in ast.walk(statement)}
        return not any(
            is_name(x, name) and is_loaded(x) and id(x) not in own_nodes for x in ast.walk(self.tree)
        )
