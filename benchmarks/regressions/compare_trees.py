"""Our own rows before and after a change: two trees in turn, each time in a fresh process.

A process measures every row of `own_rows.py` for one tree; the trees alternate, and so does by round who goes
first. A slow drift of clock or temperature then reaches both alike. What a killed run has measured so far is
in its file.
"""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tabulate import tabulate

from benchmarks.harness.report import gib, text, write_json

ROOT = Path(__file__).resolve().parents[2]
TREES = ("before", "after")
# The new tree may take this much longer: all rows together, and each.
MEAN_LIMIT, ROW_LIMIT = 1.005, 1.02
# Beyond this two trees compute different things: of the loss, and of the gradients' norms.
LOSS_LIMIT, NORM_LIMIT = 1e-3, 1e-2
# The allocator's own granularity.
MEMORY_SLACK = 2 * 2**20

# `logitless` from the tree, which PYTHONPATH names; `benchmarks` from here, the same for both trees.
START = (
    "import sys, logitless; sys.path.insert(0, sys.argv.pop(1)); "
    "from benchmarks.regressions.own_rows import main; main()"
)


class Settings(NamedTuple):
    """What a process is told besides its tree and its rank."""

    device: str
    seed: int
    quick: bool
    repeats: int | None
    host_calls: int
    words: tuple[str, ...]  # parts of the names of the rows to measure; none: all
    ranks: int
    limit: float  # seconds that one process may take


def run(
    document: dict,
    trees: dict[str, Path],  # by the names in TREES
    settings: Settings,
    rounds: int,
    *,
    minutes: float,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Fills `document` run by run; starts no round that would not end within `minutes`."""
    known = {name: {"commit": commit(tree), "sources": digest(tree)} for name, tree in trees.items()}
    document |= {"trees": known, "rounds": rounds, "ranks": settings.ranks, "runs": [], "complete": False}
    start, longest = time.perf_counter(), 0.0
    for turn in range(rounds):
        began = time.perf_counter()
        if began + longest - start > 60 * minutes:
            say(f"stopped after {turn} of {rounds} rounds: another would not end within {minutes:g} minutes")
            break
        for name in TREES if turn % 2 == 0 else reversed(TREES):
            done = one_run(trees[name], settings)
            document["runs"].append({"tree": name, "round": turn} | done)
            document["summary"] = summary(document["runs"])
            write_json(out, document)
            mean = text(document["summary"]["geometric_mean"], "{:.4f}")
            said = f"round {turn + 1}, {name}: {done['seconds']:.0f} s, mean so far {mean}"
            say(f"{said}; {done.get('failed', 'ok')}")
        longest = max(longest, time.perf_counter() - began)
    else:
        document["complete"] = True
    write_json(out, document)


def commit(tree: Path) -> str | None:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def digest(tree: Path) -> str:
    """Tells trees apart where there is no git."""
    found = hashlib.sha256()
    for path in sorted((tree / "logitless").rglob("*.py")):
        found.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def one_run(tree: Path, settings: Settings) -> dict:
    """One process for each rank: {"seconds", "ranks": what each found, "failed": why, if something did}."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, processes(tree, settings, Path(folder)) as started:
        while any(process.poll() is None for process in started):
            late = time.perf_counter() - start > settings.limit
            if late or any(process.poll() for process in started):
                break
            time.sleep(0.05)
        seconds, codes = time.perf_counter() - start, [process.poll() for process in started]
        files = [Path(folder) / f"{rank}.json" for rank in range(settings.ranks)]
        found = [json.loads(file.read_text()) if file.exists() else None for file in files]
        done = {"seconds": seconds, "ranks": found}
        if all(code == 0 for code in codes):
            return done
        if not any(codes):
            return done | {"failed": f"did not end within {settings.limit:g} s"}
        rank = next(rank for rank, code in enumerate(codes) if code)
        said = (Path(folder) / f"{rank}.log").read_text(errors="replace").strip()
        print(said[-4000:], file=sys.stderr, flush=True)
        return done | {
            "failed": f"exit status {codes[rank]}: {said.splitlines()[-1][:200] if said else 'no output'}"
        }


@contextmanager
def processes(tree: Path, settings: Settings, folder: Path) -> Iterator[list[subprocess.Popen]]:
    """A process for each rank, that all end with the block, with whatever they started themselves."""
    # What is relative in it would mean another place there.
    others = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *others])}
    started: list[subprocess.Popen] = []
    # Whoever ends this process must not leave others on the GPU.
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for rank in range(settings.ranks):
            told = settings._asdict() | {"tree": str(tree), "rank": rank, "store": str(folder / "store")}
            told["out"] = str(folder / f"{rank}.json")
            # -P: else the working directory would come first on the path, perhaps with a `logitless`.
            command = [sys.executable, "-P", "-c", START, str(ROOT), json.dumps(told)]
            with (folder / f"{rank}.log").open("w") as log:
                # In a session of its own, it can be ended with all its children.
                options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                started.append(subprocess.Popen(command, env=environment, cwd=folder, **options))
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, usual)


def summary(runs: list[dict]) -> dict:
    """Each row's numbers by round and their ratio, and what is wrong with any."""
    names = dict.fromkeys(
        row["name"] for run in runs for found in run["ranks"] if found for row in found["rows"]
    )
    rows = [compared(name, runs) for name in names]
    ratios = [row["ratio"] for row in rows if row["unit"] == "ms" and row["ratio"]]
    wrong = [f"round {run['round'] + 1}, {run['tree']}: {run['failed']}" for run in runs if "failed" in run]
    wrong += [f"{row['name']}: {row['wrong']}" for row in rows if row["wrong"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    return {"geometric_mean": mean, "rows": rows, "wrong": wrong}


def compared(name: str, runs: list[dict]) -> dict:
    """One row: medians by round (of the slowest rank), the most memory, and whether the results agree."""
    row: dict = {
        "name": name,
        "unit": "us" if name.startswith("host ") else "ms",
        "ratio": None,
        "wrong": None,
    }
    results = {}
    for tree in TREES:
        here = [found_by_rank(name, run) for run in runs if run["tree"] == tree]
        failures = [rank["failed"] for ranks in here for rank in ranks if "failed" in rank]
        good = [ranks for ranks in here if ranks and not any("failed" in rank for rank in ranks)]
        times = [max(median(rank[row["unit"]]) for rank in ranks) for ranks in good]
        peaks = [rank["peak_bytes"] for ranks in good for rank in ranks if rank.get("peak_bytes") is not None]
        row[tree] = {
            row["unit"]: times,
            "median": median(times) if times else None,
            "peak_bytes": max(peaks, default=None),
        }
        results[tree] = [rank for ranks in good[:1] for rank in ranks]
        if failures:
            row["wrong"] = f"failed {tree}: {failures[0]}"
    if all(results.values()):
        row["ratio"] = row["after"]["median"] / row["before"]["median"]
        if not all(agree(*pair) for pair in zip(*results.values(), strict=True)):
            row["wrong"] = "the trees disagree in the loss or in the gradients' norms"
    elif {run["tree"] for run in runs} == set(TREES):
        row["wrong"] = row["wrong"] or "measured for one tree alone"
    return row


def found_by_rank(name: str, run: dict) -> list[dict]:
    """What every rank found of a row; nothing unless all of them have it."""
    found = [row for rank in run["ranks"] if rank for row in rank["rows"] if row["name"] == name]
    return found if len(found) == len(run["ranks"]) else []


def agree(before: dict, after: dict) -> bool:
    if "loss" not in before:
        return True
    numbers = [(before["loss"], after["loss"], LOSS_LIMIT * max(1.0, abs(before["loss"])))]
    if len(before["norms"]) != len(after["norms"]):
        return False
    numbers += [(x, y, NORM_LIMIT * x) for x, y in zip(before["norms"], after["norms"], strict=True)]
    return all(abs(x - y) <= limit for x, y, limit in numbers)


def table(document: dict) -> str:
    """A line for each row, and the verdicts."""
    found, body = document["summary"], []
    for row in found["rows"]:
        medians = (
            text(row[tree]["median"], "{:.2f}" if row["unit"] == "ms" else "{:.0f} us") for tree in TREES
        )
        peaks = (text(gib(row[tree]["peak_bytes"]), "{:.3f}") for tree in TREES)
        body.append([row["name"], *medians, text(row["ratio"], "{:.4f}"), *peaks])
    headers = ["", "before ms", "after ms", "ratio", "before GiB", "after GiB"]
    return "\n".join(
        (
            tabulate(body, headers, disable_numparse=True, colalign=("left", *["right"] * 5)),
            *verdicts(document),
        )
    )


def verdicts(document: dict) -> list[str]:
    found = document["summary"]
    rounds = [sum(run["tree"] == tree for run in document["runs"]) for tree in TREES]
    lines = [f"{' and '.join(map(str, rounds))} runs of {document['rounds']} rounds on {document['device']}"]
    timed = [row for row in found["rows"] if row["ratio"] and row["unit"] == "ms"]
    if timed:
        worst = max(timed, key=lambda row: row["ratio"])
        lines.append(f"geometric mean {within(found['geometric_mean'], MEAN_LIMIT)}")
        lines.append(f"worst row {within(worst['ratio'], ROW_LIMIT)}: {worst['name']}")
    for row in found["rows"]:
        if row["unit"] == "us" and row["ratio"]:
            before, after = (row[tree]["median"] for tree in TREES)
            lines.append(f"{row['name']}: {before:.1f} -> {after:.1f} us, {within(row['ratio'], 1.0)}")
    peaks = {row["name"]: [row[tree]["peak_bytes"] for tree in TREES] for row in found["rows"]}
    more = {name: y - x for name, (x, y) in peaks.items() if None not in (x, y) and y > x + MEMORY_SLACK}
    if any(None not in pair for pair in peaks.values()):
        said = "; ".join(f"{name} by {extra / 2**20:.1f} MiB" for name, extra in more.items())
        lines.append(f"peak memory larger: {said or 'nowhere'}")
    return lines + [f"NOT RIGHT: {reason}" for reason in found["wrong"]]


def within(ratio: float, limit: float) -> str:
    return f"{ratio:.4f} ({'within' if ratio <= limit else 'OVER'} {limit})"
