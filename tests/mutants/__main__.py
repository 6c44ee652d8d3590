"""`make mutants`: the share of mutants that the tests catch, and those that survive.

    python -m tests.mutants --count 300 --seed 0 --jobs 2 --json record.json
    python -m tests.mutants engine/ losses/kto.py                only files whose name contains one of these
    python -m tests.mutants --library v1 --tests v1              the tests of one commit ...
    python -m tests.mutants --library v1 --tests HEAD            ... against another's, on the same mutants

The library and the tests are those of a commit: what is not committed is not seen. With --json the record is
written after each mutant, and the same command goes on where it was interrupted.
"""

import compileall
import io
import json
import py_compile
import queue
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Annotated

import typer

from tests.mutants.generate import Mutant, sample
from tests.mutants.running import Result, needs_interpreter, run, select_tests

ROOT = Path(__file__).parents[2]
CAUGHT, TIMED_OUT, SURVIVED = "caught", "timed out", "survived"
# The tests do not end without the mutant either.
UNCLEAR = "unclear"
# CPU seconds for one test; those of a file that cannot be imported end after the first.
ALONE = 1.0


def git(*arguments: str, root: Path) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True).stdout


def extract(folder: Path, commit: str, *paths: str, root: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit, *paths, root=root))) as archive:
        archive.extractall(folder, filter="data")


def make_tree(folder: Path, library: str, tests: str, root: Path) -> Path:
    """The repository as of the commit `tests`, with the library of the commit `library`."""
    extract(folder, tests, root=root)
    shutil.rmtree(folder / "logitless")
    extract(folder, library, "logitless", root=root)
    # Bytecode is compared with the source's hash: times are too coarse for files that change so quickly.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "logitless", quiet=2, invalidation_mode=mode)
    return folder


class Runner:
    """Runs mutants, each in a tree that no other one uses at the time.

    A mutant is caught by a test that fails alone with it and passes alone without it. What fails otherwise
    (always, or after certain other tests) shows nothing: it is left out from then on.
    """

    def __init__(self, trees: list[Path], limit: float) -> None:
        self.limit = limit
        self.clean, *others = trees
        self.free = queue.SimpleQueue()
        for tree in others:
            self.free.put(tree)
        self.lock = Lock()
        self.passed: dict[tuple, bool] = {}
        self.left_out: set[str] = set()

    def __call__(self, mutant: Mutant) -> dict:
        """The mutant's entry in the record."""
        tree = self.free.get()
        path = tree / mutant.file
        source = path.read_text()
        try:
            path.write_text(mutant.code)
            outcome, result = self.judge(tree, mutant.file, needs_interpreter(source))
        finally:
            path.write_text(source)
            self.free.put(tree)
        return {**entry(mutant), "outcome": outcome, "test": result.failed, "seconds": result.seconds}

    def judge(self, tree: Path, file: str, interpret: bool) -> tuple[str, Result]:
        tests = select_tests(tree, file)
        while True:
            options = [f"--deselect={test}" for test in sorted(self.left_out)]
            result = run(tree, [*tests, *options], self.limit, interpret=interpret)
            if not result.failed:
                return SURVIVED, result
            if not result.failed.startswith("tests/"):  # no test: the process was ended
                outcome = TIMED_OUT if result.timed_out else CAUGHT
                clean = self.passes(*tests, *options, limit=self.limit, interpret=interpret)
                return (outcome if clean else UNCLEAR), result
            alone = run(tree, [result.failed], ALONE, interpret=interpret)
            if alone.failed and self.passes(result.failed, limit=ALONE, interpret=interpret):
                return CAUGHT, result
            self.left_out.add(result.failed)

    def passes(self, *tests: str, limit: float, interpret: bool) -> bool:
        """Whether the tests pass, as far as they come within the limit, without a mutant."""
        run_of = (tests, limit, interpret)
        with self.lock:
            if run_of not in self.passed:
                self.passed[run_of] = not run(self.clean, tests, limit, interpret=interpret).failed
            return self.passed[run_of]


def entry(mutant: Mutant) -> dict:
    """What names a mutant in the record."""
    return {name: value for name, value in asdict(mutant).items() if name != "code"}


def describe(row: dict) -> str:
    return f"{row['file']}:{row['line']} {row['operator']}: {row['before']} -> {row['after']}"


def summarize(rows: list[dict]) -> str:
    """The survivors, and the score: caught mutants, those that timed out among them, of all clear ones."""
    counts = Counter(row["outcome"] for row in rows)
    caught = counts[CAUGHT] + counts[TIMED_OUT]
    clear = caught + counts[SURVIVED]
    lines = [f"{row['outcome']:9} {describe(row)}" for row in rows if row["outcome"] in (SURVIVED, UNCLEAR)]
    score = f"{caught} of {clear} mutants caught ({caught / max(clear, 1):.1%})"
    return "\n".join([*sorted(lines), f"{score}, {counts[TIMED_OUT]} by time; {counts[UNCLEAR]} unclear."])


def versions() -> dict[str, str]:
    actual = {"python": sys.version.split()[0]}
    for name in ("cosmic-ray", "torch", "triton", "transformers", "trl", "pytest"):
        try:
            actual[name] = version(name)
        except PackageNotFoundError:
            actual[name] = "absent"
    return actual


def main(
    files: Annotated[list[str] | None, typer.Argument(help="Only files whose name contains one.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Mutants to draw.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Mutants to run at once.")] = 2,
    limit: Annotated[float, typer.Option(help="CPU seconds of tests for each mutant.")] = 90,
    library: Annotated[str, typer.Option(help="Commit whose library is mutated.")] = "HEAD",
    tests: Annotated[str, typer.Option(help="Commit whose tests run.")] = "HEAD",
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the record.")] = None,
    root: Annotated[Path, typer.Option(hidden=True)] = ROOT,
) -> None:
    """Change one place of the library at a time, and expect a test to fail."""
    commits = {
        name: git("rev-parse", "--short=12", f"{commit}^{{commit}}", root=root).decode().strip()
        for name, commit in (("library", library), ("tests", tests))
    }
    record = {**commits, "files": files or [], "count": count, "seed": seed, "limit": limit}
    record |= {"versions": versions(), "left_out": [], "mutants": []}
    if json_file is not None and json_file.exists():
        before = json.loads(json_file.read_text())
        if {**before, "left_out": [], "mutants": []} != record:
            raise typer.BadParameter(f"expected a record of this command, got another's: {json_file}")
        record = before
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder, str(job)) for job in range(jobs + 1)]
        for tree in trees:
            make_tree(tree, *commits.values(), root=root)
        names = (str(path.relative_to(trees[0])) for path in sorted(trees[0].glob("logitless/**/*.py")))
        sources = {
            name: (trees[0] / name).read_text()
            for name in names
            if not files or any(part in name for part in files)
        }
        drawn = sample(sources, count, seed)
        waiting = [m for m in drawn if not any(entry(m).items() <= row.items() for row in record["mutants"])]
        runner = Runner(trees, limit)
        runner.left_out |= set(record["left_out"])
        with ThreadPoolExecutor(jobs) as pool:
            for future in as_completed([pool.submit(runner, mutant) for mutant in waiting]):
                row = future.result()
                record["mutants"].append(row)
                record["left_out"] = sorted(runner.left_out)
                typer.echo(f"{row['outcome']:9} {row['seconds']:5.0f} s  {describe(row)}  {row['test']}")
                if json_file is not None:
                    json_file.write_text(json.dumps(record, indent=1) + "\n")
    typer.echo("\n" + summarize(record["mutants"]))
    for test in record["left_out"]:
        typer.echo(f"left out, as it fails without a mutant or only after other tests: {test}")


if __name__ == "__main__":
    typer.run(main)
