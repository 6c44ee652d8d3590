"""Imports of the library: no circles, and what importing it may load.

`make lint` checks the contracts between the folders.
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

import pytest

import logitless

LIBRARY = Path(logitless.__file__).parent
MODULES = {
    ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(LIBRARY.rglob("*.py"))
}

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "transformers")


def test_no_code_is_left_out_of_formatting():
    actual = [
        f"{path.relative_to(LIBRARY.parent)}:{token.start[0]}: {token.string}"
        for path in MODULES.values()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and token.string.removeprefix("#").strip().startswith("fmt:")
    ]
    assert not actual, "\n".join(actual)


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Modules of the library that `name` imports, under TYPE_CHECKING and in functions too."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            actual = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            source = ".".join(filter(None, (*above, node.module)))
            # `from package import name` imports the module `package.name` if there is one, else the package.
            inner = [f"{source}.{alias.name}" for alias in node.names]
            actual = [name if name in MODULES else source for name in inner]
        else:
            continue
        yield from (module for module in actual if module in MODULES)


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
    start = "import sys, torch; alone = set(sys.modules)"
    command = [sys.executable, "-c", "; ".join([start, *(f"{x}; {report}" for x in statements)])]
    done = subprocess.run(command, cwd=LIBRARY.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_import_is_light():
    """No module beyond torch's own, none of the tools, and nothing heavy with the fused layers either."""
    layers = "from logitless.layers import rope; from logitless.models import fuse_layers"
    loaded, with_layers = newly_loaded("import logitless", layers)
    assert {name for name in loaded if not name.startswith("logitless")} == set()
    assert not {"logitless.tools.check", "logitless.tools.estimate", "logitless.models"} & loaded
    assert not set(HEAVY) & with_layers


def test_lint_runs_what_holds_the_rest():
    """Rules, format, and imports that go downwards."""
    root = LIBRARY.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    assert settings["importlinter"]["exclude_type_checking_imports"] is False
    layers = next(x for x in settings["importlinter"]["contracts"] if x["type"] == "layers")
    folders = {path.name for path in LIBRARY.iterdir() if (path / "__init__.py").exists()}
    assert layers["exhaustive"] and folders <= set(" | ".join(layers["layers"]).split(" | "))
    recipe = (root / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for command in ("ruff check .", "ruff format --check .", "lint-imports"):
        assert command in recipe, command


def test_what_is_loaded_later_is_there():
    assert logitless.check.__module__ == "logitless.tools.check" and logitless.estimate is logitless.estimate
    assert {name for name in logitless.__all__ if not hasattr(logitless, name)} == set()
    assert not hasattr(logitless, "surprise")
