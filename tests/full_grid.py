"""`python -m tests.full_grid`: every combination of what changes the path of a cross-entropy through the
engine, in every dtype.

The ordinary run tests every pair of values; this takes the whole product of the factors in GRID (41,472
cases), with the remaining ones drawn at random for each case. Minutes on a GPU with a few processes, hours on
a CPU.
"""

import itertools
import json
import platform
import random
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from logitless import BudgetWarning
from tests.cases import DTYPES
from tests.losses.test_cross_entropy import FACTORS, check_case, has_effect
from tests.support import DEVICE

GRID = (
    "trainable",
    "reduction",
    "budget",
    "label_smoothing",
    "z_loss",
    "class_weights",
    "softcap",
    "bias",
    "dft",
    "compact",
)
IGNORED = (0.0, 0.5, 1.0)


def shard(text: str) -> tuple[int, int]:
    """ "2/3" -> (2, 3)."""
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError
    return k, n


def environment() -> dict[str, str]:
    """What a record was made with."""
    versions = {name: version(name) for name in ("torch", "triton")}
    return {"python": platform.python_version(), **versions, "device": str(DEVICE)}


def cases() -> list[tuple[dict, str]]:
    draw = random.Random(0)
    actual = []
    for *values, ignored, dtype in itertools.product(*(FACTORS[name] for name in GRID), IGNORED, DTYPES):
        case = dict(zip(GRID, values)) | {"ignored": ignored, "seed": len(actual)}
        while True:
            drawn = {name: draw.choice(FACTORS[name]) for name in FACTORS if name not in case}
            if has_effect(case | drawn) and not (drawn["shape"] == "1" and ignored):
                break
        actual.append((case | drawn, dtype))
    return actual


def failures(number: int, share: list[tuple[dict, str]]) -> list[str]:
    """What fails of the share of a process, which takes the next GPU if there are several."""
    import torch

    torch.set_num_threads(1)  # there is a process for each core
    torch.set_default_device(DEVICE)
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(number % torch.cuda.device_count())
    warnings.simplefilter("ignore", BudgetWarning)
    actual = []
    for case, dtype in share:
        try:
            check_case(case, DTYPES[dtype])
        except AssertionError as error:
            actual.append(f"{dtype} {case}: {str(error).splitlines()[0]}")
    return actual


def main(
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    every: Annotated[int, typer.Option(help="Run one case of so many.")] = 1,
    share: Annotated[
        tuple, typer.Option("--shard", parser=shard, metavar="K/N", help="The K-th of N equal shares.")
    ] = "1/1",
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the record.")] = None,
) -> None:
    """Run the grid; list what fails and exit with 1 if anything does."""
    k, n = share
    chosen, start = cases()[::every][k - 1 :: n], time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        shares = (chosen[job::jobs] for job in range(jobs))
        actual = sum(pool.map(failures, range(jobs), shares), [])
    if json_file is not None:
        record = {"command": sys.argv[1:], "environment": environment(), "cases": len(chosen)}
        record |= {"seconds": round(time.perf_counter() - start), "failed": actual}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    typer.echo("\n".join(actual[:50]))
    typer.echo(f"{len(chosen)} cases, {len(actual)} failed")
    raise typer.Exit(bool(actual))


if __name__ == "__main__":
    typer.run(main)
