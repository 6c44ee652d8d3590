"""The use case of Liger's paper: whole SFT steps of five models against the batch size, 512 tokens a
sequence, with gradient checkpointing; tokens per second and peak memory of stock, of TRL's
`use_liger_kernel`, and of both flags.

The weights are random; the architectures are those of the names. What is measured, and how, is in `steps.py`.
"""

from collections.abc import Iterable

from tabulate import tabulate

from benchmarks.harness import report
from benchmarks.models import steps
from benchmarks.models.steps import LLAMA, SMALL, Configuration, Model

TOKENS = 512
BATCHES = (16, 32, 64, 128)
QWEN2 = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
}
MISTRAL = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
}
PHI3 = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
SHAPES = {
    "LLaMA3-8B": ("LlamaConfig", LLAMA),
    "Qwen2-7B": ("Qwen2Config", QWEN2),
    "Gemma-7B": ("GemmaConfig", GEMMA),
    "Mistral-7B": ("MistralConfig", MISTRAL),
    "Phi3": ("Phi3Config", PHI3),
}
QUICK_SHAPES = {"tiny Qwen3": ("Qwen3Config", SMALL)}
QUICK_BATCHES, QUICK_TOKENS = (1, 2), 32

CONFIGURATIONS = {
    "stock": Configuration(),
    "Liger": Configuration(liger=True),
    "both flags": Configuration(loss=True, layers="ours"),
}


def models(names: Iterable[str], batches: Iterable[int], *, quick: bool) -> list[tuple[str, Model]]:
    """(name, model and batch) of every section, a model's batches one after the other."""
    shapes, tokens = (QUICK_SHAPES, QUICK_TOKENS) if quick else (SHAPES, TOKENS)
    return [(name, Model(*shapes[name], batch, tokens)) for name in names for batch in batches]


def table(document: dict, form: str = "simple") -> str:
    """Tokens per second and peak memory, a table for each model."""
    parts = []
    for name in dict.fromkeys(section["model"] for section in document["sections"]):
        sections = [section for section in document["sections"] if section["model"] == name]
        rows = dict.fromkeys(row["name"] for section in sections for row in section["rows"])
        body = [[row, *(cell(section, row) for section in sections)] for row in rows]
        headers = [name, *(f"batch {section['sequences']}" for section in sections)]
        parts.append(tabulate(body, headers, tablefmt=form, disable_numparse=True))
    return "\n\n".join(parts)


def for_page(document: dict, source: str) -> str:
    """The tables in Markdown, and how it was measured."""
    return f"{table(document, 'github')}\n\n{steps.measured_how(document)}\n\n{source}"


def cell(section: dict, name: str) -> str:
    row = next(row for row in section["rows"] if row["name"] == name)
    if row.get("verdict") != "ok":
        return row.get("verdict") or "not run"
    speed = section["sequences"] * section["tokens"] / (row["ms"] / 1e3)
    return f"{speed:,.0f} tokens/s" + (report.text(report.gib(row["peak_bytes"]), ", {:.1f} GiB") or "")
