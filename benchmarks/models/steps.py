"""Whole SFT steps of TRL: stock, with Liger's layers, with compiled layers, with the loss, the
layers or both of logitless; with LoRA, stock and both.

Each configuration runs in a process of its own, as Liger patches a process for good, and they take turns: a
round runs each of them once. The weights are random, the same in all; a step is `Trainer`'s, optimizer
included, and nothing waits for the device between the first timed step and the last.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import forked, report
from benchmarks.harness.measure import GRADIENT_LIMIT, LOSS_LIMIT
from benchmarks.harness.registry import package_version
from benchmarks.models.trainers import furthest

PRELOADED = ["benchmarks.models.step_process", "logitless.trl_integration.pairs"]


@dataclass(frozen=True)
class Model:
    config: str  # class of transformers
    sizes: dict
    sequences: int
    tokens: int  # of a sequence


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
LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL = {
    "vocab_size": 517,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "Qwen3-0.6B": Model("Qwen3Config", QWEN3, 4, 4096),
    "Llama-3.1-8B": Model("LlamaConfig", LLAMA, 2, 4096),
}
QUICK = {"tiny Qwen3": Model("Qwen3Config", SMALL, 2, 32)}

GATED_DELTA = {
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
# About 1B parameters of the architectures of 2026, with fewer layers than the published models.
FAMILIES = {
    "Qwen3.5-like": Model(
        "Qwen3_5TextConfig",
        QWEN3 | GATED_DELTA | {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 24},
        2,
        2048,
    ),
    "Gemma-4-like": Model(
        "Gemma4TextConfig",
        {
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 6144,
            "num_hidden_layers": 20,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_kv_shared_layers": 0,
        },
        2,
        4096,
    ),
    "Qwen3-MoE-like": Model("Qwen3MoeConfig", QWEN3 | EXPERTS | {"num_hidden_layers": 12}, 4, 4096),
}
QUICK_FAMILIES = {
    "Qwen3.5-like": Model(
        "Qwen3_5TextConfig",
        SMALL
        | dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
        | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
        | {"num_hidden_layers": 4},
        2,
        32,
    ),
    "Gemma-4-like": Model(
        "Gemma4TextConfig",
        SMALL
        | {"vocab_size_per_layer_input": 517, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        2,
        32,
    ),
    "Qwen3-MoE-like": Model(
        "Qwen3MoeConfig",
        SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        2,
        32,
    ),
}


@dataclass(frozen=True)
class Configuration:
    loss: bool = False  # use_chunked_loss
    layers: str | None = None  # "liger", "compiled" or "ours", which is use_fused_layers
    liger: bool = False  # TRL's use_liger_kernel, which is Liger's layers and its loss
    options: dict = field(default_factory=dict)  # of SFTConfig
    adapter: str | None = None  # "LoRA" or "LoRA+", which has an optimizer of its own
    dropout: float = 0.0  # of the adapter
    fp8: bool = False  # products by torchao
    uneven: bool = False  # sequences from an eighth to all of the tokens
    budget: str | None = None  # activation_budget; "50%": of what lies between all layers full and all kept

    @property
    def stock(self) -> "Configuration":
        """What TRL alone computes of it, with which it is compared."""
        return replace(self, loss=False, layers=None, liger=False, budget=None)

    @property
    def packages(self) -> list[str]:
        needed = {
            "liger-kernel": self.liger or self.layers == "liger",
            "peft": self.adapter,
            "torchao": self.fp8,
        }
        return [name for name, wanted in needed.items() if wanted]


CONFIGURATIONS = {
    "stock": Configuration(),
    "Liger's layers": Configuration(layers="liger"),
    "compiled layers": Configuration(layers="compiled"),
    "logitless loss": Configuration(loss=True),
    "logitless layers": Configuration(layers="ours"),
    "logitless loss + layers": Configuration(loss=True, layers="ours"),
    "logitless loss + Liger's layers": Configuration(loss=True, layers="liger"),
    "logitless loss + compiled layers": Configuration(loss=True, layers="compiled"),
}

FLAGS = Configuration(loss=True, layers="ours")
# Of `FAMILIES`
OF_FAMILIES = {
    name: CONFIGURATIONS[name]
    for name in ("stock", "Liger's layers", "logitless layers", "logitless loss + layers")
}
# Beside full fine-tuning of the same model
LORA = {
    "full fine-tuning": Configuration(),
    "full fine-tuning, logitless loss + layers": FLAGS,
    "LoRA": Configuration(adapter="LoRA"),
    "LoRA, logitless loss + layers": replace(FLAGS, adapter="LoRA"),
    "LoRA, dropout 0.05": Configuration(adapter="LoRA", dropout=0.05),
    "LoRA, dropout 0.05, logitless loss + layers": replace(FLAGS, adapter="LoRA", dropout=0.05),
}


def budgeted(budgets: list[str]) -> dict[str, Configuration]:
    """Both flags, with each of these activation budgets."""
    return {f"logitless loss + layers, {x}": Configuration(True, "ours", budget=x) for x in budgets}


@dataclass(frozen=True)
class Settings:
    """What a process is told, beside its model and configuration."""

    device: str
    seed: int
    logged: int  # first steps, whose loss and gradient norm are logged
    timed: int  # steps behind them, without a synchronisation in between
    checkpointing: bool = True


@dataclass(frozen=True)
class Limits:
    seconds: float  # for one process
    minutes: float  # for all; a process begins only if it can still take its whole time


def missing(configurations: dict[str, Configuration], say: Callable[[str], None]) -> dict[str, str]:
    """Those whose packages are not all here, and why."""
    absent = {
        name: f"{package} is not installed"
        for name, made in configurations.items()
        for package in made.packages
        if package_version(package) is None
    }
    for name, reason in absent.items():
        say(f"absent: {name}: {reason}")
    return absent


def run(
    document: dict,
    models: list[tuple[str, Model]],
    configurations: dict[str, Configuration],
    settings: list[Settings],
    *,
    rounds: int,
    limits: Limits,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Fills `document`, one section for each model with and without checkpointing, and writes it after every
    process."""
    start = time.perf_counter()
    absent = missing(configurations, say)
    present = {name: made for name, made in configurations.items() if name not in absent}
    sections = [
        {
            "model": name,
            "checkpointing": each.checkpointing,
            "rows": [{"name": made, "stock": stock_of(made, present), "runs": []} for made in present],
        }
        | {"sequences": model.sequences, "tokens": model.tokens}
        for name, model in models
        for each in settings
    ]
    document |= {"absent": absent, "rounds": rounds, "settings": asdict(settings[0]), "sections": sections}
    document["complete"] = False
    for turn in range(rounds):
        for section, (model, each) in zip(sections, ((m, s) for _, m in models for s in settings)):
            for row in section["rows"]:
                if time.perf_counter() - start + limits.seconds > 60 * limits.minutes:
                    say(f"stopped: another process might not end within {limits.minutes:g} minutes")
                    report.write_json(out, document)
                    return
                row["runs"].append(one_run(model, present[row["name"]], each, limits.seconds))
                judge(section)
                report.write_json(out, document)
                say(f"round {turn + 1}, {title(section)}: {row['name']} {describe(row)}")
    document["complete"] = True
    report.write_json(out, document)


def stock_of(name: str, configurations: dict[str, Configuration]) -> str | None:
    """The name of the configuration with which one is compared, if it is among them."""
    stock = configurations[name].stock
    return next((other for other, made in configurations.items() if made == stock), None)


def one_run(model: Model, configuration: Configuration, settings: Settings, seconds: float) -> dict:
    """What one process found: a verdict, and numbers if it is "ok"."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "log").touch()
        told = (model, configuration, settings, folder)
        process = forked.server(PRELOADED).Process(target=in_process, args=told)
        process.start()
        with forked.all_end([process]):
            process.join(seconds)
            status = process.exitcode
        if status is None:
            return {"verdict": "failed", "reason": f"did not end within {seconds:g} s"}
        found = Path(folder, "found.json")
        if found.exists():
            return json.loads(found.read_text())
        said = Path(folder, "log").read_text(errors="replace").strip().splitlines()
        return {
            "verdict": "failed",
            "reason": f"exit status {status}: {(said or ['no output'])[-1][:300]}",
        }


def in_process(model: Model, configuration: Configuration, settings: Settings, folder: str) -> None:
    """In a process of its own: this one does not import TRL."""
    forked.detach(f"{folder}/log")
    os.chdir(folder)
    from benchmarks.models.step_process import attempt

    found = attempt(model, configuration, settings)
    Path("found.json").write_text(json.dumps(found))


def judge(section: dict) -> None:
    """Times of all rounds together, and how far losses and gradient norms are from the stock trainer's."""
    good = {row["name"]: [each for each in row["runs"] if each["verdict"] == "ok"] for row in section["rows"]}
    for row in section["rows"]:
        runs = good[row["name"]]
        bad = [each for each in row["runs"] if each["verdict"] != "ok"]
        row["verdict"] = bad[0]["verdict"] if bad else "ok" if runs else None
        row["reason"] = bad[0].get("reason") if bad else None
        if not runs:
            continue
        row["ms"] = statistics.median(each["ms"] for each in runs)
        row["peak_bytes"] = max((each["peak_bytes"] for each in runs if each["peak_bytes"]), default=None)
        if not good.get(row["stock"]):
            continue
        stock = good[row["stock"]][0]
        row["loss_difference"] = furthest(stock["losses"], runs[0]["losses"])
        row["grad_norm_difference"] = furthest(stock["grad_norms"], runs[0]["grad_norms"])
        near = row["loss_difference"] <= LOSS_LIMIT and row["grad_norm_difference"] <= GRADIENT_LIMIT
        if row["verdict"] == "ok" and not (near and min(stock["grad_norms"]) > 0):
            row["verdict"] = "wrong"


def title(section: dict) -> str:
    kind = "with" if section["checkpointing"] else "without"
    return f"{section['model']}, {section['sequences']} x {section['tokens']:,}, {kind} checkpointing"


def describe(row: dict) -> str:
    if row["verdict"] in ("ok", "wrong"):
        memory = report.text(report.gib(row["peak_bytes"]), ", {:.1f} GiB") or ""
        apart = ""
        if "loss_difference" in row:
            apart = (
                f", loss {row['loss_difference']:.0e} and norms {row['grad_norm_difference']:.0e} from stock"
            )
        plan = row["runs"][-1].get("activations")
        kept = f"; {plan}" if plan else ""
        return f"{row['verdict']}: {row['runs'][-1]['ms']:.1f} ms{memory}{apart}{kept}"
    return f"{row['verdict']} {row['reason'] or ''}".strip()


def table(section: dict, form: str = "simple") -> str:
    body = []
    for row in section["rows"]:
        if "ms" not in row:
            body.append([row["name"], row.get("verdict") or "not run", "", "", ""])
            continue
        times = [each["ms"] for each in row["runs"] if each["verdict"] == "ok"]
        spread = f"{row['ms']:.1f}" + (f" ({min(times):.1f} to {max(times):.1f})" if len(times) > 1 else "")
        apart = [report.text(row.get(f"{name}_difference"), "{:.0e}") for name in ("loss", "grad_norm")]
        memory = report.text(report.gib(row["peak_bytes"]), "{:.1f}")
        body.append([row["name"], spread if row["verdict"] == "ok" else row["verdict"], memory, *apart])
    headers = ["configuration", "ms a step", "GiB", "loss differs by", "gradient norm by"]
    return f"{title(section)}\n{tabulate(body, headers, tablefmt=form, disable_numparse=True)}"


def for_page(document: dict, source: str) -> str:
    """The tables of a run, and how it was measured, in Markdown."""
    tables = "\n\n".join(
        f"{title(section)}{budget_note(section)}:\n\n{table(section, 'github').partition(chr(10))[2]}"
        for section in document["sections"]
    )
    return f"{tables}\n\n{measured_how(document)}\n\n{source}"


def budget_note(section: dict) -> str:
    """The end of the title of a table of `fit_activations`, which another table may have without it."""
    runs = [run for row in section["rows"] for run in row.get("runs", ())]
    return ", activations within a budget" if any(run.get("activations") for run in runs) else ""


def measured_how(document: dict) -> str:
    rounds = document["rounds"]
    median = "" if rounds == 1 else f", the median of {rounds} processes (the least to the most)"
    return (
        f"One {document['device']}, {document['date'][:10]}, random weights in bf16, fused AdamW, SDPA: "
        f"mean of {document['settings']['timed']} whole steps without synchronization in between, each "
        f"configuration in its own process{median}. Differences are relative, the largest of the logged "
        "steps."
    )


def is_ours(name: str) -> bool:
    """Whether the configuration of this name uses logitless."""
    return "logitless" in name or name == "both flags"


def failed(document: dict) -> list[str]:
    """Configurations of ours that are wrong or broke down, and stock ones, without which nothing shows."""
    return [
        f"{title(section)}: {row['name']}: {row['verdict']} {row.get('reason') or ''}".strip()
        for section in document["sections"]
        for row in section["rows"]
        if row.get("verdict") in ("wrong", "failed") and (row["name"] == row["stock"] or is_ours(row["name"]))
    ]
