"""What the demo makes of its four runs: the table, the picture, and whether it kept its promises."""

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

MIB = 2**20
FULL, STOCK, OURS, BOTH = RUNS = ("full logits", "stock TRL", "logitless", "+ fused layers")
COLORS = {FULL: "#c3cad2", STOCK: "#f0985a", OURS: "#0b4fb3", BOTH: "#7aa6e8"}
# Steps that allocate the optimizer's state and warm caches up; neither timed nor measured
WARM_UP = 2


@dataclass
class Result:
    """What one run reports."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)  # peak above the memory held before the step
    held_out: list[float] = field(default_factory=list)  # loss of unseen text, before and after
    note: str = ""
    strategy: str | None = None
    chunks: int = 0
    plan: str | None = None
    fused: str | None = None  # which layers

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds[WARM_UP:])

    @property
    def memory(self) -> int:
        return max(self.step_bytes[WARM_UP:])


def difference(result: Result, other: Result) -> float:
    gaps = [abs(a - b) for a, b in zip(result.losses, other.losses, strict=True)]
    # `max` steps over a NaN
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def failures(results: dict[str, Result], tolerance: float) -> list[str]:
    """What the demo promises and these results do not show."""
    full, checks = results[FULL], {}
    for name in (OURS, BOTH):
        ours = results[name]
        gap, (before, *_, after), limit = difference(ours, full), ours.held_out, full.memory / MIB
        less, fused = ours.memory < full.memory, ours.strategy == "fused" and ours.chunks > 1
        checks |= {
            f"{name}: memory: expected less than {limit:.0f} MiB, got {ours.memory / MIB:.0f}": less,
            f"{name}: curves: expected a difference of at most {tolerance}, got {gap:.2e}": gap <= tolerance,
            f"{name}: loss: expected that of unseen text to fall, got {ours.held_out}": after < before,
            f"{name}: engine: expected the fused strategy in several chunks, got {ours.plan}": fused,
        }
    checks[f"{BOTH}: layers: expected some to be fused, got none"] = results[BOTH].fused is not None
    return [text for text, passed in checks.items() if not passed]


def table(results: dict[str, Result], device: str) -> Table:
    full = results[FULL]
    memory = "peak GPU memory" if device == "cuda" else "peak RSS"
    columns = (
        "",
        "loss of\nunseen text",
        "largest gap\nto full logits",
        "seconds\nper step",
        f"{memory}\nabove start of step",
        "of full\nlogits",
    )
    view = Table(*columns[:1], title="One model, one text, four trainings", title_style="bold")
    for column in columns[1:]:
        view.add_column(column, justify="right")
    for name, result in results.items():
        gap = "" if name == FULL else f"{difference(result, full):.1e}"
        share = "" if name == FULL else f"{result.memory / full.memory:.0%}"
        cells = (
            name,
            f"{result.held_out[-1]:.4f}",
            gap,
            f"{result.seconds:.2f}",
            f"{result.memory / MIB:,.0f} MiB",
            share,
        )
        view.add_row(*cells, style="bold" if name in (OURS, BOTH) else None)
    return view


def picture(results: dict[str, Result], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, bars) = pyplot.subplots(
        1, 2, figsize=(11, 4.4), width_ratios=(1.3, 1), layout="constrained"
    )
    widths, styles = (10, 6, 3, 1.5), ("-", "-", "-", "--")
    for (name, result), width, style in zip(results.items(), widths, styles, strict=True):
        curves.plot(
            range(1, len(result.losses) + 1),
            result.losses,
            style,
            color=COLORS[name],
            linewidth=width,
            label=name,
        )
    before, after = results[OURS].held_out
    curves.set(
        xlabel="step",
        ylabel="cross-entropy of the batch",
        title=f"The same training: loss of unseen text {before:.2f} → {after:.2f}",
    )
    curves.legend(frameon=False)

    names, sizes = list(results), [result.memory / MIB for result in results.values()]
    drawn = bars.bar(names, sizes, color=[COLORS[name] for name in names], width=0.6)
    bars.bar_label(drawn, [f"{size:,.0f} MiB" for size in sizes], padding=3)
    bars.set(ylabel="MiB above start of step", title="Peak memory of a step", ylim=(0, 1.12 * max(sizes)))
    bars.set_xlabel(results[STOCK].note.replace("; ", ";\n"), fontsize=8)
    for axis in (curves, bars):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
