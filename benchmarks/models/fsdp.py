"""TRL's SFT and DPO with FSDP2 on several GPUs: stock, with both flags, with Liger's layers.

A run is one trainer in one configuration: a process for each rank, all forked from one that has imported TRL.
The model is Llama-3.1-8B's architecture with random weights, the same in all; trainers, sharding and mixed
precision (weights and AdamW in fp32, products in bf16) are TRL's and accelerate's. A run that fails or hangs
is a result, and the others go on.

With bf16, accelerate has FSDP2 return what a model computes in bf16, and TRL's DPO sums log-probabilities of
tokens in that dtype: a sum near -18,000 is a multiple of 128. Where it is near the middle of two, the last
digit of one log-probability moves the step's loss by several. So DPO is judged by its median step, SFT by its
worst.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.harness import forked, report
from benchmarks.harness.measure import GRADIENT_LIMIT, LOSS_LIMIT
from benchmarks.models.steps import CONFIGURATIONS as EVERY
from benchmarks.models.steps import (
    LLAMA,
    MODELS,
    SMALL,
    Configuration,
    Limits,
    Model,
    Settings,
    is_ours,
    missing,
)
from benchmarks.models.trainers import furthest

# Liger's layers last: where time runs out, the others have been compared.
CONFIGURATIONS = {name: EVERY[name] for name in ("stock", "logitless loss + layers", "Liger's layers")}
# What a rank has of a step; DPO's sequences are the two of each pair.
FULL = {"SFT": MODELS["Llama-3.1-8B"], "DPO": Model("LlamaConfig", LLAMA, 4, 2048)}
QUICK = {"SFT": Model("LlamaConfig", SMALL, 2, 32), "DPO": Model("LlamaConfig", SMALL, 4, 16)}
PRELOADED = ["benchmarks.models.fsdp_process"]


@dataclass(frozen=True)
class Job:
    """What each rank of a run is told."""

    trainer: str  # "SFT" or "DPO"
    model: Model
    configuration: Configuration
    settings: Settings  # `logged` are the warm-up steps
    ranks: int
    seconds: float  # that the run may take


def with_layers(models: dict[str, Model], layers: int) -> dict[str, Model]:
    """Models of that many layers; 0: as they are."""
    if not layers:
        return models
    return {
        name: replace(model, sizes=model.sizes | {"num_hidden_layers": layers})
        for name, model in models.items()
    }


def run(
    document: dict,
    models: dict[str, Model],  # by trainer
    configurations: dict[str, Configuration],
    settings: Settings,
    *,
    ranks: int,
    limits: Limits,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Fills `document`, a section for each trainer, and writes it after every run. Starts none that might not
    end in time: one may take as long as the longest before it."""
    start = time.perf_counter()
    absent = missing(configurations, say)
    sections = [
        {
            "trainer": trainer,
            "layers": model.sizes["num_hidden_layers"],
            "sequences": model.sequences,
            "tokens": model.tokens,
            "rows": [],
        }
        for trainer, model in models.items()
    ]
    sizes = next(iter(models.values())).sizes
    document |= {"ranks": ranks, "model": sizes, "settings": asdict(settings), "absent": absent}
    document |= {"sections": sections, "complete": False}
    from logitless.trl_integration.versions import require_supported

    require_supported()
    prepare()
    say("TRL is imported")
    longest = 0.0
    for section, (trainer, model) in zip(sections, models.items()):
        for name in (name for name in configurations if name not in absent):
            left = 60 * limits.minutes - (time.perf_counter() - start)
            if left < max(longest, 1):
                say(f"stopped: another run might not end within {limits.minutes:g} minutes")
                report.write_json(out, document)
                return
            seconds, began = min(limits.seconds, left), time.perf_counter()
            found = one_run(Job(trainer, model, configurations[name], settings, ranks, seconds))
            row = {"name": name} | found | {"seconds": time.perf_counter() - began}
            longest = max(longest, row["seconds"])
            section["rows"].append(row)
            judge(section, ranks)
            report.write_json(out, document)
            say(f"{trainer}, {name}: {describe(row)}")
    document["complete"] = True
    report.write_json(out, document)


def prepare() -> None:
    """Starts the process that the ranks are forked from, and waits until it has imported everything."""
    # TRL gathers DPO's reference whole, which needs large blocks of what is free.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    first = forked.server(PRELOADED).Process(target=import_all)
    first.start()
    first.join()
    if first.exitcode:
        raise ImportError("benchmarks.models.fsdp_process: expected to be imported, got the error above.")


def import_all() -> None:
    import benchmarks.models.fsdp_process  # noqa: F401


def in_rank(job: Job, rank: int, folder: str) -> None:
    """In a process of its own: this one does not import TRL."""
    from benchmarks.models.fsdp_process import main

    main(job, rank, folder)


def one_run(job: Job) -> dict:
    """A verdict, and what the ranks measured together if it is "ok"."""
    with tempfile.TemporaryDirectory() as place, processes(job, place) as started:
        until, folder = time.perf_counter() + job.seconds, Path(place)
        while running := [process.sentinel for process in started if process.exitcode is None]:
            # A rank that failed leaves the others waiting for it.
            if any(process.exitcode for process in started) or time.perf_counter() >= until:
                break
            wait(running, timeout=max(0.0, until - time.perf_counter()))
        codes = [process.exitcode for process in started]
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        found = {int(file.stem): json.loads(file.read_text()) for file in files}
        if len(found) == job.ranks and all(each["verdict"] == "ok" for each in found.values()):
            return together([found[rank] for rank in range(job.ranks)])
        rank = culprit(found, codes)
        said = log_of(folder, rank)
        print(said[-4000:], file=sys.stderr, flush=True)
        if rank in found:
            return found[rank]
        if not any(codes):
            return {"verdict": "failed", "reason": f"did not end within {job.seconds:.0f} s"}
        last = (said.splitlines() or ["no output"])[-1][:300]
        return {"verdict": "failed", "reason": f"rank {rank}, exit status {codes[rank]}: {last}"}


def culprit(found: dict[int, dict], codes: list[int | None]) -> int:
    """The first rank that says it failed, else one that died, else one that hangs."""
    failed = [rank for rank, each in found.items() if each["verdict"] != "ok"]
    died = [rank for rank, code in enumerate(codes) if code]
    return [*failed, *died, *(rank for rank in range(len(codes)) if rank not in found)][0]


def log_of(folder: Path, rank: int) -> str:
    log = folder / f"{rank}.log"
    return log.read_text(errors="replace").strip() if log.exists() else ""


@contextmanager
def processes(job: Job, folder: str) -> Iterator[list[BaseProcess]]:
    """A process for each rank, that all end with the block, with whatever they started themselves."""
    context, started = forked.server(PRELOADED), []
    with forked.all_end(started):
        for rank in range(job.ranks):
            process = context.Process(target=in_rank, args=(job, rank, folder), daemon=True)
            process.start()
            started.append(process)
        yield started


def together(ranks: list[dict]) -> dict:
    """A step takes as long as its slowest rank; losses and norms are all ranks' already."""
    times = [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
    peaks = [rank["peak_bytes"] for rank in ranks]
    return ranks[0] | {
        "times": times,
        "ms": statistics.median(times),
        "peak_bytes": None if None in peaks else max(peaks),
        "peak_bytes_of_ranks": peaks,
    }


def judge(section: dict, ranks: int) -> None:
    """The newest row's tokens per second, how far it learned from stock, and whether that is too far."""
    stock, row = section["rows"][0], section["rows"][-1]
    if row["verdict"] != "ok":
        return
    row["tokens_per_second"] = 1e3 * ranks * section["sequences"] * section["tokens"] / row["ms"]
    if stock["name"] != "stock" or "losses" not in stock:
        return
    for each, name in (("loss_difference", "losses"), ("grad_norm_difference", "grad_norms")):
        steps = [furthest([x], [y]) for x, y in zip(stock[name], row[name], strict=True)]
        # Of either, NaN if any step is; and NaN is in no limit.
        of_steps = torch.median if section["trainer"] == "DPO" else torch.max
        row[each] = of_steps(torch.tensor(steps, dtype=torch.float64)).item()
    near = row["loss_difference"] <= LOSS_LIMIT and row["grad_norm_difference"] <= GRADIENT_LIMIT
    if not (near and min(stock["grad_norms"]) > 0):
        row["verdict"] = "wrong"


def failed(document: dict) -> list[str]:
    """Runs of ours that failed or learned something else, and of stock, without which nothing shows."""
    return [
        f"{section['trainer']}, {row['name']}: {row['verdict']} {row.get('reason') or ''}".strip()
        for section in document["sections"]
        for row in section["rows"]
        if row["verdict"] in ("wrong", "failed") and (row["name"] == "stock" or is_ours(row["name"]))
    ]


def describe(row: dict) -> str:
    """A run in one line."""
    if "ms" not in row:
        return f"{row['verdict']} {row.get('reason') or ''}".strip() + f" after {row['seconds']:.0f} s"
    parts = [f"{row['verdict']}: {row['ms']:.0f} ms", f"{row['tokens_per_second']:,.0f} tokens/s"]
    if row["peak_bytes"]:
        parts.append(f"{report.gib(row['peak_bytes']):.1f} GiB")
    if "loss_difference" in row:
        parts.append(
            f"loss {row['loss_difference']:.0e} and norms {row['grad_norm_difference']:.0e} from stock"
        )
    return ", ".join([*parts, f"{row['seconds']:.0f} s in all"])


def table(document: dict, form: str = "simple") -> str:
    body = []
    for section in document["sections"]:
        title = "{trainer}, {layers} layers, {sequences} x {tokens:,}".format(**section)
        for row in section["rows"]:
            right, known = row["verdict"] == "ok", "ms" in row
            body.append(
                [
                    title,
                    row["name"],
                    f"{row['ms']:.0f}" if right else row["verdict"],
                    f"{row['tokens_per_second']:,.0f}" if right else None,
                    report.text(report.gib(row["peak_bytes"]), "{:.1f}") if known else None,
                    *(report.text(row.get(f"{x}_difference"), "{:.0e}") for x in ("loss", "grad_norm")),
                ]
            )
            title = ""
    headers = ["a rank's step", "", "ms", "tokens/s", "GiB a rank", "loss differs by", "gradient norm by"]
    align = ("left", "left", *["right"] * 5)
    return tabulate(body, headers, tablefmt=form, colalign=align, disable_numparse=True)


def by_trainer(document: dict, source: str) -> str:
    """The table in Markdown, and what it was measured with."""
    sizes, settings = document["model"], document["settings"]
    shape = report.sizes({"H": sizes["hidden_size"], "V": sizes["vocab_size"]})
    return (
        f"{table(document, 'github')}\n\n{document['ranks']} x {document['device']}, "
        f"{document['date'][:10]}, Llama-3.1-8B's architecture ({shape}, random weights) with FSDP2: weights "
        "and AdamW in fp32, products in bf16, gradient checkpointing; DPO with a reference in shards. A "
        f"whole training step, optimizer included, the median of {settings['timed']} behind "
        f"{settings['logged']}; tokens of all ranks together; the most memory allocated on any rank during "
        "those steps; differences from stock are relative, SFT's the largest of all steps, DPO's the median "
        f"(TRL sums log-probabilities in bf16 there).\n\n{source}"
    )


def enough_gpus(device: torch.device, ranks: int) -> bool:
    return device.type != "cuda" or torch.cuda.device_count() >= ranks
