"""One small way to break the library: a change within one function."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import torch

WITHOUT_TWIN = ("tests/kernels/test_fused_projection.py", "tests/kernels/test_shard_in_product.py")
# Tests of several ranks.
RANKS = ("tests/losses/test_shard.py", "tests/kernels/test_shard_in_product.py")
# Tests that leave out on a GPU what the mutants change.
CPU_TESTS = ("tests/losses/test_cuda_graphs.py -k fp16", "tests/losses/test_plan.py -k told")
# What a GPU has no use for: the kernels' twins, and products in pieces. What it does not show: an assertion
# on the device, which would end the process, what takes several ranks, and a rounding below that of bf16.
ON_CPU_ALONE = {
    "kernels/cross_entropy.py": ("_logits_gradient_twin", "_token_statistics_twin", "_store"),
    "kernels/fused_gradient_triton.py": ("gradient_kernel",),
    "kernels/gathered.py": ("gathered_logits", "add_rows"),
    "kernels/head.py": ("Head.logits",),
    "kernels/matmul.py": ("_vocabulary_pieces", "accumulate"),
    "kernels/select.py": ("_select_twin", "compared"),
    "kernels/slots.py": ("_merged", "_others", "_whole", "distinct", "entries", "numbers", "put"),
    "kernels/shards.py": ("_combine_twin", "combine_gradient"),
    "engine/function.py": ("_expect_one",),
    "engine/gradients.py": ("Gradients._add_bias",),
    "engine/ids_objective.py": ("best",),
    "engine/segments.py": ("sum_runs",),
    "engine/spec.py": ("Fault.assert_async",),
}


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below logitless/
    # Dotted name within the file, such as `Batch.masked`; where the change is outside of all functions, that
    # of the class or of the variable that is assigned.
    function: str
    old: str  # occurs exactly once in the function's source, decorators and signature included
    new: str
    tests: str  # arguments of pytest

    @property
    def path(self) -> str:
        return f"logitless/{self.file}"

    @property
    def interpreted(self) -> bool:
        needs_triton = "triton" in self.file or any(name in self.tests for name in WITHOUT_TWIN)
        return needs_triton and (self.on_cpu or not torch.cuda.is_available())

    @property
    def on_cpu(self) -> bool:
        """Whether the tests run without the GPU that is there: it is no use, or several would be needed."""
        ranks = self.tests in RANKS and torch.cuda.device_count() < 2
        return ranks or self.tests in CPU_TESTS or self.function in ON_CPU_ALONE.get(self.file, ())

    def applied(self, text: str) -> str:
        """The file's text with the change; ValueError unless it applies exactly once."""
        lines = text.splitlines(keepends=True)
        where, told = f"{self.function} in {self.path}", f"mutant {self.name!r}: expected"
        places = [slice(first - 1, last) for first, last in spans(text, self.function)]
        if not places:
            raise ValueError(f"{told} {where}, got nothing of that name; bring it up to date.")
        counts = ["".join(lines[place]).count(self.old) for place in places]
        if sum(counts) != 1:
            raise ValueError(
                f"{told} `old` once in {where}, got it {sum(counts)} times; bring it up to date."
            )
        place = places[counts.index(1)]
        lines[place] = ["".join(lines[place]).replace(self.old, self.new)]
        return "".join(lines)


def of_file(file: str, tests: str, *rows: tuple[str, str, str, str], prefix: str = "") -> list[Mutant]:
    """Mutants of one file that the same tests notice; a row is (name, function, old, new)."""
    return [Mutant(prefix + name, file, function, old, new, tests) for name, function, old, new in rows]


def spans(text: str, name: str) -> list[tuple[int, int]]:
    """First and last line of each function, class or assignment of that dotted name: several if it is defined
    again."""
    found: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        found = [
            statement for scope in found for statement in statements(scope) if part in names_of(statement)
        ]
    return [(first_line(node), node.end_lineno) for node in found]


def statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Of a scope, those under `if` or `with` too, but not those of the functions and classes within it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from statements(child)


def names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = {ast.Assign: lambda: statement.targets, ast.AnnAssign: lambda: [statement.target]}.get(
        type(statement), list
    )()
    return [target.id for target in targets if isinstance(target, ast.Name)]


def first_line(node: ast.AST) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
