"""One picture from a sweep: peak memory and time against the number of tokens."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.report import GIB

# Ours stands out; the peers keep one muted colour each, distinguishable without colour vision by their
# markers.
STYLES = {
    "logitless": {"color": "#d1495b", "linewidth": 2.6, "marker": "o", "zorder": 3},
    "eager, fp32 upcast": {"color": "#5c6b73", "marker": "s"},
    "Liger": {"color": "#4f8fba", "marker": "^"},
    "TRL ChunkedLogProb": {"color": "#e0a030", "marker": "D"},
}
SMALL = {"textcoords": "offset points", "fontsize": 8}
# Limits that no implementation can pass.
LIMIT = {"color": "#999999", "linestyle": "--", "linewidth": 1, "zorder": 1}


def draw(document: dict, path: Path) -> None:
    """Two panels against N: peak extra memory, and time per 1,000 tokens; a line ends where memory ran
    out."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    memory, time = figure.subplots(1, 2)
    sections = document["sections"]
    for name in dict.fromkeys(row["name"] for section in sections for row in section["rows"]):
        style = {"linewidth": 1.6, "markersize": 5} | STYLES.get(name, {})
        if values := [
            (N, row["peak_bytes"] / GIB) for N, row in found(sections, name) if row.get("peak_bytes")
        ]:
            memory.plot(*zip(*values, strict=True), label=name, **style)
            if any(row["verdict"] == "out of memory" for _, row in found(sections, name)):
                memory.annotate(
                    "then out of\nmemory", values[-1], (8, -14), **SMALL, color=style.get("color")
                )
        if values := [(N, 1e3 * row["ms"] / N) for N, row in found(sections, name) if row.get("ms")]:
            time.plot(*zip(*values, strict=True), label=name, **style)

    sizes = [section["shape"]["N"] for section in sections]
    bare = [1e3 * section["yardstick"]["ms"] / N for N, section in zip(sizes, sections, strict=True)]
    time.plot(sizes, bare, **LIMIT)
    time.annotate(
        "three bare matrix products", (sizes[-1], bare[-1]), (0, -11), **SMALL, color="#777777", ha="right"
    )
    dress(time, "Forward and backward, per 1,000 tokens", "ms", sizes)
    time.set_ylim(bottom=0)
    dress(memory, "Peak memory beyond the inputs, gradients included", "GiB", sizes)
    memory.set_yscale("log")
    memory.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if total := document["device_bytes"]:
        memory.axhline(total / GIB, **LIMIT)
        memory.annotate("the whole card", (sizes[0], total / GIB), (0, -11), **SMALL, color="#777777")
    handles, labels = time.get_legend_handles_labels()
    memory.legend(handles, labels, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0, 0.7))

    shape = sections[0]["shape"]
    title = f"Linear head + cross-entropy, H = {shape['H']:,}, V = {shape['V']:,}, bf16, {document['device']}"
    figure.suptitle(title, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def found(sections: list[dict], name: str) -> list[tuple[int, dict]]:
    """(N, row) of every row of this name."""
    return [
        (section["shape"]["N"], row) for section in sections for row in section["rows"] if row["name"] == name
    ]


def dress(axis: Axes, title: str, unit: str, sizes: list[int]) -> None:
    axis.set_title(title, fontsize=11)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{N // 1024}k" if N >= 1024 else str(N) for N in sizes])
    axis.set_xlabel("tokens")
    axis.set_ylabel(unit)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
