"""The tests of a library file, and a run of them on a tree until one fails or their CPU time is spent.

Run as a script, this file is the process that runs pytest, in any tree.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

# Folders of tests beside a library folder's own: most of the code below the losses is tested through them.
BESIDE = {"": ("losses",), "engine": ("losses",), "parallel": ("losses",), "kernels": ("losses",)}
# CPU seconds that a single test may take beyond the limit; a mutant whose test needs more is in a loop.
GRACE = 120
# A run may take so many seconds for each CPU second, as the machine may be busy and ranks may wait.
SLOWEST = 15
PYTEST = (
    *("-x", "-q", "--tb=line", "--disable-warnings", "-p", "no:cacheprovider"),
    *("--disable-plugin-autoload", "-p", "pytest_timeout", "--timeout=1200"),
)


def select_tests(tree: Path, file: str) -> list[str]:
    """The test files for a library file, the most telling first.

    These are the test files of the folder of tests that has the name of the library's topmost folder (for a
    file without one, those in `tests` itself), and of the folders BESIDE it; and every other test file that
    imports the module or has its name. In order: those of the module's name, those that import it, those
    whose name has a word of the module's, those that mention it or its public functions and classes most
    often, the shorter ones.
    """
    path, tests, source = Path(file).with_suffix(""), tree / "tests", (tree / file).read_text()
    folders = path.relative_to("logitless").parts[:-1]
    is_mirrored = folders and (tests / folders[0]).is_dir()
    near = set((tests / folders[0]).rglob("test_*.py") if is_mirrored else tests.glob("test_*.py"))
    if not needs_interpreter(source):
        for folder in BESIDE.get("".join(folders[:1]), ()):
            near |= set(tests.joinpath(folder).rglob("test_*.py"))

    module = path.parent if path.name == "__init__" else path
    package, stem = ".".join(module.parent.parts), module.name.removesuffix("_triton")
    imports = re.compile(rf"{re.escape(package)}(\.| import \(?[\w\s,]*\b){module.name}\b")
    names = [stem, *re.findall(r"^(?:class|def) ([A-Za-z]\w+)", source, re.MULTILINE)]
    mentions = re.compile(rf"\b({'|'.join(names)})", re.IGNORECASE)

    def relevance(test: Path) -> tuple[int, ...]:
        text = test.read_text()
        is_near, has_its_name = test in near, test.stem == f"test_{stem}"
        imports_it = imports.search(text) is not None
        if not (is_near or has_its_name or imports_it):
            return ()
        shared = len(set(stem.split("_")) & set(test.stem.split("_")))
        return is_near and has_its_name, imports_it, shared, len(mentions.findall(text)), -len(text)

    actual = {test: actual for test in sorted(tests.rglob("test_*.py")) if (actual := relevance(test))}
    if not actual:
        raise ValueError(f"file: expected tests for {file}, got none; add its folder to BESIDE.")
    return [str(test.relative_to(tree)) for test in sorted(actual, key=actual.get, reverse=True)]


def needs_interpreter(source: str) -> bool:
    """Whether the file has Triton kernels, which run in Triton's interpreter here."""
    return "@triton.jit" in source


@dataclass(frozen=True)
class Result:
    failed: str  # the test that failed, or how the process ended; "" if none failed
    seconds: float  # of the CPU
    timed_out: bool = False


def run(tree: Path, tests: Sequence[str], limit: float, *, interpret: bool) -> Result:
    """Run the tests in order on the library of `tree`, until one fails or after `limit` CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        report = Path(folder, "report.json")
        # Caches of compiled graphs are below TMPDIR: none outlives its mutant.
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "TMPDIR": folder,
            "TRITON_INTERPRET": "1" if interpret else "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with Path(folder, "output.txt").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(report), str(limit), str(limit + GRACE), *tests],
                cwd=tree,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                process.wait(SLOWEST * (limit + GRACE))
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what the tests have started
                process.wait()
        if report.exists():
            return Result(**json.loads(report.read_text()))
        timed_out = process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return Result(f"ended with {process.returncode}", limit + GRACE if timed_out else 0.0, timed_out)


def used() -> float:
    """CPU seconds of this process and of those it has waited for."""
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


class Watch:
    """A pytest plugin that notes the first failure and stops the session when the CPU time is spent.

    The first case of every test function comes first, then three more of each, then the rest: within a time
    that is too short for all cases, many functions show more than many cases of the first ones.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.failed, self.stopped = limit, "", False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items) -> None:
        cases = Counter()

        def turn(item) -> int:
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            return (cases[function] > 1) + (cases[function] > 4)

        items.sort(key=turn)

    def pytest_sessionstart(self, session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    pytest_collectreport = pytest_runtest_logreport

    def pytest_runtest_logfinish(self) -> None:
        if used() > self.limit:
            self.stopped = True
            self.session.shouldstop = "the CPU time is spent"


def main(report: str, limit: str, killed_at: str, *tests: str) -> None:
    seconds = round(float(killed_at))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    tree = Path.cwd()
    sys.path.insert(0, str(tree))
    watch = Watch(float(limit))
    status = pytest.main([*PYTEST, *tests], plugins=[watch])
    library = sys.modules.get("logitless")
    if library is not None and not Path(library.__file__).is_relative_to(tree):
        raise RuntimeError(f"expected the library of {tree}, got {library.__file__}")
    failed = watch.failed or ("" if status == 0 or watch.stopped else tests[0])
    Path(report).write_text(json.dumps({"failed": failed, "seconds": round(used(), 1)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
