"""Generated mutants: what is changed, what is left alone, and one run."""

import json
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.commands import output_of

pytest.importorskip("cosmic_ray", reason="cosmic-ray is in the dev extra")

import typer  # noqa: E402

from tests.mutants import __main__ as command  # noqa: E402
from tests.mutants.generate import first_valid, places  # noqa: E402
from tests.mutants.running import select_tests  # noqa: E402

ROOT = Path(__file__).parents[1]


def mutants(source: str, file: str = "it.py") -> set[tuple[str, str]]:
    """(before, after) of every variant at every place."""
    actual = (first_valid(file, source, [x]) for variants in places(file, source).values() for x in variants)
    return {(mutant.before, " ".join(mutant.after.split())) for mutant in actual if mutant is not None}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if a: b()", {"if not a: b()"}),
        ("x = a if b else c", {"x = a if not b else c"}),
        ("x = not a", {"x = a"}),
        ("x = -a", {"x = a"}),
        ("x = ~a", {"x = a"}),
        ("x = a == b", {"x = a != b"}),
        ("x = a is not None", {"x = a is None"}),
        ("x = a < b", {"x = a <= b", "x = a > b", "x = a >= b"}),
        ("x = a + b", {"x = a - b"}),
        ("x = a * b", {"x = a / b"}),
        ("x = a // b", {"x = a * b"}),
        ("x = a and b", {"x = a or b"}),
        ("x = f(True)", {"x = f(False)"}),
        ("for x in y: break", {"for x in y: continue"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("@jit\ndef f(): return 3", {"def f(): return 4", "def f(): return 2"}),
    ],
)
def test_operators(source, expected):
    assert {after for _, after in mutants(source)} == expected


@pytest.mark.parametrize(
    "source",
    [
        "x: Array[3]",
        "def f(x: Array[3], *, y: 'A') -> Array[3]: pass",
        "@cache(3, on=True)\ndef f(): pass",
        "def f():\n    '''Returns 3.'''",
        "raise ValueError(3 + 4)",
        "x = f'{3 + 4}'",
        "message('x', 3, a + b, 4)",
        "warn(3)",
        "expected, remedy = 3, 4",
        "budget = 3",
        "def f(budget_bytes=3): pass",
        "BLOCK, WARPS = 3, 4",
        "f(num_warps=3)",
        "f(*a, **b)",
        "if TYPE_CHECKING: import x",
    ],
)
def test_what_is_left_out(source):
    assert mutants(source) == set()


def test_every_folder_of_the_library_has_tests():
    one_of_each = {path.parent: path for path in sorted(ROOT.glob("logitless/**/*.py"))}
    assert len(one_of_each) > 5
    for path in one_of_each.values():
        assert select_tests(ROOT, str(path.relative_to(ROOT))), path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))


PROJECT = {
    "logitless/__init__.py": "",
    "logitless/it.py": """
        def larger(x, y):
            return x > y

        def untested(x, y):
            return x > y
    """,
    "tests/__init__.py": "",
    "tests/test_it.py": """
        from logitless.it import larger

        def test_larger():
            assert larger(2, 1) and not larger(1, 1)
    """,
}


@pytest.fixture
def project(tmp_path):
    write(tmp_path / "project", PROJECT)
    commit(tmp_path / "project")
    return tmp_path / "project"


def commit(folder: Path) -> None:
    identity = ("-c", "user.name=it", "-c", "user.email=it@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "it")):
        subprocess.run(["git", *arguments], cwd=folder, check=True)


def outcomes(record: Path) -> dict[int, set[str]]:
    """Line -> what became of its mutants."""
    actual = {}
    for row in json.loads(record.read_text())["mutants"]:
        actual.setdefault(row["line"], set()).add(row["outcome"])
    return actual


def test_a_run(project, tmp_path):
    """What is tested is caught; what is not survives; an interrupted run goes on."""
    record = tmp_path / "record.json"
    options = ["--root", str(project), "logitless/it.py", "--json", str(record)]
    output = output_of(command.main, *options)
    assert outcomes(record) == {3: {"caught"}, 6: {"survived"}}
    assert "survived  logitless/it.py:6 " in output and "1 of 2 mutants caught (50.0%)" in output
    assert (project / "logitless/it.py").read_text() == dedent(PROJECT["logitless/it.py"])

    rows = json.loads(record.read_text())
    kept, dropped = rows["mutants"][:-1], rows["mutants"][-1]
    record.write_text(json.dumps({**rows, "mutants": kept}))
    assert output_of(command.main, *options).count(" s  logitless") == 1
    assert json.loads(record.read_text())["mutants"][-1]["line"] == dropped["line"]
    with pytest.raises(typer.BadParameter, match="another's"):
        command.main(seed=1, json_file=record, root=project)
