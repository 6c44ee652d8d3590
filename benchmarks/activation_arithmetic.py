"""An activation budget on an 8B model by arithmetic: measured steps and operators, and bytes from shapes."""

from tabulate import tabulate

from benchmarks.layers import OURS
from benchmarks.report import GIB
from benchmarks.steps import LLAMA
from logitless.models.activation_plan import choose_levels

MODEL, CONFIGURATION = "Llama-3.1-8B", "our loss + our layers"
TOKENS, BF16 = 2 * 4096, 2
# Names of the measured operators that the level "cheap" recomputes.
RECOMPUTED = ("rms_norm 8192x4096", "rms_norm 8192x4096", "gated silu 8192x14336")


def layer_bytes() -> dict[str, int]:
    """Bytes that a layer holds, by level."""
    hidden, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    keys = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    # The inputs of both norms and their outputs, rotated queries, what attention returns; keys and values;
    # the gate's two inputs and its output.
    keep = 6 * hidden + 2 * keys + 3 * inner
    elements = {"keep": keep, "cheap": keep - 2 * hidden - inner, "full": hidden}
    return {level: BF16 * TOKENS * number for level, number in elements.items()}


def steps_of(documents: list[dict]) -> dict[bool, dict]:
    """The measured rows of the model with both flags, by whether it checkpoints; none if one is missing."""
    rows = {
        section["checkpointing"]: row
        for document in documents
        for section in document["sections"]
        for row in section["rows"]
        if section["model"] == MODEL and row["name"] == CONFIGURATION
    }
    return rows if len(rows) == 2 else {}


def table(documents: list[dict], operators: dict) -> str:
    """The arithmetic in Markdown."""
    steps, cost, layers = steps_of(documents), layer_bytes(), LLAMA["num_hidden_layers"]
    on, off = steps[True], steps[False]
    forward = {
        section["operator"]: row["forward"]["us"]
        for section in operators["sections"]
        for row in section["rows"]
        if row["name"] == OURS
    }
    price = {
        "keep": 0.0,
        "cheap": sum(forward[name] for name in RECOMPUTED) / 1e3,
        "full": (on["ms"] - off["ms"]) / layers,
    }
    # Without checkpointing the peak is where all activations are held; with it, where none is.
    budget = int(on["peak_bytes"] - (off["peak_bytes"] - layers * cost["keep"]))
    levels, _ = choose_levels([cost] * layers, 0, budget)
    ms = off["ms"] + sum(price[level] for level in levels)
    planned = f"layers at this level with a budget of {budget / GIB:.1f} GiB"
    body = [
        ["a layer holds, GiB", *(f"{number / GIB:.2f}" for number in cost.values())],
        ["a layer is recomputed in, ms", *(f"{number:.2f}" for number in price.values())],
        ["step with all layers at this level, ms", f"{off['ms']:.0f}", "", f"{on['ms']:.0f}"],
        ["peak of that step, GiB", f"{off['peak_bytes'] / GIB:.1f}", "", f"{on['peak_bytes'] / GIB:.1f}"],
        [planned, *(str(levels.count(level)) for level in cost)],
    ]
    found = tabulate(body, ["", *cost], tablefmt="github", disable_numparse=True)
    saved = 100 * (1 - ms / on["ms"])
    return "\n".join(
        (
            found,
            "",
            f"{MODEL}, 2 x 4,096 tokens, with `use_chunked_loss` and `use_fused_layers`, one H200.",
            "Step times, peaks and recomputation times are measured; activation bytes are computed from",
            f"shapes. From these numbers, a step with `activation_budget` {budget / GIB:.1f} GiB is",
            f"predicted to take {ms:.0f} ms, {saved:.0f}% less than with full checkpointing, at the same",
            "peak; it was not measured.",
        )
    )
