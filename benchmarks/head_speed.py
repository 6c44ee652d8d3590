"""The latest runs of the head's losses, `head-speed-peers-h200.json`, in the form of other results.

The file has two runs of one day. "calls in a row" is of the newer commit; "lone calls" also has the
implementations that take longest. Both measure `ms`, `ratio` and memory in the same way.
"""

import json
from pathlib import Path

from benchmarks.report import RESULTS

NAME = "head-speed-peers-h200.json"
RUNS = ("calls in a row", "lone calls")
# Tokens of a batch whose call does not wait for the host.
LARGE = 8192


def cross_entropy(earlier: tuple[Path, dict] | None, results: Path = RESULTS) -> dict[str, tuple[Path, dict]]:
    """The tables of cross-entropy with their results: large batches, small ones, and ignored tokens, which
    only the earlier result has. A row that the newer run lacks is the older run's."""
    path = results / NAME
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    if earlier and earlier[1]["date"][:10] >= document["date"]:
        return {}
    shapes = []
    for run in RUNS:
        shapes += [s["shape"] for s in document[run]["cross-entropy"] if s["shape"] not in shapes]
    sections = []
    for shape in shapes:
        found = [s for run in RUNS for s in document[run]["cross-entropy"] if s["shape"] == shape]
        rows = {row["name"]: row for section in reversed(found) for row in section["rows"]}
        # Variants of one library are adjacent rows: "Liger", "Liger, accum_dtype fp32".
        libraries = list(dict.fromkeys(library(name) for name in rows))
        ordered = sorted(rows.values(), key=lambda row: libraries.index(library(row["name"])))
        yardstick = {"name": "three bare GEMMs", "ms": found[0]["bare_ms"]}
        sections.append({"shape": shape, "yardstick": yardstick, "rows": ordered})
    whole = document | {"device": "NVIDIA H200"}
    few = sorted((s for s in sections if s["shape"]["N"] < LARGE), key=lambda s: s["shape"]["N"])
    tables = {
        "ce": (path, whole | {"sections": [s for s in sections if s["shape"]["N"] >= LARGE]}),
        "ce-few": (path, whole | {"sections": few}),
    }
    if earlier:
        old_path, old = earlier
        ignored = [section for section in old["sections"] if section["shape"]["ignored"]]
        tables["ce-ignored"] = (old_path, old | {"sections": ignored})
    return tables


def library(name: str) -> str:
    return name.partition(",")[0]


def with_ours(document: dict, results: Path = RESULTS) -> tuple[dict, list[tuple[Path, dict]]]:
    """A result of another loss with the latest row of logitless in the place of its own, and the file of that
    row; the result itself where there is none."""
    path = results / NAME
    latest = json.loads(path.read_text()) if path.exists() else {}
    if latest.get("date", "") <= document["date"][:10]:
        return document, []
    later = {}
    for run in reversed(RUNS):
        for section in latest[run].get(document["benchmark"], ()):
            later[str(section["shape"])] = section["rows"][0]
    sections = [
        section
        | {
            "rows": [
                later[str(section["shape"])],
                *(row for row in section["rows"] if not row["name"].startswith("logitless")),
            ]
        }
        for section in document["sections"]
    ]
    note = f" The row of logitless is of {latest['date']}, divided by the products of its own run."
    return document | {"sections": sections, "note": note}, [(path, latest)]
