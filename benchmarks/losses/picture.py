"""One picture: from a sweep, peak memory and time as a multiple of the bare products against the tokens; from
the errors of gradients, those of a trained head."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from benchmarks.harness.report import GIB
from benchmarks.harness.styles import LIMIT, NOTE, STYLES

# Where a ratio leaves the picture: at few tokens a kernel that is launched for each chunk takes twenty times.
MOST = 6


# Rows of the errors: the names of their styles, and their labels.
ERRORS = {
    "logitless": ("logitless", "logitless"),
    "eager, fp32 logits": ("eager, fp32 upcast", "eager, fp32 logits"),
    "eager": ("eager, fp32 upcast", "eager, bf16 logits"),
    "Liger": ("Liger", "Liger"),
    "TRL": ("TRL ChunkedLogProb", "TRL"),
    "CCE (filtered)": ("CCE (filtered)", "CCE (filtered)"),
}


def draw(sweep: dict, path: Path, small: dict | None = None, errors: dict | None = None) -> None:
    """Two panels against N, in which a line ends where memory ran out, and one of `errors`.

    Calls of few tokens are those of `small`, where it has them. `errors`: a head of `convergence`. The text
    can still be read where the picture is 400 pixels wide.
    """
    sections = with_few_tokens(sweep["sections"], small)
    note = NOTE | {"fontsize": 13}
    figure = Figure(figsize=(8.5, 10 if errors else 7), layout="constrained")
    top = figure
    if errors:
        top, bottom = figure.subfigures(2, 1, height_ratios=(7, 3))
        draw_errors(errors, bottom.subplots())
    memory, time = top.subplots(1, 2)
    names = list(dict.fromkeys(row["name"] for section in sections for row in section["rows"]))
    for name in (
        *(name for name in STYLES if name in names),
        *(name for name in names if name not in STYLES),
    ):
        style = {"linewidth": 1.6, "markersize": 6, "label": label(name, sections)} | STYLES.get(name, {})
        rows = found(sections, name)
        numbers = [N for N, _ in rows]
        # A line has a gap where its implementation failed.
        memory.plot(numbers, [(row.get("peak_bytes") or math.nan) / GIB for _, row in rows], **style)
        time.plot(numbers, [row.get("ratio") or math.nan for _, row in rows], **style)

    sizes = [section["shape"]["N"] for section in sections]
    dress(memory, "Peak memory, GiB", sizes)
    if any(row.get("peak_bytes") for section in sections for row in section["rows"]):  # not on a CPU
        memory.set_yscale("log", base=2)
    memory.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if total := sweep["device_bytes"]:
        memory.axhline(total / GIB, **LIMIT)
        memory.annotate(f"the card, {total / GIB:.0f} GiB", (sizes[0], total / GIB), (0, 4), **note)
        memory.set_ylim(top=2 * total / GIB)
    dress(time, "Time, multiple of the products", sizes)
    time.set_yscale("log")
    time.set_ylim(0.87, MOST)
    time.set_yticks([1, 1.5, 2, 3, 4, 5, 6])
    time.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    time.yaxis.set_minor_formatter(NullFormatter())
    time.axhline(1, **LIMIT)
    time.annotate("three bare products", (sizes[0], 1), (0, -20), **note)
    place = {"loc": "outside lower center", "ncols": 2, "frameon": False, "fontsize": 14}
    top.legend(*memory.get_legend_handles_labels(), **place)

    shape = sections[0]["shape"]
    device = sweep["device"].partition(" 80GB")[0]
    top.suptitle(f"Cross-entropy, H {shape['H']:,}, V {shape['V']:,}, bf16, {device}", fontsize=17)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_errors(head: dict, axis: Axes) -> None:
    """A bar for the error of the gradient of the hidden states, in percent."""
    rows = {row["name"]: row for row in head["rows"] if row["verdict"] == "ok"}
    names = [name for name in ERRORS if name in rows]
    percent = [100 * rows[name]["d_hidden"]["error"] for name in names]
    bars = axis.barh(
        [ERRORS[name][1] for name in names],
        percent,
        color=[STYLES[ERRORS[name][0]]["color"] for name in names],
    )
    axis.bar_label(bars, fmt="%.2f", fontsize=14, padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.tick_params(labelsize=14)
    axis.set_title(
        f"Error of the gradient of hidden states, %, {head['head'].partition(',')[0]}", fontsize=16
    )
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def with_few_tokens(sections: list[dict], small: dict | None) -> list[dict]:
    """The sections, with rows of the small calls of the same H and V in the place of those of their name."""
    shape = sections[0]["shape"]
    every = {section["shape"]["N"]: section for section in sections}
    for few in small["sections"] if small else []:
        if few["objective"] != "CE" or few["shape"] | {"N": None} != shape | {"N": None}:
            continue
        rows = [row for row in few["rows"] if row["name"] in STYLES]
        names = [row["name"] for row in rows]
        others = every.get(few["shape"]["N"], few)["rows"]
        rows += [row for row in others if row["name"] in STYLES and row["name"] not in names]
        every[few["shape"]["N"]] = {"shape": few["shape"], "rows": rows}
    return [every[N] for N in sorted(every)]


def label(name: str, sections: list[dict]) -> str:
    """The name in the legend, which also says where the line ends or leaves the picture."""
    rows = found(sections, name)
    ends = [N for N, row in rows if row["verdict"] == "out of memory"]
    above, where = max(((row["ratio"], N) for N, row in rows if row.get("ratio")), default=(0, 0))
    notes = [f"out of memory at {short(ends[0])}"] if ends else []
    notes += [f"{above:.0f}x at {short(where)}, off the axis"] if above > MOST else []
    short_name = name.partition(",")[0]
    return f"{short_name} ({'; '.join(notes)})" if notes else short_name


def found(sections: list[dict], name: str) -> list[tuple[int, dict]]:
    """(N, row) of every row of this name."""
    return [
        (section["shape"]["N"], row) for section in sections for row in section["rows"] if row["name"] == name
    ]


def short(N: int) -> str:
    return f"{N // 1024}k" if N >= 1024 else str(N)


def dress(axis: Axes, title: str, sizes: list[int]) -> None:
    axis.set_title(title, fontsize=16)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes[::2], [short(N) for N in sizes[::2]])
    axis.tick_params(labelsize=14)
    axis.set_xlabel("tokens", fontsize=14)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
