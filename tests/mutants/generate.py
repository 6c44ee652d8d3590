"""Which places of a source file are mutated, and how; which of them are drawn."""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from parso.tree import NodeOrLeaf

# Of cosmic-ray's operators those that make a plausible mistake. Left out is what fails wherever it is reached
# (`+` to `<<`, or `==` to `<`, of things without an order) and what rarely changes a result (`==` to `is`).
BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul")
ORDER = ("Lt", "LtE", "Gt", "GtE")
COMPARISON = (
    "Eq_NotEq",
    "NotEq_Eq",
    "Is_IsNot",
    "IsNot_Is",
    *(f"{before}_{after}" for before in ORDER for after in ORDER if before != after),
)
OPERATORS = {
    name: get_operator(f"core/{name}")()
    for name in (
        "AddNot",
        "NumberReplacer",
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
        "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue",
        "ReplaceBreakWithContinue",
        "ReplaceContinueWithBreak",
        *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")),
        *(f"ReplaceBinaryOperator_{name}" for name in BINARY),
        *(f"ReplaceComparisonOperator_{name}" for name in COMPARISON),
    )
}

LEFT_OUT_NODES = ("decorator", "raise_stmt", "fstring", "tfpdef")
# Functions whose arguments make a message, from the argument of that index on.
MESSAGES = {"message": 0, "value_error": 0, "type_error": 0, "warn": 0, "warn_once": 0}
# What is named so makes a message, too; a budget, whose exact size is free; a check of our own code (`zip`).
LEFT_OUT_NAMES = re.compile(r"budget|^(expected|got|remedy|message|strict)$", re.IGNORECASE)
# Numbers that change the speed alone.
TILES = re.compile(r"block|tile|warps|stages", re.IGNORECASE)


@dataclass(frozen=True)
class Mutant:
    file: str  # as in `logitless/engine/plan.py`
    line: int
    operator: str
    before: str  # the first line that differs
    after: str
    code: str  # the whole file


def sample(sources: dict[str, str], count: int, seed: int) -> list[Mutant]:
    """At most `count` mutants, in random order: of every file one, the rest in proportion to its places.

    Args:
        sources: file name -> text.
        count: how many, at most one for each place.
        seed: of all random choices. Those of one file do not depend on the other files.
    """
    drawn = []
    for file, source in sources.items():
        draw = random.Random(f"{seed} {file}")
        actual = list(places(file, source).values())
        draw.shuffle(actual)
        offset = draw.random()
        for index, variants in enumerate(actual):
            draw.shuffle(variants)
            order = (index + offset) / len(actual) if index else -1.0
            drawn.append((order, draw.random(), file, variants))
    mutants = []
    for _, _, file, variants in sorted(drawn):
        if len(mutants) == count:
            break
        if mutant := first_valid(file, sources[file], variants):
            mutants.append(mutant)
    random.Random(seed).shuffle(mutants)
    return mutants


def places(file: str, source: str) -> dict[tuple, list[tuple[str, int]]]:
    """What can be done at each place: (start, end) -> [(operator, its occurrence in the file)]."""
    tree = get_ast(source)
    occurrences: dict[str, int] = defaultdict(int)
    actual = defaultdict(list)
    for node in ast_nodes(tree):
        for name, operator in OPERATORS.items():
            for start, end in operator.mutation_positions(node):
                leaf = tree.get_leaf_for_position(start, include_prefixes=True)
                if not is_left_out(leaf, file, name):
                    actual[start, end].append((name, occurrences[name]))
                occurrences[name] += 1
    return actual


def is_left_out(leaf: NodeOrLeaf, file: str, operator: str) -> bool:
    """Whether the place is in an annotation, a message, a decorator, a budget, or is a tile's size."""
    if leaf.value == "TYPE_CHECKING" or leaf.parent.type in ("parameters", "lambdef"):  # `*` alone, `/`
        return True
    names = [Path(file).stem]
    child, parent = leaf, leaf.parent
    while parent is not None:
        annotation = {"annassign": lambda: parent.children[1], "funcdef": lambda: parent.annotation}
        if parent.type in LEFT_OUT_NODES or annotation.get(parent.type, lambda: None)() is child:
            return True
        if parent.type in ("arglist", "trailer") and is_message(child):
            return True
        names.extend(names_given(parent))
        child, parent = parent, parent.parent
    is_tile = operator == "NumberReplacer" and any(map(TILES.search, names))
    return is_tile or any(map(LEFT_OUT_NAMES.search, names))


def is_message(argument: NodeOrLeaf) -> bool:
    """Whether an argument of a call is one that MESSAGES names."""
    arguments = argument.parent
    trailer = arguments.parent if arguments.type == "arglist" else arguments
    called = trailer.get_previous_sibling()
    if trailer.type != "trailer" or called is None:
        return False
    first = MESSAGES.get(called.get_last_leaf().value)
    index = arguments.children.index(argument) // 2  # commas, or the brackets, are children as well
    return first is not None and index >= first


def names_given(node: NodeOrLeaf) -> Iterator[str]:
    """The names that a statement, parameter or keyword argument gives to what is in it."""
    if node.type in ("funcdef", "classdef", "param"):
        yield node.name.value
    elif node.type == "expr_stmt":
        yield from (name.value for name in node.get_defined_names())
    elif node.type == "argument" and node.children[1] == "=":
        yield node.children[0].value


def first_valid(file: str, source: str, variants: list[tuple[str, int]]) -> Mutant | None:
    """The first variant that compiles to something else."""
    for name, occurrence in variants:
        code = mutate_code(source, OPERATORS[name], occurrence)
        try:
            compile(code, file, "exec")
        except SyntaxError:
            continue
        if ast.dump(ast.parse(code)) == ast.dump(ast.parse(source)):
            continue
        lines = zip_longest(source.splitlines(), code.splitlines(), fillvalue="")
        line, (before, after) = next((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1])
        return Mutant(file, line, name, before.strip(), after.strip(), code)
    return None
