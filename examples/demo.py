"""Trains one small language model four times on Python's own source code, and shows what the full logits
cost.

    full logits      transformers' Trainer: the model builds logits for every token, then their loss
    stock TRL        trl.SFTTrainer
    logitless        our SFTTrainer with use_chunked_loss=True
    + fused layers   the same with use_fused_layers=True

Same text, same first weights, same batches, each run in a process of its own; then the loss of text that
none has seen. Prints a table, saves a picture, and fails unless the curves agree, the loss fell, the memory
fell and the chunked engine is what ran. Needs no network; two minutes on two cores:

    python examples/demo.py            # or: make demo
    python examples/demo.py --help
"""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from demo_report import (
    BOTH,
    FULL,
    MIB,
    OURS,
    RUNS,
    STOCK,
    WARM_UP,
    Result,
    failures,
    picture,
    table,
)
from demo_text import make_rows
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

CHILD_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc keeps freed blocks for later unless told to hand large ones back; RSS would then show the past
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_TRIM_THRESHOLD_": str(MIB),
    # OpenMP's threads spin while they wait, and on a machine with other work they starve each other: 13.6 s a
    # step, not 2.7
    "OMP_WAIT_POLICY": "PASSIVE",
}


# Rows of text, the last ones, on which nothing is trained.
HELD_OUT = 4


@dataclass
class Setup:
    """One experiment. The three runs differ in nothing but the loss."""

    device: str
    steps: int
    vocab: int
    rows: int
    row_tokens: int  # predictions a row; a row has one token more
    hidden: int
    layers: int
    corpus_chars: int
    tolerance: float  # largest difference between the curves
    learning_rate: float
    seed: int = 0

    @property
    def logits_bytes(self) -> int:
        """One copy of a step's logits, in the dtype of the computation."""
        return self.rows * self.row_tokens * self.vocab * (4 if self.device == "cpu" else 2)

    @property
    def logits_budget(self) -> int:
        return self.logits_bytes // 16

    @property
    def title(self) -> str:
        if self.device == "cpu":
            where = f"CPU ({platform.machine()}), threads {torch.get_num_threads()}"
        else:
            where = torch.cuda.get_device_name()
        return (
            f"{where}: {self.rows * self.row_tokens:,} tokens a step, vocabulary {self.vocab:,}. "
            f"One copy of the logits is {self.logits_bytes / MIB:,.0f} MiB, the logits budget "
            f"{self.logits_budget / MIB:,.0f} MiB"
        )


def default_setup(device: str) -> Setup:
    if device == "cpu":
        return Setup(
            device, 6, 32_000, 4, 512, 128, 2, corpus_chars=4 * MIB, tolerance=1e-3, learning_rate=1e-2
        )
    # 8 GiB for the model and its optimizer, then 3 for the full logits of each row and their copies
    gibibytes = torch.cuda.get_device_properties(0).total_memory / (1024 * MIB)
    rows = max(1, min(16, int(gibibytes - 8) // 3))
    # A logit of 8 in bf16 is rounded to 3e-2, by every run in its own way
    return Setup(
        device, 60, 128_256, rows, 1024, 1024, 6, corpus_chars=16 * MIB, tolerance=3e-2, learning_rate=3e-4
    )


# --- one run, in its own process
# ------------------------------------------------------------------------------------------


class MemoryWatch:
    """Peak memory of a step above what was held before it: the allocator's own count on a GPU, else the
    process's RSS."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.before = self.peak = 0
        if not self.cuda:
            self.process = psutil.Process()
            threading.Thread(target=self.sample, daemon=True).start()

    def sample(self) -> None:
        while True:
            self.peak = max(self.peak, self.process.memory_info().rss)
            time.sleep(0.002)

    def start(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.before = self.peak = self.process.memory_info().rss

    def stop(self) -> int:
        if self.cuda:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated()
        return self.peak - self.before


def build_trainer(name: str, setup: Setup, folder: Path) -> Any:
    import transformers
    from datasets import Dataset

    transformers.set_seed(setup.seed)
    config = transformers.LlamaConfig(
        vocab_size=setup.vocab,
        hidden_size=setup.hidden,
        intermediate_size=3 * setup.hidden,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.hidden // 64,
        num_key_value_heads=setup.hidden // 64,
        max_position_embeddings=setup.row_tokens + 1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config)
    rows = torch.load(folder / "rows.pt")[:-HELD_OUT].tolist()
    settings = {
        "output_dir": str(folder / "checkpoints"),
        "max_steps": setup.steps,
        "per_device_train_batch_size": setup.rows,
        "train_sampling_strategy": "sequential",
        "learning_rate": setup.learning_rate,
        "warmup_steps": 2,
        "seed": setup.seed,
        "use_cpu": setup.device == "cpu",
        "bf16": setup.device != "cpu",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    given = {"model": model, "train_dataset": Dataset.from_dict({"input_ids": rows, "labels": rows})}
    if name == FULL:
        return transformers.Trainer(args=transformers.TrainingArguments(**settings), **given)

    import trl

    from logitless.trl_integration import SFTConfig, SFTTrainer

    given["processing_class"] = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>", eos_token="<eos>"
    )
    settings |= {"gradient_checkpointing": False, "max_length": None}
    if name == STOCK:
        return trl.SFTTrainer(args=trl.SFTConfig(**settings), **given)
    settings |= {"use_chunked_loss": True, "logits_budget": setup.logits_budget}
    settings |= {"use_fused_layers": name == BOTH}
    return SFTTrainer(args=SFTConfig(**settings), **given)


def held_out_loss(model: Any, rows: torch.Tensor) -> float:
    """Of text that no run has seen, by the model's own loss, one row at a time."""
    device, losses = next(model.parameters()).device, []
    model.eval()
    with torch.no_grad():
        for row in rows.to(device)[:, None]:
            losses.append(model(input_ids=row, labels=row).loss.item())
    model.train()
    return sum(losses) / len(losses)


def run_one(name: str, folder: Path) -> None:
    """Trains, says `step N` after each step for the progress bar, and leaves a `Result` in the folder."""
    from transformers import PrinterCallback, TrainerCallback

    setup = Setup(**json.loads((folder / "setup.json").read_text()))
    trainer = build_trainer(name, setup, folder)
    watch, result = MemoryWatch(setup.device), Result()

    class Meter(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            watch.start()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            result.step_bytes.append(watch.stop())
            result.step_seconds.append(time.perf_counter() - self.began)
            print(f"step {state.global_step}", flush=True)

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Meter())
    held_out = torch.load(folder / "rows.pt")[-HELD_OUT:]
    result.held_out = [held_out_loss(trainer.model, held_out)]
    trainer.train()
    result.held_out.append(held_out_loss(trainer.model, held_out))
    if name == STOCK:
        from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE as rows
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as columns

        result.note = f"stock TRL: chunks of up to {rows:,} tokens x {columns:,} columns of the head"
        if setup.rows * setup.row_tokens <= rows and setup.vocab <= columns:
            result.note += "; this small batch is one chunk"
        result.note += ", without Triton kernels on a CPU" if setup.device == "cpu" else ""
    result.losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if plan := getattr(trainer, "last_plan", None):
        result.strategy, result.chunks, result.plan = plan.strategy, plan.chunks, plan.describe()
    if layers := getattr(trainer, "fused_layers", None):
        result.fused = str(layers.reports["model"])
    (folder / f"{name}.json").write_text(json.dumps(asdict(result)))


# --- the comparison
# -------------------------------------------------------------------------------------------------------


def run_all(setup: Setup, folder: Path, console: Console) -> dict[str, Result]:
    (folder / "setup.json").write_text(json.dumps(asdict(setup)))
    environment = CHILD_ENVIRONMENT | os.environ
    environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in RUNS:
            task = progress.add_task(name, total=setup.steps)
            command = [sys.executable, __file__, "--output", str(folder), "--run", name]
            with open(folder / f"{name}.log", "w+") as log:
                pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
                with subprocess.Popen(command, env=environment, **pipes) as process:
                    for line in process.stdout:
                        if line.startswith("step "):
                            progress.update(task, completed=int(line.split()[1]))
                if process.returncode:
                    log.seek(0)
                    console.print(log.read()[-4000:], markup=False, highlight=False)
                    raise SystemExit(f"The run '{name}' failed; its output is above and in {log.name}.")
    return {name: Result(**json.loads((folder / f"{name}.json").read_text())) for name in RUNS}


def main(
    steps: Annotated[
        int, typer.Option(help="Optimizer steps of each run; by default 6 on a CPU, 60 on a GPU.")
    ] = 0,
    vocab: Annotated[int, typer.Option(help="Vocabulary; by default 32,000 on a CPU, 128,256 on a GPU.")] = 0,
    rows: Annotated[
        int, typer.Option(help="Sequences a step; by default 4 of 512 tokens, or up to 16 of 1,024.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = "",
    output: Annotated[Path, typer.Option(help="Where the picture and the logs go.")] = Path("demo_output"),
    run: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Train a small language model with the full logits, with stock TRL and with logitless, and compare."""
    if run:
        return run_one(run, output)
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    setup = default_setup(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    setup.steps, setup.vocab, setup.rows = steps or setup.steps, vocab or setup.vocab, rows or setup.rows
    if setup.steps <= WARM_UP:
        raise typer.BadParameter(
            f"steps: expected more than the {WARM_UP} of the warm-up, got {setup.steps}; leave it out."
        )
    with console.status("training a tokenizer on Python's standard library"):
        tokens = make_rows(
            setup.steps * setup.rows + HELD_OUT,
            setup.row_tokens + 1,
            setup.vocab,
            setup.corpus_chars,
            output / "tokenizer.json",
        )
        torch.save(tokens, output / "rows.pt")

    results = run_all(setup, output, console)
    console.print(table(results, setup.device))
    console.print(results[STOCK].note, highlight=False)
    console.print(f"logitless: {results[OURS].plan}", highlight=False)
    if setup.device == "cpu":
        console.print("The budget is small, to show the memory. Small chunks take longer than large ones.")
    picture(results, setup.title, output / "demo.png")
    console.print(f"the picture: {output / 'demo.png'}", highlight=False)
    if missing := failures(results, setup.tolerance):
        raise SystemExit("The demo failed.\n" + "\n".join(missing))


if __name__ == "__main__":
    typer.run(main)
