"""`make mutants`: break the library in one small way at a time, and see that the tests notice.

Every mutant is applied to a temporary copy of the repository, in which a few fast tests then run; they must
fail. A mutant that survives is a missing test. Mutants of Triton code run in its interpreter, or on a GPU.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from tabulate import tabulate

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("logitless", "tests", "pyproject.toml")


def passes(tests: str, interpreted: bool, mutant: Mutant | None = None) -> tuple[bool, str]:
    """Whether the tests pass on a copy of the repository, with a mutant or as it is, and the telling line of
    what they print."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder, name))
        if mutant is not None:
            path = Path(folder, mutant.path)
            path.write_text(mutant.applied(path.read_text()))
        python_path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        if interpreted:
            environment["TRITON_INTERPRET"] = "1"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            *tests.split(),
        ]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or [done.stderr[-200:]]
    # 1: tests failed; below 0: a signal ended them, such as one of a kernel that writes out of bounds. Else
    # (no tests found, a file that does not import) it shows nothing about the tests.
    if done.returncode > 1:
        raise RuntimeError(
            f"mutant {mutant and mutant.name!r}: pytest ended with {done.returncode}: {lines[-1]}"
        )
    return done.returncode == 0, next(
        (line for line in reversed(lines) if line.startswith("FAILED")), lines[-1]
    )


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Run only the mutants whose name contains one of these.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="How many to run at once.")] = 2,
) -> None:
    """Break the code in small ways, one at a time, and expect a test to notice each."""
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    for mutant in chosen:
        mutant.applied((ROOT / mutant.path).read_text())
    with ThreadPoolExecutor(jobs) as pool:
        # A test that fails anyway catches nothing.
        clean = dict.fromkeys((mutant.tests, mutant.interpreted) for mutant in chosen)
        for (tests, interpreted), (passed, last) in zip(
            clean, pool.map(lambda case: passes(*case), clean), strict=True
        ):
            print(
                f"{'passes' if passed else 'FAILS'} without a mutant: {tests}{', interpreted' * interpreted}",
                flush=True,
            )
            if not passed:
                raise SystemExit(last)

        def run(mutant: Mutant) -> tuple[str, ...]:
            start = time.perf_counter()
            alive, last = passes(mutant.tests, mutant.interpreted, mutant)
            print(f"{'SURVIVES' if alive else 'caught':8} {mutant.name}: {last[:150]}", flush=True)
            return (
                mutant.name,
                mutant.path,
                "SURVIVES" if alive else "caught",
                f"{time.perf_counter() - start:.0f} s",
            )

        rows = list(pool.map(run, chosen))
    alive = sum(row[2] == "SURVIVES" for row in rows)
    print("\n" + tabulate(rows, headers=("mutant", "file", "", "time")))
    print(f"\n{len(rows) - alive} of {len(rows)} mutants caught.")
    raise SystemExit(1 if alive else 0)


if __name__ == "__main__":
    typer.run(main)
