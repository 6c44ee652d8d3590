"""The list of mutants keeps up with the code."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutants import MUTANTS, table
from tests.mutants.__main__ import share
from tests.mutants.mutant import CPU_TESTS, ON_CPU_ALONE, RANKS, WITHOUT_TWIN, Mutant
from tests.mutants.running import COPIED, Job, run

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant):
    broken = mutant.applied((ROOT / mutant.path).read_text())
    compile(broken, mutant.path, "exec")
    files = [test.partition("::")[0] for test in shlex.split(mutant.tests) if test.startswith("tests/")]
    assert all((ROOT / file).exists() for file in files)


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_what_is_said_of_mutants_is_said_of_some():
    """An entry that has gone stale would do nothing."""
    functions = {(mutant.file, mutant.function) for mutant in MUTANTS}
    assert {(file, name) for file, names in ON_CPU_ALONE.items() for name in names} <= functions
    tests = {mutant.tests for mutant in MUTANTS}
    assert {*RANKS, *CPU_TESTS} <= tests
    assert all(any(name in command for command in tests) for name in WITHOUT_TWIN)


def test_the_table_of_former_mutants_is_true():
    assert not table.problems()
    assert table.PAGE.read_text() == table.page(), "run python -m tests.mutants.table"


SOURCE = dedent("""
    LIMIT = {"a": lambda x: x + 1}

    @wraps(1)
    def f(x):
        y = x + 1
        def inner():
            return x + 2
        return y

    if LIMIT:
        class C:
            size: int = 1

            def f(self, x=1):
                return x + 1

    @f.register
    def _(x): return 1

    @f.register
    def _(x): return 2
""")


@pytest.mark.parametrize(
    ("function", "old", "line"),
    [
        ("LIMIT", "x + 1", 2),
        ("f", "wraps(1)", 4),
        ("f", "x + 1", 6),
        ("f.inner", "x", 8),
        ("C", "int = 1", 13),
        ("C.f", "x + 1", 16),
        ("C.f", "x=1", 15),
        ("_", "2", 22),
    ],
)
def test_a_change_within_one_function(function, old, line):
    broken = Mutant("it", "file.py", function, old, "BROKEN", "").applied(SOURCE)
    before, after = SOURCE.splitlines(), broken.splitlines()
    assert [number for number, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [line]
    assert after[line - 1] == before[line - 1].replace(old, "BROKEN")


def test_lines_may_come_and_go():
    mutant = Mutant("it", "file.py", "_", "    return 2", "", "")
    text = "def _():\n    return 1\n\ndef _():\n    return 2\n"
    assert mutant.applied(text) == text.replace("    return 2", "")
    two_lines = replace(mutant, new="    x = 2\n    return x")
    assert two_lines.applied(text) == text.replace("    return 2", "    x = 2\n    return x")


@pytest.mark.parametrize(
    ("function", "old", "message"),
    [
        ("g", "x + 1", "expected g in logitless/file.py, got nothing of that name"),
        ("inner", "x + 2", "expected inner in logitless/file.py, got nothing of that name"),
        ("C.size", "x + 2", "expected `old` once in C.size in logitless/file.py, got it 0 times"),
        ("f", "x + 3", "expected `old` once in f in logitless/file.py, got it 0 times"),
        ("f", "return", "expected `old` once in f in logitless/file.py, got it 2 times"),
        ("_", "return", "expected `old` once in _ in logitless/file.py, got it 2 times"),
    ],
)
def test_what_does_not_apply_is_refused(function, old, message):
    with pytest.raises(ValueError, match=re.escape(f"mutant 'it': {message}; bring it up to date.")):
        Mutant("it", "file.py", function, old, "BROKEN", "").applied(SOURCE)


def empty_project() -> dict[str, str]:
    """A file in every place that is copied."""
    return {name if "." in name else f"{name}/empty": "" for name in COPIED}


def test_runs(tmp_path, monkeypatch):
    """Each mutant in a copy of its own, which is what is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "logitless"]:
        monkeypatch.delitem(sys.modules, name)
    files = {
        **empty_project(),
        "logitless/__init__.py": "",
        "logitless/it.py": "def f():\n    return 1\n",
        "tests/__init__.py": "",
        "tests/test_it.py": "from logitless.it import f\ndef test_f():\n    assert f() > 0\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    changes = {
        "return -1": "caught",
        "return 2": "SURVIVES",
        "import time; time.sleep(60)": "OUT OF TIME",
        "import os; os.abort()": "caught",
        "import os; os._exit(9)": "ERROR",
        "return (": "ERROR",
    }
    mutants = [Mutant(change, "it.py", "f", "return 1", change, "tests/test_it.py") for change in changes]
    jobs = [
        Job("tests/test_it.py", False, False),
        *(Job(mutant.tests, False, False, mutant) for mutant in mutants),
    ]
    found = {result.name: result.state for result in run(jobs, tmp_path, at_once=2, limit=4, warm=())}
    assert found == changes | {"tests/test_it.py": "SURVIVES"}
    assert (tmp_path / "logitless/it.py").read_text() == files["logitless/it.py"]


def test_shares_of_a_run():
    shares = [share(MUTANTS, k, 3) for k in (1, 2, 3)]
    assert sorted(mutant.name for part in shares for mutant in part) == sorted(x.name for x in MUTANTS)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_library_from_elsewhere_is_refused(tmp_path):
    for name in map(tmp_path.joinpath, empty_project()):
        name.parent.mkdir(exist_ok=True)
        name.touch()
    (result,) = run([Job("tests", False, False)], tmp_path, at_once=1, limit=4, warm=("logitless",))
    assert result.state == "ERROR" and "expected logitless" in result.line
