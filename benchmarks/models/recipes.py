"""What goes well with both flags, each with its counterpart: whole SFT steps in processes of their own
(`steps.py`).

The recipes are those of docs/recipes.md. Tokens per second do not count padding. Losses and gradient norms
are shown, as a set-up that trains nothing is fast.
"""

from dataclasses import replace

from tabulate import tabulate

from benchmarks.harness import report
from benchmarks.models import steps
from benchmarks.models.steps import FLAGS

RECIPES = {
    "both flags": FLAGS,
    "AdamW that is not fused": replace(FLAGS, options={"optim": "adamw_torch"}),
    "compiled layers, logitless loss": replace(FLAGS, layers="compiled"),
    "FP8, compiled layers, logitless loss": replace(FLAGS, layers="compiled", fp8=True),
    "LoRA": replace(FLAGS, adapter="LoRA"),
    "LoRA+": replace(FLAGS, adapter="LoRA+"),
    "sequences of many lengths": replace(FLAGS, uneven=True),
    "the same, packed": replace(FLAGS, uneven=True, options={"packing": True, "packing_strategy": "bfd"}),
}


def table(document: dict, form: str = "simple") -> str:
    """Time, tokens per second, memory, and what was learned."""
    [section] = document["sections"]
    body = []
    for row in section["rows"]:
        good = [each for each in row["runs"] if each["verdict"] == "ok"]
        if not good:
            body.append([row["name"], row.get("verdict") or "not run", row.get("reason")])
            continue
        last, speed = good[-1], good[-1]["tokens_per_step"] / (row["ms"] / 1e3)
        memory = report.text(report.gib(row["peak_bytes"]), "{:.1f}")
        learned = [f"{last['losses'][0]:.3f} to {last['losses'][-1]:.3f}", f"{last['grad_norms'][-1]:.2g}"]
        body.append([row["name"], f"{row['ms']:.1f}", f"{speed:,.0f}", memory, *learned])
    headers = [section["model"], "ms a step", "tokens/s", "GiB", "loss", "gradient norm"]
    return tabulate(body, headers, tablefmt=form, disable_numparse=True)


def for_page(document: dict, source: str) -> str:
    """The table in Markdown, and how it was measured."""
    how = steps.measured_how(document).partition(" Differences")[0]
    [section] = document["sections"]
    return f"{table(document, 'github')}\n\n{steps.title(section)}. {how}\n\n{source}"
