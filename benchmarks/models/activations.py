"""Steps of one model under activation budgets: bytes that the layers hold, and time of a step.

A step is a forward and a backward pass of a model with fused layers, without an optimizer. The budgets, from
that of full checkpointing to that of none, take turns.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import nn

from benchmarks.harness import report
from benchmarks.harness.measure import synchronize
from benchmarks.harness.styles import LIMIT, STYLES
from logitless.models import fit_activations, fuse_layers

# Eighths of what lies between all layers full and all kept.
PARTS = 8
WARMUP = 2
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
QUICK_SIZES = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
BATCH, QUICK_BATCH = (2, 300), (1, 24)


def run(
    document: dict, device: torch.device, *, rounds: int, out: Path | None, say: Callable[[str], None]
) -> None:
    """Fills `document`: a row for each budget, and one for checkpointing on and off."""
    quick = document["quick"]
    if device.type == "cpu" and not quick:
        torch.set_num_threads(1)  # threads that wait for others count as busy
    sizes, shape = (QUICK_SIZES, QUICK_BATCH) if quick else (SIZES, BATCH)
    torch.manual_seed(document["seed"])
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = transformers.Qwen3Config(**sizes, pad_token_id=0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        ids = torch.randint(1, sizes["vocab_size"], shape)
    fuse_layers(model)
    fitted = fit_activations(model, 2**62)
    for _ in range(WARMUP):
        step(model, ids)
    costs, shared = fitted.costs
    fitted()
    least, most = (shared + sum(cost[level] for cost in costs) for level in ("full", "keep"))
    rows = [{"name": "checkpointing on"}, {"name": "checkpointing off"}]
    rows += [
        {"name": f"{part}/{PARTS}", "budget": least + (most - least) * part // PARTS}
        for part in range(PARTS + 1)
    ]
    document |= {
        "sizes": sizes,
        "shape": shape,
        "least": least,
        "most": most,
        "rows": rows,
        "complete": False,
    }
    for row in rows:
        row["times"] = []
    for turn in range(rounds):
        for row in rows:
            with configured(model, row) as handle:
                for _ in range(WARMUP):
                    step(model, ids)
                row["times"].append(timed(model, ids, device))
                row |= held(model, ids, handle, device)
        say(f"round {turn + 1} of {rounds}")
    for row in rows:
        row["ms"] = min(row["times"])  # what else the machine runs only adds to it
        say(f"{row['name']}: {row['ms']:.1f} ms {row.get('plan', '')}")
    document["complete"] = True
    report.write_json(out, document)


def step(model: nn.Module, ids: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@contextmanager
def configured(model: nn.Module, row: dict) -> Iterator:
    """The model under the row's budget, or with checkpointing as the row says."""
    if "budget" in row:
        fitted = fit_activations(model, row["budget"])
        yield fitted
        fitted()
        return
    if row["name"] == "checkpointing on":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    yield None
    model.gradient_checkpointing_disable()


def timed(model: nn.Module, ids: torch.Tensor, device: torch.device) -> float:
    """Milliseconds of a step: on a CPU those of this process, whatever else the machine runs."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    start = clock()
    step(model, ids)
    synchronize(device)
    return 1e3 * (clock() - start)


def held(model: nn.Module, ids: torch.Tensor, fitted, device: torch.device) -> dict:
    """Bytes after a forward pass, by count, and on a GPU the most allocated in a step."""
    found = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    if fitted is not None:
        levels = fitted.last_plan.levels
        found = {"held_bytes": fitted.held_bytes, "plan": fitted.last_plan.describe()}
        found |= {level: levels.count(level) for level in ("keep", "cheap", "full")}
    loss.backward()
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def failed(document: dict) -> list[str]:
    """Budgets that were exceeded, and rows that hold less than the row before."""
    rows = [row for row in document["rows"] if "budget" in row]
    over = [f"{row['name']}: {row['held_bytes']} bytes" for row in rows if row["held_bytes"] > row["budget"]]
    pairs = zip(rows, rows[1:])
    return over + [
        f"{b['name']}: less than {a['name']}" for a, b in pairs if b["held_bytes"] < a["held_bytes"]
    ]


def draw(document: dict, path: Path) -> None:
    """Two panels against the budget: bytes held, and time of a step."""
    from matplotlib.figure import Figure

    mib = 2**20
    rows = [row for row in document["rows"] if "budget" in row]
    ends = {row["name"]: row["ms"] for row in document["rows"] if "budget" not in row}
    budgets = [row["budget"] / mib for row in rows]
    figure = Figure(figsize=(10, 4), layout="constrained")
    memory, duration = figure.subplots(1, 2)
    ours = {"linewidth": 2} | STYLES["logitless"]
    memory.plot(budgets, [row["held_bytes"] / mib for row in rows], label="held by the layers", **ours)
    memory.plot(budgets, budgets, label="the budget", **LIMIT)
    memory.set_ylabel("MiB after the forward pass")
    duration.plot(budgets, [row["ms"] for row in rows], label="activation budget", **ours)
    for name, color in (("checkpointing on", "#4f8fba"), ("checkpointing off", "#2f9e8f")):
        duration.axhline(ends[name], label=name, color=color, linestyle="--")
    duration.set_ylabel("ms of forward and backward")
    for row, budget in zip(rows[::2], budgets[::2]):
        text = f"{row['keep']}/{row['cheap']}/{row['full']}"
        duration.annotate(
            text, (budget, row["ms"]), (0, 8), textcoords="offset points", ha="center", fontsize=8
        )
    duration.set_ylim(bottom=0)
    for axis in (memory, duration):
        axis.set_xlabel("activation budget, MiB")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(frameon=False)
    layers, (sequences, tokens) = document["sizes"]["num_hidden_layers"], document["shape"]
    title = f"{layers} layers of a small Qwen3, {sequences} x {tokens} tokens, {document['device']}"
    figure.suptitle(f"{title}; layers kept/cheap/full", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
