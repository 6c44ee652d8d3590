"""The tables that compare implementations across losses: the README's, and that of docs/why.md."""

from tabulate import tabulate

from benchmarks.harness.report import GIB, sizes
from benchmarks.losses import tables

# (benchmark, which of its shapes, what it measures, the matrix products that it needs at least, those that
# its yardstick has). The products are the logits and two gradients, and the logits of a reference or teacher.
LOSSES = (
    ("ce", 1, "cross-entropy", 3, 3),
    ("preference", 0, "", 3, 1),
    ("preference", 2, "", 4, 1),
    ("policy", 0, "GRPO", 3, 1),
    ("distillation", 0, "JSD", 4, 4),
)
# The README's table also has a call of few tokens.
SUMMARY = (LOSSES[0], ("ce-few", 1, "cross-entropy", 3, 3), *LOSSES[1:])
# docs/why.md has one more shape, at which torch's function was timed.
COMPARED = (LOSSES[0], ("ce", 0, "cross-entropy", 3, 3), *LOSSES[1:])
COLUMNS = {
    "full logits": "eager",
    "torch.compile": "torch.compile",
    "Liger": "Liger",
    "TRL": "TRL",
    "**logitless**": "logitless",
}

# The rows of docs/why.md: how each implementation is called there, and the names of its measured rows.
IMPLEMENTATIONS = {
    "**logitless**": ("logitless",),
    "full logits, PyTorch": ("eager, fp32 upcast",),
    "full logits, torch.compile": ("torch.compile",),
    "torch `F.linear_cross_entropy`, chunked": (
        "torch F.linear_cross_entropy, reduction='none'",
        "torch F.linear_cross_entropy",
    ),
    "Liger (Triton; JSD: its chunked loss)": ("Liger", "Liger chunked_loss"),
    "Liger with sums in fp32": ("Liger, accum_dtype fp32",),
    "Liger's scaled cross-entropy (CuTe)": ("Liger scaled CE",),
    "Liger's operator for Hopper (CuTe)": ("Liger sm90",),
    "Cut Cross-Entropy, filtered (its default)": ("CCE (filtered)",),
    "Cut Cross-Entropy, exact": ("CCE (exact)",),
    "QuACK, chunks of 2,048": ("QuACK, chunks of 2,048",),
    "QuACK, chunks of 8,192": ("QuACK, chunks of 8,192",),
    "TRL's chunked kernels": ("TRL ChunkedLogProb", "TRL ChunkedDivergence"),
}


def losses(documents: dict[str, dict]) -> str:
    """Time and peak memory of each kind of loss that was measured, and of a whole step, in Markdown."""
    body, devices, apart, liger = [], set(), [], set()
    for name, place, what, _, _ in SUMMARY:
        if name not in documents or place >= len(documents[name]["sections"]):
            continue
        section = documents[name]["sections"][place]
        devices.add(documents[name]["device"])
        shape = ", ".join(filter(None, (what, sizes(section["shape"]))))
        apart += [shape.partition(",")[0]] * ("TRL" in tables.other_runs(documents[name]))
        if what == "cross-entropy" and (row := shown(section["rows"], COLUMNS["Liger"])):
            liger.add(row["name"])
        cells = [cell(section["rows"], prefix) for prefix in COLUMNS.values()]
        body.append([shape, *cells[:-1], f"**{cells[-1]}**"])
    of_liger = f" (of Liger, for cross-entropy: {' and '.join(sorted(liger))})" if liger else ""
    caption = (
        f"One {', '.join(sorted(devices))}, bf16, forward and backward with a trainable head, one call after "
        "a pause. Peak memory beyond the inputs, gradients included. N: tokens, T: tokens of a sequence, H: "
        "hidden size, V: vocabulary; DPO has a reference model. Full logits: cast to fp32, as transformers "
        "does; torch.compile: the same, compiled. TRL: its chunked kernels, as SFT, DPO and GRPO use them. "
        "Of several implementations of a library that were measured, with default options, the fastest is "
        f"shown{of_liger}. {other_runs(apart)}Versions, other libraries, more shapes and missed targets: "
        "[benchmarks](docs/benchmarks.md)."
    )
    parts = [_table(body, ["loss", *COLUMNS]), caption]
    if "step-lora" in documents:
        parts += of_steps(documents["step-lora"])
    return "\n\n".join(parts)


def of_steps(document: dict) -> list[str]:
    """The table of whole steps with LoRA, and its caption."""
    body = []
    for section in document["sections"]:
        rows = {row["name"]: row for row in section["rows"]}
        stock, ours = (time_and_memory(rows[name]) for name in ("LoRA", "LoRA, logitless loss + layers"))
        checkpointing = "with" if section["checkpointing"] else "without"
        model = f"{section['model']}, {section['sequences']} x {section['tokens']:,} tokens"
        body.append([f"{model}, {checkpointing} checkpointing", stock, f"**{ours}**"])
    caption = (
        f"One {document['device']}, bf16: TRL and PEFT alone, and with both flags, the loss and fused layers."
        " Peak memory with the model. Fused layers alone and compiled layers were not measured in this run "
        "([LoRA](docs/howto/lora.md#what-to-expect) has compiled layers without TRL)."
    )
    return [_table(body, ["whole step of SFT with LoRA", "TRL, PEFT", "**logitless**"]), caption]


def other_runs(apart: list[str]) -> str:
    """The sentence that names the losses whose rows of TRL are of other runs."""
    return (
        f"TRL's cells of {', '.join(apart)} are of other runs than the rest of their rows. " if apart else ""
    )


def shown(rows: list[dict], prefix: str) -> dict | None:
    """The row that a cell shows: of ours with its defaults, of a peer's several ways the fastest."""
    right = [row for row in rows if row["name"].startswith(prefix) and row["verdict"] == "ok"]
    return min(right, key=lambda row: row["ms"] if prefix != "logitless" else 0, default=None)


def cell(rows: list[dict], prefix: str) -> str:
    """Time and memory."""
    if row := shown(rows, prefix):
        return time_and_memory(row)
    return next((row["verdict"] for row in rows if row["name"].startswith(prefix)), "")


def time_and_memory(row: dict) -> str:
    memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / GIB:.1f} GiB"
    return f"{row['ms']:.{0 if row['ms'] >= 10 else 1}f} ms{memory}"


def implementations(documents: dict[str, dict]) -> str:
    """Time as a multiple of the products that each loss needs, and peak memory, of every implementation, in
    Markdown."""
    measured = [each for each in COMPARED if each[0] in documents]
    body = []
    for title, names in IMPLEMENTATIONS.items():
        cells = []
        for benchmark, place, _, needed, counted in measured:
            rows = documents[benchmark]["sections"][place]["rows"]
            found = [row for row in rows if row["name"] in names]
            right = [row for row in found if row["verdict"] == "ok"]
            row = min(right, key=lambda row: row["ratio"]) if right else next(iter(found), None)
            if right:
                row = row | {key: row[key] * counted / needed for key in ("ratio", "hot_ratio") if key in row}
            cells.append(tables.cell(row))
        body.append([title, *cells])
    headers = [""]
    for benchmark, place, what, needed, _ in measured:
        section = documents[benchmark]["sections"][place]
        shape = ", ".join(filter(None, (what, sizes(section["shape"]))))
        headers.append(f"{shape}; {needed} products")
    devices = ", ".join(sorted({documents[benchmark]["device"] for benchmark, *_ in measured}))
    return (
        f"{_table(body, headers)}\n\nOne {devices}, bf16, forward and backward with a trainable head. "
        "Time as a multiple of the matrix products that the loss needs, measured in the same run, after a "
        "pause / in calls that follow each other; the header "
        "of each column has their number (for DPO with the logits of the reference, for the JSD with those "
        "of the teacher). Peak memory beyond the inputs, gradients included. An empty cell was not "
        "measured. Versions, more shapes and gradient errors: [benchmarks](benchmarks.md)."
    )


def _table(body: list[list[str]], headers: list[str]) -> str:
    align = ("left",) * len(headers)
    return tabulate(body, headers, tablefmt="github", colalign=align, disable_numparse=True)
