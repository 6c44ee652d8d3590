"""One picture of the layer operators at one width: time and peak memory of forward and backward."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.harness.report import GIB
from benchmarks.harness.styles import NOTE, STYLES
from benchmarks.layers.comparison import DIRECTIONS, OURS
from benchmarks.layers.operators import ROWS

WIDTH = 4096
COLORS = {
    OURS: STYLES["logitless"]["color"],
    "Inductor": STYLES["torch.compile"]["color"],
    "Liger": STYLES["Liger"]["color"],
    "FLA": STYLES["TRL ChunkedLogProb"]["color"],
    "QuACK": STYLES["QuACK"]["color"],
    "eager": STYLES["eager, fp32 upcast"]["color"],
}


def draw(document: dict, path: Path) -> None:
    """Two panels of bars, time and memory, with a group of bars for each operator."""
    sections = [section for section in document["sections"] if section["width"] == WIDTH]
    rows = {
        (section["kind"], row["name"]): row
        for section in sections
        for row in section["rows"]
        if row["verdict"] == "ok"
    }
    operators = list(dict.fromkeys(section["kind"] for section in sections))
    names = [name for name in COLORS if any((operator, name) in rows for operator in operators)]
    times = {key: sum(row[direction]["us"] for direction in DIRECTIONS) for key, row in rows.items()}
    memory = {key: row["peak_bytes"] / GIB for key, row in rows.items() if row["peak_bytes"]}

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    bars(left, operators, names, times)
    left.set_title("Forward and backward: microseconds", fontsize=12, pad=18)
    bars(right, operators, names, memory)
    right.set_title("Peak memory beyond the inputs: GiB", fontsize=12, pad=18)
    place = {"loc": "outside lower center", "ncols": len(names), "frameon": False, "fontsize": 11}
    figure.legend(*left.get_legend_handles_labels(), **place)
    title = f"Layer operators, {ROWS:,} tokens of {WIDTH:,} elements, bf16, {document['device']}"
    figure.suptitle(title, fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def bars(axis: Axes, operators: list[str], names: list[str], values: dict[tuple[str, str], float]) -> None:
    """A group for each operator; an implementation without the operator has no bar in its group. Eager
    PyTorch's bars are cut off at the top, with their values above."""
    width = 0.8 / max(1, len(names))
    fused = [value for (_, name), value in values.items() if name != "eager"]
    top = min(1.3 * max(fused, default=1), max(values.values(), default=1) * 1.05)
    for place, name in enumerate(names):
        measured = [number for number, operator in enumerate(operators) if (operator, name) in values]
        positions = [number + (place - (len(names) - 1) / 2) * width for number in measured]
        heights = [values[operators[number], name] for number in measured]
        axis.bar(positions, heights, width, color=COLORS[name], label=name)
        for x, height in zip(positions, heights, strict=True):
            if height > top:
                axis.annotate(
                    f"{height:,.0f}" if height >= 10 else f"{height:.2f}",
                    (x, top),
                    (0, 2),
                    ha="center",
                    **NOTE,
                )
    axis.set_ylim(0, top)
    axis.set_xticks(range(len(operators)), operators)
    axis.tick_params(labelsize=11)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
