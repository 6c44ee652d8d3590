"""The picture of docs/proof.md: errors of the rows of d_hidden on a real head, and how far runs part."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.styles import STYLES
from benchmarks.proof.curves import EAGER, VARIANTS
from benchmarks.proof.gradient_errors import BINS
from benchmarks.proof.tables import DETAILED, section_of

# Colours of the other pictures
COLORS = {
    "logitless": STYLES["logitless"]["color"],
    "eager": STYLES["eager, fp32 upcast"]["color"],
    "eager, fp32 logits": "#222222",
    "TRL": STYLES["TRL ChunkedLogProb"]["color"],
    "Liger": STYLES["Liger"]["color"],
    "CCE (filtered)": STYLES["CCE (filtered)"]["color"],
    "CCE (no filter)": STYLES["CCE (exact)"]["color"],
}
WINDOW = 5  # steps of the mean that a curve shows
# Below it nothing is drawn: losses are kept in seven digits.
LEAST = 1e-5


def draw(document: dict, path: Path) -> None:
    """The histogram, and the curves of at most two seeds."""
    seeds = sorted({run["seed"] for run in document["runs"]})
    shown = seeds[:2]
    figure = Figure(figsize=(8.5, 5 * (1 + len(shown))), layout="constrained")
    top, *others = figure.subplots(1 + len(shown), 1)
    histogram(top, document)
    for axis, seed in zip(others, shown, strict=True):
        parting(axis, document, seed, next((other for other in seeds if other != seed), None))
    names: dict = {}
    for axis in figure.axes:
        names |= {name: handle for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    place = {"loc": "outside lower center", "ncols": 2, "frameon": False, "fontsize": 14}
    figure.legend(list(names.values()), list(names), **place)
    figure.suptitle(f"Cross-entropy in bf16 on trained models, {document['device']}", fontsize=17)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def histogram(axis: Axes, document: dict) -> None:
    """Shares of rows by their error."""
    section, (start, end, bins) = section_of(document, DETAILED), BINS
    edges = [10 ** (start + (end - start) * i / bins) for i in range(bins + 1)]
    rows = {row["name"]: row for row in section["rows"] if row["verdict"] == "ok"}
    for name, color in COLORS.items():
        if name in ("TRL", "Liger") or name not in rows:  # their lines would hide eager's
            continue
        counts = rows[name]["d_hidden"]["histogram"]
        shares = [100 * count / sum(counts) for count in counts]
        style = {"color": color, "linewidth": 2.6 if name == "logitless" else 1.6, "label": name}
        if name == "eager, fp32 logits":
            style["linestyle"] = ":"
        axis.stairs(shares, edges, zorder=3 if name == "logitless" else 2, **style)
    axis.set_xscale("log")
    axis.set_xlim(1e-3, 1)
    dress(
        axis, f"Rows of d_hidden by their error\n{DETAILED}", "error of a row against fp64", "% of the rows"
    )


def parting(axis: Axes, document: dict, seed: int, other_seed: int | None) -> None:
    """Distances of the runs of one seed to its eager run."""
    runs = {(run["variant"], run["seed"]): run["loss"] for run in document["runs"]}
    base = runs[EAGER, seed]
    nulls = [variant.name for variant in VARIANTS if variant.is_null and variant.name != EAGER]
    bands = [distance(base, runs[name, seed]) for name in nulls if (name, seed) in runs]
    steps = range(WINDOW, len(base) + 1)
    if bands:
        low, high = ([pick(each) for each in zip(*bands, strict=True)] for pick in (min, max))
        label = "eager again, and from first weights moved by 1e-6"
        axis.fill_between(steps, low, high, color="#5c6b73", alpha=0.3, linewidth=0, label=label)
    if other_seed is not None:
        other = distance(base, runs[EAGER, other_seed])
        axis.plot(steps, other, color="#bbbbbb", linewidth=1.4, label="eager, another seed")
    for name in ("eager, fp32 logits", "TRL", "Liger", "CCE (filtered)", "logitless"):
        if (name, seed) in runs:
            style = {"color": COLORS[name], "linewidth": 2.2 if name == "logitless" else 1.2, "label": name}
            if name == "eager, fp32 logits":
                style["linestyle"] = ":"
            axis.plot(steps, distance(base, runs[name, seed]), **style)
    axis.set_yscale("log")
    axis.set_ylim(LEAST, 1)
    title = f"Distance of training losses to eager's, seed {seed}\nmean of {WINDOW} steps, from scratch"
    dress(axis, title, "step", "|loss - loss of eager|, nats")


def distance(a: list[float], b: list[float]) -> list[float]:
    """Means of `WINDOW` steps."""
    apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return [max(LEAST, sum(apart[step - WINDOW : step]) / WINDOW) for step in range(WINDOW, len(apart) + 1)]


def dress(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=15)
    axis.set_xlabel(x, fontsize=14)
    axis.set_ylabel(y, fontsize=14)
    axis.tick_params(labelsize=13)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
