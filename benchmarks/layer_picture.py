"""One picture of the layer operators against the width, as in the figures of Liger's paper: time and peak
memory of forward and backward, whoever has the operator."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from benchmarks.layer_operators import ROWS
from benchmarks.layers import DIRECTIONS, OURS
from benchmarks.picture import STYLES
from benchmarks.report import GIB

OWN_STYLES = {
    OURS: STYLES["logitless"],
    "eager": STYLES["eager, fp32 upcast"],
    "Inductor": STYLES["torch.compile"],
    "Liger": STYLES["Liger"],
    "FLA": STYLES["TRL ChunkedLogProb"],
    "QuACK": STYLES["QuACK"],
}


def draw(document: dict, path: Path) -> None:
    """A column for each operator that was measured at several widths; time above, memory below."""
    sections = [each for each in document["sections"] if each["width"] is not None]
    kinds = list(dict.fromkeys(each["kind"] for each in sections))
    figure = Figure(figsize=(3.6 * len(kinds), 6), layout="constrained")
    axes = figure.subplots(2, len(kinds), squeeze=False, sharex="col")
    for column, kind in enumerate(kinds):
        chosen = [each for each in sections if each["kind"] == kind]
        for name, style in OWN_STYLES.items():
            rows = [
                (each["width"], row)
                for each in chosen
                for row in each["rows"]
                if row["name"] == name and row["verdict"] == "ok"
            ]
            if not rows:
                continue
            style = {"linewidth": 1.6, "markersize": 6, "label": name} | style
            times = [(width, sum(row[direction]["us"] for direction in DIRECTIONS)) for width, row in rows]
            axes[0, column].plot(*zip(*times, strict=True), **style)
            memory = [(width, row["peak_bytes"] / GIB) for width, row in rows if row["peak_bytes"]]
            if memory:  # not on a CPU
                axes[1, column].plot(*zip(*memory, strict=True), **style)
        dress(axes[0, column], kind, "us, forward and backward" if column == 0 else "", chosen)
        dress(axes[1, column], "", "GiB at the peak" if column == 0 else "", chosen)
        axes[1, column].set_xlabel("numbers in a token")
    shown = axes[0, 0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=len(OWN_STYLES), frameon=False)
    figure.suptitle(f"Layer operators, {ROWS:,} tokens, bf16, {document['device']}", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def dress(axis: Axes, title: str, unit: str, sections: list[dict]) -> None:
    axis.set_title(title, fontsize=11)
    axis.set_ylabel(unit)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([each["width"] for each in sections])
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.grid(visible=True, alpha=0.3)
