"""Processes of their own, forked from one that has imported TRL: they start in 3 s, an interpreter in 15."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from benchmarks.harness.registry import package_version


def server(preloaded: list[str]) -> BaseContext:
    """Where the processes come from; each has then imported `preloaded`."""
    # Nothing is looked up on the hub; read when transformers is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Or the process that is forked would ask CUDA whether there is a GPU, after which no fork can use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # PEFT imports torchao, which asks CUDA for its devices.
    context = multiprocessing.get_context("spawn" if package_version("torchao") else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(preloaded)
    return context


def detach(log: str) -> None:
    """In a process: it can be ended with all its children, and says everything in a file."""
    os.setsid()
    said = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)


@contextmanager
def all_end(started: list[BaseProcess]) -> Iterator[None]:
    """Ends the detached processes of the list with the block, also where somebody ends this one: or others
    would stay on the GPUs."""
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        for process in started:
            end(process)
        signal.signal(signal.SIGTERM, usual)


def end(process: BaseProcess) -> None:
    """A detached process, with whatever it started and left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()  # it has ended, or had no group of its own yet
    process.join()
