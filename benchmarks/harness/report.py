"""What a run leaves behind: the JSON document, its table for the terminal, and its place in a page."""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.harness.registry import package_version

RESULTS = Path(__file__).parents[1] / "results"
GIB = 2**30
# A list of numbers over several lines
NUMBERS = re.compile(r"\[\n[-+.,\s\deE]*\]")


def new_document(benchmark: str, device: torch.device, *, quick: bool, versions: dict | None = None) -> dict:
    """The head of a result: what was run, where, with which versions. The seed is fresh, so that no two runs
    share inputs; a quick run, which a test makes, is the same every time."""
    now = datetime.now(UTC)
    packages = {name: package_version(name) for name in ("torch", "triton", "transformers", "logitless")}
    return {
        "benchmark": benchmark,
        "command": command_line(),
        "date": now.isoformat(timespec="seconds"),
        "quick": quick,
        "seed": 0 if quick else int(now.timestamp()),
        "device": device_name(device),
        "device_bytes": torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else None,
        "commit": commit(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | packages
        | (versions or {}),
    }


def command_line() -> str:
    """The command that runs."""
    return shlex.join(["python", "-m", "benchmarks", *map(_without_folder, sys.argv[1:])])


def _without_folder(argument: str) -> str:
    """A path from the root is one machine's, and says nothing to others."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def commit() -> str | None:
    """The commit of this checkout; of a copy without its history, what the variable BENCHMARK_COMMIT says."""
    if stated := os.environ.get("BENCHMARK_COMMIT"):
        return stated
    command = ["git", "describe", "--always", "--dirty"]
    try:
        run = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None if run.returncode == 0 else None


def write_json(path: Path | None, document: dict) -> None:
    """Replaces the file in one step, so that an interrupted run leaves the last whole state.

    A list of numbers is one line.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(document, indent=1))
    draft.write_text(text + "\n")
    draft.replace(path)


def every(benchmark: str, folder: Path = RESULTS, *, partial: bool = False) -> list[tuple[Path, dict]]:
    """The full-size results of a benchmark, the oldest first, by the date inside the file; `partial`: also of
    runs that were cut off."""
    found = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    usable = [
        (path, document)
        for path, document in found
        if document.get("benchmark") == benchmark
        and (partial or document["complete"])
        and not document["quick"]
    ]
    return sorted(usable, key=lambda pair: pair[1]["date"])


def newest(benchmark: str, folder: Path = RESULTS, *, device: str | None = None) -> tuple[Path, dict] | None:
    """The latest of them, or of those on one device."""
    found = [run for run in every(benchmark, folder) if device in (None, run[1]["device"])]
    return found[-1] if found else None


# Entries in which runs of one commit on one machine may differ. A plan names the number of supervised tokens,
# which are drawn at random.
OF_A_RUN = ("command", "date", "seed", "plan")


def medians(runs: Sequence[dict]) -> dict:
    """One document of several runs of a benchmark: the median of every number, and what else all runs have in
    common. Commands, dates, seeds and plans are those of the last run. If a run was cut off, the document
    has the sections that all runs have, and is not complete.

    Raises:
        ValueError: the runs differ in more than numbers, as those of another commit or device do.
    """

    def median(where: str, *values: object) -> object:
        first = values[0]
        if where.rpartition(".")[2] in OF_A_RUN:
            return values[-1]
        if isinstance(first, dict) and all(each.keys() == first.keys() for each in values):
            return {name: median(f"{where}.{name}", *(each[name] for each in values)) for name in first}
        if isinstance(first, list) and all(len(each) == len(first) for each in values):
            return [median(f"{where}[{at}]", *each) for at, each in enumerate(zip(*values, strict=True))]
        if all(each == first for each in values):
            return first
        if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
            return statistics.median(values)
        raise ValueError(f"runs: expected the same {where}, got {', '.join(map(str, values))}")

    if not all(run.get("complete", True) for run in runs):
        sections = min(len(run["sections"]) for run in runs)
        runs = [run | {"sections": run["sections"][:sections], "complete": False} for run in runs]
    return median("document", *runs) | {"runs": len(runs)}


def origin(document: dict, *runs: tuple[Path, dict]) -> str:
    """Versions, absent peers, result files and commands, as a block to unfold below a table."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items() if number)
    absent = "; ".join(f"{name}: {reason}" for name, reason in document.get("absent", {}).items())
    lines = [f"* Versions: {versions}."]
    if absent:
        lines.append(f"* Not measured: {absent}.")
    if stopped := document.get("stopped"):
        lines.append(f"* Not finished: {stopped}.")
    if left_out := document.get("left_out"):
        lines.append(f"* Left out for lack of time: {'; '.join(left_out)}.")
    lines += [f"* `benchmarks/results/{path.name}`: `{run['command']}`" for path, run in runs]
    return folded("Versions and commands", "\n".join(lines))


def rewrite(page: Path, name: str, body: str, *, kind: str = "benchmarks") -> None:
    """Replaces what stands between `<!-- KIND:NAME -->` and `<!-- /KIND:NAME -->`."""
    first, last = f"<!-- {kind}:{name} -->", f"<!-- /{kind}:{name} -->"
    text = page.read_text() if page.is_file() else ""
    if not re.search(f"{re.escape(first)}.*{re.escape(last)}", text, re.DOTALL):
        raise ValueError(
            f"page: expected {page} to hold the lines {first} and {last}; add them where the table goes."
        )
    head, _, rest = text.partition(first)
    _, _, tail = rest.partition(last)
    page.write_text(f"{head}{first}\n{body.strip()}\n{last}{tail}")


def folded(title: str, body: str) -> str:
    """A paragraph of its own that GitHub and the site show folded."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{body}\n\n</details>'


def lines(section: dict) -> str:
    """One shape's table for the terminal."""
    bare, rows = section["yardstick"], section["rows"]
    errors = list(dict.fromkeys(key for row in rows for key in row if key.endswith("_error")))
    headers = [
        "",
        "ms",
        "x GEMMs",
        "hot",
        "target",
        "peak GiB",
        "beyond grads",
        "limit",
        *(key.replace("_error", " err") for key in errors),
    ]
    body = [[bare["name"], f"{bare['ms']:.2f}", "1.000"]]
    for row in rows:
        verdict = row["verdict"]
        body.append(
            [
                row["name"],
                text(row.get("ms"), "{:.2f}") if verdict == "ok" else verdict,
                text(row.get("ratio"), "{:.3f}"),
                text(row.get("hot_ratio"), "{:.3f}"),
                text(row.get("target"), "{:.2f}"),
                text(gib(row.get("peak_bytes")), "{:.2f}"),
                text(gib(row.get("beyond_gradients_bytes")), "{:.2f}"),
                text(gib(row.get("memory_limit_bytes")), "{:.2f}"),
                *(text(row.get(key), "{:.1e}") for key in errors),
                text(row.get("first_call_seconds"), "{:.1f}"),
            ]
        )
    table = tabulate(body, [*headers, "first call s"], disable_numparse=True, stralign="right")
    speed = f"bare GEMMs at {bare['tflops']:.0f} TFLOP/s in chunks of {bare['chunk']}"
    return f"{sizes(section['shape'])}: {speed}\n{table}"


def sizes(shape: dict) -> str:
    """A shape in words: `N 8,192, H 4,096, V 128,256, 50% ignored`; what is zero or off is left out."""

    def part(name: str, value: float | str) -> str:
        name = name.replace("_", " ")
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return name
        return f"{value:.0%} {name}" if isinstance(value, float) else f"{name} {value:,}"

    return ", ".join(part(name, value) for name, value in shape.items() if value)


def gib(count: int | None) -> float | None:
    return None if count is None else count / GIB


def text(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)
