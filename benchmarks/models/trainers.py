"""TRL's trainers beside ours with `use_chunked_loss=True`: training steps as a user runs them, whole, in time
and memory.

The model is Qwen3-0.6B's architecture with random weights. GRPO is figure 6 of Liger's paper: batch sizes
until memory runs out, without gradient checkpointing and without generation. The others keep TRL's defaults,
gradient checkpointing among them.
"""

import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.harness import forked, report
from benchmarks.harness.measure import GRADIENT_LIMIT
from benchmarks.harness.registry import Peer, Peers
from benchmarks.harness.timing import spread


@dataclass(frozen=True)
class Case:
    """A trainer with options of its config; GRPO is measured by batch size, the others by tokens."""

    kind: str  # of the pair: "SFT" for SFTConfig and SFTTrainer
    options: dict = field(default_factory=dict)
    lora: bool = False


@dataclass(frozen=True)
class Scale:
    model: dict  # of Qwen3Config
    sequence: int  # the most tokens of an SFT sequence, and of the two of a pair together
    tokens: tuple[int, ...]
    rollout: tuple[int, int] = (0, 0)  # tokens of a prompt and of its completion
    batches: tuple[int, ...] = ()  # of GRPO; () where its steps are given in tokens too
    fused_layers: bool = False  # of our trainers
    timed: int = 5  # steps, behind the first `WARM`

    def by_batch(self, case: Case) -> bool:
        return case.kind == "GRPO" and bool(self.batches)

    def unit(self, case: Case) -> str:
        return "batch size" if self.by_batch(case) else "tokens"

    def sizes(self, case: Case) -> tuple[int, ...]:
        return self.batches if self.by_batch(case) else self.tokens

    def length(self, case: Case, size: int) -> int:
        """Tokens of a sequence, of a pair, or of a prompt with one of its two or more completions."""
        if self.by_batch(case):
            return sum(self.rollout)
        return min(self.sequence, size // 2 if case.kind == "GRPO" else size)

    def batch(self, case: Case, size: int) -> int:
        """Sequences, pairs or completions in a step."""
        return size if self.by_batch(case) else size // self.length(case, size)

    def completion(self, case: Case, size: int) -> tuple[int, int]:
        """GRPO: tokens of a prompt, and of its completion."""
        if self.by_batch(case):
            return self.rollout
        length = self.length(case, size)
        return length // 4, length - length // 4


CASES = {
    "SFT": Case("SFT"),
    "SFT, label smoothing": Case("SFT", {"label_smoothing_factor": 0.1}),
    "ORPO": Case("ORPO", {"remove_unused_columns": False}),
    "DPO": Case("DPO"),
    "GRPO": Case("GRPO", {"gradient_checkpointing": False}),
    "GRPO, LoRA": Case("GRPO", {"gradient_checkpointing": False}, lora=True),
}
PEERS = Peers(
    [
        Peer(name, lambda case=case: case, package="peft" if case.lora else None)
        for name, case in CASES.items()
    ]
)

QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
TINY = QWEN3 | {
    "vocab_size": 517,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TRAINERS = ("TRL", "logitless")
WARM = 3
COMPARED = 8  # steps whose losses are compared: later the weights differ by bf16's rounding of every step
FULL = Scale(QWEN3, 2048, (4096, 8192, 16384, 32768), (128, 512), (8, 16, 32, 64, 128, 256))
QUICK = Scale(TINY, 32, (64,), (4, 12), (8,))
# Steps of few tokens, with both flags.
SHORT = Scale(QWEN3, 1024, (512, 2048), fused_layers=True)
QUICK_SHORT = Scale(TINY, 32, (32, 64), fused_layers=True)


def run(
    document: dict,
    device: torch.device,
    *,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    sizes: tuple[int, ...] = (),
    rounds: int = 1,
    timed: int = Scale.timed,
    step_by_step: bool = False,
    short: bool = False,
    out: Path | None,
    say: Callable[[str], None],
) -> dict:
    """Trains in every case at every size (or those in `sizes`) with TRL's trainer and ours in turns, `rounds`
    times each, and writes `document` to `out` after each round. On a GPU each round has a process of its own:
    from one process to the next the host's speed, and with it short steps, differs by far more than the
    trainers do. Whoever was second comes first in the next round; `step_by_step`, they take turns at every
    step, and memory, which holds both models then, is not measured. `short`: steps of few tokens, ours with
    both flags.

    Raises:
        ImportError: TRL is not installed, or not in a supported version.
        ValueError: `only` or `skip` names no case.
    """
    cases, absent = PEERS.load(device, only, skip)
    # Nothing is looked up on the hub; read when transformers is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from logitless.trl_integration.versions import require_supported

    require_supported()
    from benchmarks.models import trainer_steps

    scales = (SHORT, QUICK_SHORT) if short else (FULL, QUICK)
    scale = replace(scales[document["quick"]], timed=timed)
    head = {"model": scale.model, "steps": WARM + timed, "timed_steps": timed, "step_by_step": step_by_step}
    head |= {"fused_layers": scale.fused_layers}
    measure = measured_in_turns if step_by_step else measured
    if device.type == "cuda":
        measure = partial(apart, measure)
    document |= head | {"rounds": rounds, "absent": absent, "sections": [], "complete": False}
    for name, reason in absent.items():
        say(f"absent: {name}: {reason}")
    with TemporaryDirectory() as folder:
        trainer_steps.save_model(scale.model, Path(folder), device, document["seed"])
        for name, case in cases.items():
            exhausted: set[str] = set()
            for size in scale.sizes(case):
                if sizes and size not in sizes:
                    continue
                unit = scale.unit(case)
                section = {"trainer": name, "unit": unit, "size": size, "rows": []}
                section |= {"batch": scale.batch(case, size), "length": scale.length(case, size)}
                document["sections"].append(section)
                for turn in range(rounds):
                    # What ran out of memory at a smaller size, or a round before, is not tried again.
                    tried = tuple(
                        trainer for trainer in TRAINERS[:: 1 - 2 * (turn % 2)] if trainer not in exhausted
                    )
                    found = measure(case, scale, size, Path(folder), device, document["seed"], tried)
                    if step_by_step and all(each.get("times") for each in found.values()):
                        section.setdefault("ratios", []).append(paired(found))
                    for trainer in TRAINERS:
                        row = {"name": trainer} | found.get(trainer, {"verdict": "out of memory"})
                        if row["verdict"] == "out of memory":
                            exhausted.add(trainer)
                        say(f"{name}, {unit} {size:,}: {describe(row)}")
                        add(section["rows"], row)
                    judge(section)
                    report.write_json(out, document)
                said = ", ".join(filter(None, [difference(section), ratio(section)]))
                say(f"{name}, {unit} {size:,}: {said}")
            say(f"\n{name}\n{table(document, name, 'simple')}\n")
    document["complete"] = True
    report.write_json(out, document)
    return document


PRELOADED = ["benchmarks.models.trainer_steps", "logitless.trl_integration.pairs"]


def apart(function: Callable[..., dict], *args: Any, **kwargs: Any) -> dict:
    """`function` in a process of its own, forked from one that has imported TRL."""
    with ProcessPoolExecutor(1, mp_context=forked.server(PRELOADED)) as pool:
        return pool.submit(function, *args, **kwargs).result()


def measured(*args: Any) -> dict[str, dict]:
    """A row for each of the trainers that come last among the arguments, in their order."""
    from benchmarks.models import trainer_steps

    trainer_steps.quiet()
    *shared, names = args
    return {name: trainer_steps.measure(*shared, ours=name == "logitless") for name in names}


def measured_in_turns(*args: Any) -> dict[str, dict]:
    """The same, step by step."""
    from benchmarks.models import trainer_steps

    trainer_steps.quiet()
    *shared, names = args
    found = trainer_steps.attempt(partial(trainer_steps.train_in_turns, *shared), shared[4])
    return {name: found for name in names} if "verdict" in found else found


def paired(found: dict[str, dict]) -> float:
    """How long ours takes as a share of TRL's: the median of all pairs of steps one behind the other."""
    stock, ours = (found[name]["times"] for name in TRAINERS)
    return statistics.median(y / x for x, y in zip(stock, ours, strict=True))


def add(rows: list[dict], row: dict) -> None:
    """One more run of a trainer: of several, the times of all count, and the first that went wrong."""
    known = next((known for known in rows if known["name"] == row["name"]), None)
    if known is None:
        rows.append(row)
    elif row["verdict"] != "ok":
        known.update(row)
    elif known["verdict"] in ("ok", "wrong"):
        known["times"] += row["times"]
        known["peak_bytes"] = max(known["peak_bytes"] or 0, row["peak_bytes"] or 0) or None
        known.update(spread(known["times"]))


def judge(section: dict) -> None:
    """Where both trainers ran: how far ours was from TRL's in any step, and whether that is too far."""
    if [row["verdict"] for row in section["rows"]] != ["ok", "ok"]:
        return
    stock, ours = section["rows"]
    for each, name in (("loss_difference", "losses"), ("grad_norm_difference", "grad_norms")):
        section[each] = furthest(stock[name][:COMPARED], ours[name][:COMPARED])
    # From the second step on the weights differ by bf16's rounding too, which DPO's loss shows most. NaN is
    # in no limit.
    if not (
        section["loss_difference"] <= GRADIENT_LIMIT and section["grad_norm_difference"] <= GRADIENT_LIMIT
    ):
        ours["verdict"] = "wrong"


def furthest(stock: list[float], ours: list[float]) -> float:
    """The largest relative difference; NaN if any is."""
    pairs = torch.tensor([stock, ours], dtype=torch.float64)
    return ((pairs[1] - pairs[0]).abs() / pairs[0].abs()).max().item()


def failed(document: dict) -> list[str]:
    """Runs of ours that failed, or learned from something else than TRL's."""
    return [
        (
            f"{section['trainer']}, {section['unit']} {section['size']:,}: "
            f"{row['verdict']} {row.get('reason', '')}"
        ).strip()
        for section in document["sections"]
        for row in section["rows"]
        if row["name"] == "logitless" and row["verdict"] in ("wrong", "failed")
    ]


def cell(row: dict) -> str:
    if row["verdict"] != "ok":
        return row["verdict"]
    return f"{row['ms']:.0f} ms" + (report.text(report.gib(row["peak_bytes"]), ", {:.1f} GiB") or "")


def difference(section: dict) -> str:
    if "loss_difference" not in section:
        return ""
    return f"{section['loss_difference']:.0e}, {section['grad_norm_difference']:.0e}"


def ratio(section: dict) -> str:
    """Of steps in turns: the median of the processes' ratios, and all of them."""
    if not (found := section.get("ratios")):
        return ""
    each = ", ".join(f"{x:.3f}" for x in sorted(found))
    return f"ours / TRL {statistics.median(found):.3f} (processes: {each})"


def describe(row: dict) -> str:
    """A run in one line."""
    parts = [f"{row['name']} {cell(row)}", row.get("reason"), row.get("plan")]
    return "; ".join(part for part in parts if part)


def table(document: dict, trainer: str, form: str) -> str:
    """One trainer's sizes, in a format of tabulate's."""
    sections = [section for section in document["sections"] if section["trainer"] == trainer]
    body = []
    for section in sections:
        stock, ours = section["rows"]
        body.append(
            [f"{section['size']:,}", cell(stock), cell(ours), ours.get("strategy"), difference(section)]
        )
    headers = [sections[0]["unit"], "TRL", "logitless", "strategy", "loss, gradient norm differ by"]
    align = ("right", "right", "right", "left", "right")
    return tabulate(body, headers, tablefmt=form, colalign=align, disable_numparse=True)


def _in_turns(rounds: int) -> str:
    return "" if rounds == 1 else f" in each of {rounds} processes, in which both take turns,"


def by_trainer(document: dict, source: str) -> str:
    """A table for each trainer, in Markdown."""
    names = dict.fromkeys(section["trainer"] for section in document["sections"])
    tables = "\n\n".join(f"{name}:\n\n{table(document, name, 'github')}" for name in names)
    flags = "`use_chunked_loss=True`" + (
        " and `use_fused_layers=True`" if document.get("fused_layers") else ""
    )
    sizes = {letter: document["model"][name] for letter, name in (("H", "hidden_size"), ("V", "vocab_size"))}
    return (
        f"{tables}\n\nOne {document['device']}, {document['date'][:10]}, bf16, Qwen3-0.6B's architecture "
        f"({report.sizes(sizes)}, random "
        "weights): a whole training step, optimizer included, of TRL's trainer and of logitless's with "
        f"{flags}. Median time of "
        f"the last {document['timed_steps']} of {document['steps']} steps"
        f"{_in_turns(document.get('rounds', 1))} and the most memory allocated "
        f"during them; differences "
        f"are the largest of the first {COMPARED} steps, relative. GRPO without generation and without "
        f"gradient checkpointing, the rest with TRL's defaults.\n\n{source}"
    )
