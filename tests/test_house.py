"""Limits that keep the library readable, and what importing it may load.

The kernels are long by nature and excepted where a rule says so. `engine/test_call_path.py` counts the
functions that a call passes; `make lint` holds the contracts between the folders.
"""

import ast
import graphlib
import io
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import logitless

LIBRARY = Path(logitless.__file__).parent
MODULES = {
    ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(LIBRARY.rglob("*.py"))
}

FILE_LINES, TRITON_LINES, FUNCTION_LINES, PARAMETERS, COLUMNS = 300, 450, 60, 8, 110
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "transformers")
OPERATORS = ("custom_op", "triton_op", "register_fake", "register_kernel", "register_autograd")


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    path: Path
    node: FunctionNode
    at_top: bool

    @property
    def lines(self) -> int:
        """Without signature and docstring."""
        body = self.node.body[1:] if ast.get_docstring(self.node) is not None else self.node.body
        return body[-1].end_lineno - body[0].lineno + 1 if body else 0

    @property
    def parameters(self) -> int:
        arguments = self.node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return sum(x.arg not in ("self", "cls") for x in named) + sum(
            map(bool, (arguments.vararg, arguments.kwarg))
        )

    @property
    def is_operator(self) -> bool:
        return any(
            word in ast.unparse(decorator) for decorator in self.node.decorator_list for word in OPERATORS
        )

    @property
    def is_public_call(self) -> bool:
        return self.node.name == "__call__" or (self.at_top and self.node.name in logitless.__all__)

    def __str__(self) -> str:
        return f"{place(self.path)}:{self.node.lineno} {self.node.name}"


def place(path: Path) -> str:
    return str(path.relative_to(LIBRARY.parent))


def functions() -> Iterator[Function]:
    """Those outside `kernels/`, nested ones and methods among them."""
    for path in MODULES.values():
        if path.is_relative_to(LIBRARY / "kernels"):
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, FunctionNode):
                yield Function(path, node, node in tree.body)


def listed(found: list[str]) -> str:
    return f"{len(found)} of them:\n" + "\n".join(found)


def test_files_are_short():
    sizes = {path: len(path.read_text().splitlines()) for path in MODULES.values()}
    limits = {
        path: TRITON_LINES if path.name.endswith("_triton.py") else FILE_LINES for path in MODULES.values()
    }
    found = [f"{place(path)}: {size} lines" for path, size in sizes.items() if size > limits[path]]
    assert not found, listed(found)


def test_functions_are_short():
    found = [
        f"{function}: {function.lines} lines" for function in functions() if function.lines > FUNCTION_LINES
    ]
    assert not found, listed(found)


def test_functions_take_few_parameters():
    found = [
        f"{function}: {function.parameters} parameters"
        for function in functions()
        if function.parameters > PARAMETERS and not function.is_operator and not function.is_public_call
    ]
    assert not found, listed(found)


def test_lines_are_short():
    found = [
        f"{place(path)}:{number}: {len(line)} columns"
        for path in MODULES.values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not found, listed(found)


def test_no_code_is_left_out_of_formatting():
    found = [
        f"{place(path)}:{token.start[0]}: {token.string}"
        for path in MODULES.values()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and token.string.removeprefix("#").strip().startswith("fmt:")
    ]
    assert not found, listed(found)


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Modules of the library that `name` imports, under TYPE_CHECKING and in functions too."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            )
            source = ".".join(filter(None, (above, node.module)))
            # `from package import name` imports the module `package.name` if there is one, else the package.
            found = [
                inner if (inner := f"{source}.{alias.name}") in MODULES else source for alias in node.names
            ]
        else:
            continue
        yield from (module for module in found if module in MODULES)


def test_imports_have_no_circle():
    """Also those through a package's `__init__`, which import-linter's contract for siblings does not see."""
    graph = {name: set(imported(name, ast.parse(path.read_text()))) for name, path in MODULES.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def newly_loaded(*statements: str) -> list[set[str]]:
    """Modules that a fresh interpreter has loaded after each statement, beyond those that torch loads."""
    report = "print(*set(sys.modules) - alone)"
    code = "; ".join(
        ["import sys, torch", "alone = set(sys.modules)", *(f"{x}; {report}" for x in statements)]
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=LIBRARY.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_import_is_light():
    """Seconds depend on the machine (0.1 to 0.2 for these modules, with their bytecode): they are counted."""
    layers = "from logitless.layers import rope; from logitless.models import fuse_layers"
    loaded, with_layers = newly_loaded("import logitless", layers)
    assert {name for name in loaded if not name.startswith("logitless")} == set()
    assert len(loaded) <= 90
    assert not {"logitless.tools.check", "logitless.tools.estimate", "logitless.models"} & loaded
    assert not set(HEAVY) & with_layers


def test_lint_runs_what_holds_the_rest():
    """Lines of at most COLUMNS everywhere, format, and imports that go downwards."""
    root = LIBRARY.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    rules = settings["ruff"]["lint"]
    assert settings["ruff"]["line-length"] == COLUMNS and "E" in rules["select"]
    assert not {"E", "E5", "E501"} & {*rules["ignore"], *rules.get("per-file-ignores", {})}
    assert settings["importlinter"]["exclude_type_checking_imports"] is False
    layers = next(x for x in settings["importlinter"]["contracts"] if x["type"] == "layers")
    folders = {path.name for path in LIBRARY.iterdir() if (path / "__init__.py").exists()}
    assert layers["exhaustive"] and folders <= set(layers["layers"])
    recipe = (root / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for command in ("ruff check .", "ruff format --check .", "lint-imports"):
        assert command in recipe, command


def test_what_is_loaded_later_is_there():
    assert logitless.check.__module__ == "logitless.tools.check" and logitless.estimate is logitless.estimate
    assert {name for name in logitless.__all__ if not hasattr(logitless, name)} == set()
    assert not hasattr(logitless, "surprise")
