"""Runs pytest on copies of the repository that have a mutant each, in processes forked from a warm one.

The warm process has imported what the library and its tests import (torch, Triton, transformers, TRL: 2 to
7 s in every process otherwise), and nothing of the library: each fork imports that and the tests from its own
copy, and fails if it finds that it did not.
"""

import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tests.mutants.mutant import Mutant

COPIED = ("logitless", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")
CORE = ("pytest", "torch", "torch.distributed.fsdp", "torch._inductor.compile_fx", "triton")
TRAINERS = (
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
)
# A process that has asked CUDA for GPUs must not be forked: torch asks NVML, for `Mutant.interpreted` and for
# what is imported.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
OPTIONS = ("-x", "-q", "--tb=line", "--disable-warnings", "-p", "no:cacheprovider")
CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL)
CAUGHT, SURVIVES, TOO_LONG, ERROR = "caught", "SURVIVES", "OUT OF TIME", "ERROR"


def environment() -> dict[str, str]:
    """What a record was made with."""
    import torch

    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "trl", "peft", "pytest"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found | {"device": "GPU" if torch.cuda.is_available() else "CPU"}


def shard(text: str) -> tuple[int, int]:
    """ "2/3" -> (2, 3)."""
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError
    return k, n


@dataclass(frozen=True)
class Job:
    """One run of pytest: on the repository as it is, or with a mutant."""

    tests: str
    interpreted: bool
    on_cpu: bool
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Result:
    job: Job
    state: str  # without a mutant, SURVIVES is what it should be
    seconds: float
    line: str  # of the output, the telling one

    @property
    def name(self) -> str:
        return self.job.mutant.name if self.job.mutant else self.job.tests


def run(
    jobs: Sequence[Job], root: Path, *, at_once: int, limit: float, warm: Sequence[str] = CORE
) -> Iterator[Result]:
    """Runs the jobs, `at_once` at a time and for at most `limit` seconds each; results as they come.

    Triton decides when it is imported whether it interprets kernels: there is a warm process for either.
    """
    for interpreted in sorted({job.interpreted for job in jobs}):
        batch = [job for job in jobs if job.interpreted == interpreted]
        results, sender = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(
            target=_run_batch, args=(batch, root, at_once, limit, warm, sender)
        )
        process.start()
        sender.close()
        with suppress(EOFError):
            while True:
                yield results.recv()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the warm process ended with {process.exitcode}")


def _run_batch(
    jobs: Sequence[Job], root: Path, at_once: int, limit: float, warm: Sequence[str], sender: Connection
) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    if jobs[0].interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    for name in warm:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    import torch

    torch.set_num_threads(1)  # OMP_NUM_THREADS is too late: mutant.py has imported torch
    waiting, running = list(reversed(jobs)), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            started = _Started(waiting.pop(), root)
            running[started.process] = started
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            sender.send(running.pop(process).result(status))
            continue
        for started in running.values():
            started.end_after(limit)
        time.sleep(0.02)


class _Started:
    def __init__(self, job: Job, root: Path) -> None:
        self.job, self.too_long, self.begin = job, False, time.perf_counter()
        self.folder = tempfile.TemporaryDirectory(prefix="mutant-")
        self.output = Path(self.folder.name, "output.txt")
        self.copy = Path(self.folder.name, "copy").resolve()
        self.copy.mkdir()
        for name in COPIED:
            source = root / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.copy / name)
        if job.mutant is not None:
            path = self.copy / job.mutant.path
            path.write_text(job.mutant.applied(path.read_text()))
            Path(cache_from_source(path)).unlink(missing_ok=True)
        self.process = os.fork()
        if self.process == 0:
            os._exit(_pytest(job, root, self.copy, self.output))

    def end_after(self, limit: float) -> None:
        if not self.too_long and time.perf_counter() - self.begin > limit:
            self.too_long = True
            self._end()

    def result(self, status: int) -> Result:
        self._end()
        code = os.waitstatus_to_exitcode(status)
        lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()] or [
            ""
        ]
        line = next((line for line in reversed(lines) if line.startswith(("FAILED", "ERROR"))), lines[-1])
        self.folder.cleanup()
        # 1: tests failed; CRASHES: of a kernel that writes out of bounds. Else (no tests found, a file that
        # does not import, no memory) it shows nothing about the tests.
        state = (
            SURVIVES
            if code == 0
            else CAUGHT
            if code in (1, *CRASHES)
            else TOO_LONG
            if self.too_long
            else ERROR
        )
        line = f"pytest ended with {code}: {line}" if code not in (0, 1) else line
        return Result(self.job, state, time.perf_counter() - self.begin, line)

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)


def _pytest(job: Job, root: Path, copy: Path, output: Path) -> int:
    """In the fork: pytest's status on the copy."""
    os.setsid()  # what the tests start is ended with them
    sys.stdout = sys.stderr = output.open("w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    os.chdir(copy)
    if job.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    others = [path for path in sys.path if path and Path(path).resolve() != root.resolve()]
    sys.path[:] = [str(copy), *others]
    sys.dont_write_bytecode = True
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ.update(PYTHONPATH=os.pathsep.join([str(copy), *before]), PYTHONDONTWRITEBYTECODE="1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    try:
        import pytest

        _must_be_of(copy)
        status = pytest.main([*OPTIONS, *shlex.split(job.tests)])
        _must_be_of(copy)
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    return int(status)


def _must_be_of(copy: Path) -> None:
    """The library and the tests that are loaded are those of the copy."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.partition(".")[0] in ("logitless", "tests") and path and not Path(path).is_relative_to(copy):
            raise RuntimeError(f"expected {name} of {copy}, got {path}")
