"""`make mutants`: break the library in one small way at a time, and see that the tests notice.

    python -m tests.mutants                                     all
    python -m tests.mutants kernels/ "softcap"                  by a part of the name or of the file
    python -m tests.mutants --jobs 16 --shard 2/3 --json 2.json

Every mutant is applied to a temporary copy of the repository, in which a few fast tests then run; they must
fail. A mutant that survives is a missing test. Mutants of Triton code run in its interpreter, or on a GPU.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.running import (
    CAUGHT,
    CORE,
    ENVIRONMENT,
    SURVIVES,
    TRAINERS,
    Job,
    Result,
    environment,
    run,
    shard,
)

ROOT = Path(__file__).parents[2]
WITH_TRAINERS = ("logitless/models/", "logitless/trl_integration/")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description="Break the code in small ways, one at a time, and expect a test to notice each.",
    )
    parser.add_argument("parts", nargs="*", help="only mutants whose name or file contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="how many to run at once (%(default)s)")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each (%(default)s)")
    parser.add_argument(
        "--shard", type=shard, default=(1, 1), metavar="K/N", help="the K-th of N equal shares"
    )
    parser.add_argument("--json", type=Path, help="file for the record, written after each mutant")
    return parser.parse_args()


def share(mutants: list[Mutant], k: int, n: int) -> list[Mutant]:
    """Those of one test command go to as few shares as possible: each share runs it without a mutant, too."""
    ordered = sorted(mutants, key=lambda mutant: (mutant.interpreted, mutant.tests))
    return ordered[len(ordered) * (k - 1) // n : len(ordered) * k // n]


def jobs_for(mutants: list[Mutant]) -> list[Job]:
    """The clean runs first: a test that fails anyway catches nothing."""
    found = [Job(mutant.tests, mutant.interpreted, mutant.on_cpu, mutant) for mutant in mutants]
    return [*dict.fromkeys(replace(job, mutant=None) for job in found), *found]


def write(path: Path, options: argparse.Namespace, results: list[Result], start: float) -> None:
    def row(result: Result) -> dict:
        mutant = result.job.mutant
        where = {"file": mutant.path, "function": mutant.function} if mutant else {}
        where |= {"without the GPU": True} if result.job.on_cpu and torch.cuda.is_available() else {}
        found = {"state": result.state, "seconds": round(result.seconds, 1), "line": result.line}
        return {"name": result.name, **where, "tests": result.job.tests, **found}

    record = {
        "command": sys.argv[1:],
        "environment": environment(),
        "seconds": round(time.perf_counter() - start),
        "clean": [row(result) for result in results if not result.job.mutant],
        "mutants": [row(result) for result in results if result.job.mutant],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    options, start = arguments(), time.perf_counter()
    os.environ.update(ENVIRONMENT)
    chosen = [
        m for m in MUTANTS if not options.parts or any(x in m.name or x in m.path for x in options.parts)
    ]
    chosen = share(chosen, *options.shard)
    for mutant in chosen:
        mutant.applied((ROOT / mutant.path).read_text())
    trainers = any(mutant.path.startswith(WITH_TRAINERS) for mutant in chosen)
    warm = CORE + TRAINERS if trainers else CORE
    results = []
    for result in run(jobs_for(chosen), ROOT, at_once=options.jobs, limit=options.limit, warm=warm):
        results.append(result)
        state = result.state if result.job.mutant else "passes" if result.state == SURVIVES else "FAILS"
        of = "" if result.job.mutant else " without a mutant"
        print(f"{state:11} {result.seconds:4.0f} s  {result.name}{of}: {result.line[:150]}", flush=True)
        if options.json is not None:
            write(options.json, options, results, start)
    raise SystemExit(0 if summary(results, time.perf_counter() - start) else 1)


def summary(results: list[Result], seconds: float) -> bool:
    """Prints what became of the mutants, by folder, and which no test caught; whether there are none."""
    # What fails without a mutant catches none.
    dirty = {r.job for r in results if not r.job.mutant and r.state != SURVIVES}
    rows, bad = {}, [result for result in results if not result.job.mutant and result.state != SURVIVES]
    for result in results:
        if (mutant := result.job.mutant) is not None:
            caught = result.state == CAUGHT and replace(result.job, mutant=None) not in dirty
            state = "caught" if caught else "not caught"
            rows.setdefault(mutant.file.rpartition("/")[0] or ".", Counter())[state] += 1
            bad += [] if caught else [result]
    total = sum(rows.values(), Counter())
    print(f"\n{'folder':20}{'caught':>8}{'not caught':>12}")
    for folder, counts in [*sorted(rows.items()), ("all", total)]:
        print(f"{folder:20}{counts['caught']:8}{counts['not caught']:12}")
    for result in bad:
        print(f"\n{result.state if result.job.mutant else 'FAILS without a mutant'}: {result.name}")
        print(f"    {result.job.tests}\n    {result.line}")
    print(f"\n{total['caught']} of {total.total()} mutants caught, in {seconds:.0f} s.")
    return not bad


if __name__ == "__main__":
    main()
