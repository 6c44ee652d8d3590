"""What the commands of `python -m benchmarks` share: their options, and where results go."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import typer

from benchmarks.harness.report import RESULTS
from logitless import kernels

Out = Annotated[
    Path | None,
    typer.Option(
        help="The JSON file. Default: a new one in benchmarks/results/ (none with --quick or for a part)."
    ),
]
Quick = Annotated[
    bool, typer.Option(help="Tiny shapes, any device, seconds: shows that everything runs, measures nothing.")
]
Device = Annotated[str, typer.Option(help="cuda or cpu. Default: cuda where there is one.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Measure only implementations whose name is or contains this; repeatable."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(help="Leave out implementations whose name is or contains this; repeatable."),
]
Seconds = Annotated[float, typer.Option(help="Time to spend on the timed rounds of each shape.")]


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Context in which this GPU runs the kernels of GPUs without kernels of their own."""
    with mock.patch.object(kernels, "_generation", lambda device: None):
        yield


def chosen_device(name: str, quick: bool) -> torch.device:
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "--device: expected a device of this machine, got cuda, which it lacks; pass --device cpu "
            "--quick."
        )
    if device.type != "cuda" and not quick:
        raise typer.BadParameter(
            f"--device: expected cuda for the full shapes, got {device.type}; pass --quick."
        )
    return device


# A run with one of these options is written only if --out names a file: in `results/`, the file would replace
# the tables of a complete run.
OF_PARTS = ("--only", "--skip", "--shapes", "--part", "--model", "--operator", "--row", "--trainer")


def out_path(out: Path | None, document: dict) -> Path | None:
    words = [word.partition("=")[0] for word in document["command"].split()]
    if out is not None or document["quick"] or any(word in OF_PARTS for word in words):
        return out
    device = re.sub(r"[^a-z0-9]+", "-", document["device"].lower()).strip("-")
    return RESULTS / f"{document['benchmark']}-{device}-{document['date'][:10]}.json"


def speaker() -> Callable[[str], None]:
    """Prints with the seconds since the start, at once, so that a run cut short has said how far it came."""
    start = time.perf_counter()
    return lambda text: print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)


def finish(path: Path | None) -> None:
    if path is not None:
        typer.echo(f"written: {path}")


def picked(names: Iterable[str], words: list[str] | None) -> list[str]:
    """Names that a word is, or is part of where it is none; all without words."""
    found: list[str] = []
    for word in words or [""]:
        same = [name for name in names if name.lower() == word.lower()]
        found += same or [name for name in names if word.lower() in name.lower()]
    return [name for name in names if name in found]


def check(failed: list[str]) -> None:
    """Ends with 1 if anything failed."""
    if failed:
        typer.echo("not right: " + "; ".join(failed), err=True)
        raise typer.Exit(1)
