"""The table of one loss in a Markdown page: implementations against shapes."""

import re

from tabulate import tabulate

from benchmarks.harness.measure import LOSS_LIMIT
from benchmarks.harness.report import GIB, sizes


def table(document: dict, source: str) -> str:
    """Ratio to the bare products and peak memory for every implementation and shape, in Markdown."""
    sections = document["sections"]
    headers = ["", *(sizes(section["shape"]) for section in sections), "largest gradient error"]
    body = [[yardstick(document), *(f"{section['yardstick']['ms']:.1f} ms" for section in sections), ""]]
    for name in dict.fromkeys(row["name"] for section in sections for row in section["rows"]):
        rows = [next((row for row in section["rows"] if row["name"] == name), None) for section in sections]
        cells = [name, *map(cell, rows), worst(rows)]
        body.append([entry and f"**{entry}**" for entry in cells] if name.startswith("logitless") else cells)
    align = ("left", *["right"] * (len(headers) - 1))
    return (
        tabulate(body, headers, tablefmt="github", colalign=align, disable_numparse=True)
        + "\n\n"
        + caption(document, source)
    )


def cell(row: dict | None) -> str:
    if row is None:
        return ""
    if row["verdict"] == "wrong" and row["loss_error"] > LOSS_LIMIT:
        return f"loss off by {row['loss_error']:.1%}"
    if row["verdict"] != "ok":
        return row["verdict"]
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / GIB:.1f} GiB"
    hot = f" / {row['hot_ratio']:.2f}" if row.get("hot_ratio") else ""
    return f"{row['ratio']:.2f}{hot}{memory}"


def worst(rows: list[dict | None]) -> str:
    errors = [row[key] for row in rows if row for key in row if re.fullmatch("d_.*_error", key)]
    return f"{max(errors):.0e}" if errors else ""


def yardstick(document: dict) -> str:
    """Its name, where all sections share one."""
    names = {section["yardstick"].get("name") for section in document["sections"]}
    return names.pop() or "bare GEMMs" if len(names) == 1 else "bare GEMMs"


def over_all_rows(document: dict) -> str:
    ignored = any(section["shape"].get("ignored") for section in document["sections"])
    return " (over all rows, the ignored ones too)" if ignored else ""


def other_runs(document: dict) -> str:
    """Which rows come from other runs: those of the libraries that the file's commit names."""
    _, _, others = str(document["commit"]).partition(" (")
    names = [name for name in ("TRL", "torch") if f"{name}:" in others]
    return f" (those of {' and '.join(names)} in runs of their own)" if names else ""


def caption(document: dict, source: str) -> str:
    one = yardstick(document) == "one bare GEMM"
    products = (
        "one bare matrix product, hidden @ weight.T (GEMM-equivalents)" if one else "the bare matrix products"
    )
    return (
        f"One {document['device']}, {document['date'][:10]}, bf16, forward and backward of the public call "
        "with its defaults, except for the options that a row names. "
        f"Time as a multiple of {products}, interleaved in the same run{over_all_rows(document)}"
        f"{other_runs(document)}, after a pause / in calls that follow each other; "
        "peak memory beyond the inputs, returned gradients included; gradient error against fp32, relative "
        f"L2.\n\n{source}"
    )
