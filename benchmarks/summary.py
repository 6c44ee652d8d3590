"""The README's two short tables: a row for each kind of loss, and what the flags do for each trainer."""

from tabulate import tabulate

from benchmarks import trainers
from benchmarks.report import GIB, sizes

# (benchmark, which of its shapes, what it measures)
LOSSES = (
    ("ce", 1, "cross-entropy"),
    ("preference", 0, ""),
    ("preference", 2, ""),
    ("policy", 0, "GRPO"),
    ("distillation", 0, "JSD"),
)
COLUMNS = {
    "full logits": "eager",
    "torch.compile": "torch.compile",
    "Liger": "Liger",
    "TRL": "TRL",
    "**logitless**": "logitless",
}

# What TRL 1.16 builds and what the flag changes, as docs/trl.md says; measured where the benchmark has the
# trainer.
FULL = "full logits"
TRAINERS = (
    ("SFT", "no full logits", "products: 4 → 3", "SFT"),
    ("SFT with label smoothing", FULL, "memory, time", "SFT, label smoothing"),
    ("ORPO; alike CPO, SimPO, TPO", FULL, "memory, time", "ORPO"),
    ("DPO; alike KTO", "no full logits", "with LoRA products: 3 → 2", "DPO"),
    ("GRPO; alike RLOO, GMPO, AsyncGRPO", "no full logits", "with LoRA products: 3 → 2", "GRPO"),
    ("GKD, GOLD, IWOPD, SDFT, SDPO, OnlineDPO, A2PO …", "full logits of both models", "memory", None),
    ("Distillation, AsyncDistillation", "no full logits", "products: 8 → 4", None),
    ("transformers' Trainer, own loops", "full logits, and a copy in fp32", "memory, time", None),
)


def losses(documents: dict[str, dict]) -> str:
    """Time and peak memory of each kind of loss that was measured, in Markdown."""
    body, devices = [], set()
    for name, place, what in LOSSES:
        if name not in documents or place >= len(documents[name]["sections"]):
            continue
        section = documents[name]["sections"][place]
        devices.add(documents[name]["device"])
        shape = ", ".join(filter(None, (what, sizes(section["shape"]))))
        cells = [cell(section["rows"], prefix) for prefix in COLUMNS.values()]
        body.append([shape, *cells[:-1], f"**{cells[-1]}**"])
    caption = (
        f"One {', '.join(sorted(devices))}, bf16, forward and backward, head and gradients included; peak "
        "memory beyond the inputs; of a peer's several ways the fastest. From `benchmarks/results/`, by "
        "`python -m benchmarks plot`; [all tables, versions and what falls short](docs/benchmarks.md)."
    )
    return f"{_table(body, ['loss', *COLUMNS])}\n\n{caption}"


def cell(rows: list[dict], prefix: str) -> str:
    """Time and memory: of ours with its defaults, of a peer's several ways the fastest."""
    found = [row for row in rows if row["name"].startswith(prefix)]
    right = [row for row in found if row["verdict"] == "ok"]
    if not right:
        return found[0]["verdict"] if found else ""
    row = right[0] if prefix == "logitless" else min(right, key=lambda row: row["ms"])
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / GIB:.1f} GiB"
    return f"{row['ms']:.0f} ms{memory}"


def flags(document: dict) -> str:
    """What `use_chunked_loss` does for each trainer, in Markdown."""
    body = [[who, stock, saved, measured(document, name)] for who, stock, saved, name in TRAINERS]
    headers = [
        "trainer",
        "stock TRL builds",
        "`use_chunked_loss=True` saves",
        "a step, stock → with the flag",
    ]
    architecture = {"H": document["model"]["hidden_size"], "V": document["model"]["vocab_size"]}
    caption = (
        "A product is one multiplication with the head, tokens x H x V; a loss takes at least 3 of them, 2 "
        f"with a frozen head. Measured on one {document['device']}: Qwen3-0.6B's architecture "
        f"({sizes(architecture)}), bf16, optimizer included, the largest size that ran, GRPO without "
        "checkpointing; [all sizes](docs/benchmarks.md#trainers)."
    )
    return f"{_table(body, headers)}\n\n{caption}"


def measured(document: dict, name: str | None) -> str:
    """The largest size at which both ran."""
    ran = [
        section
        for section in document["sections"]
        if section["trainer"] == name and all(row["verdict"] == "ok" for row in section["rows"])
    ]
    return " → ".join(map(trainers.cell, ran[-1]["rows"])) if ran else "not measured"


def _table(body: list[list[str]], headers: list[str]) -> str:
    align = ("left",) * len(headers)
    return tabulate(body, headers, tablefmt="github", colalign=align, disable_numparse=True)
