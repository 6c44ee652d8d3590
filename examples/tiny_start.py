"""What the TRL examples share: their options, a tiny model and data made on the spot, so that each runs
offline, and a closing line."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from datasets import Dataset, load_dataset
from demo_text import END, PAD, source_files, train_tokenizer

VOCAB, CORPUS_CHARS = 1000, 2**20

Model = Annotated[str, typer.Option(help="Name or path of a model. Default: a tiny one, built on the spot.")]
Data = Annotated[
    str, typer.Option("--dataset", help="Name or path of a dataset. Default: Python's own source code.")
]
Steps = Annotated[int, typer.Option(help="Optimizer steps.")]
Batch = Annotated[int, typer.Option(help="Examples a step on each device.")]
Output = Annotated[str, typer.Option(help="Folder for the trained model. Default: it is not kept.")]
Chunked = Annotated[
    bool,
    typer.Option(
        "--use-chunked-loss/--no-use-chunked-loss", help="The flag; without it TRL's own loss runs."
    ),
]


@contextlib.contextmanager
def workspace(output: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(output or folder)


def settings(folder: Path, steps: int, batch_size: int) -> dict[str, Any]:
    """What a config needs on any machine, at any size."""
    gpu = torch.cuda.is_available()
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "bf16": gpu,
        "use_cpu": not gpu,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def tiny_model(folder: Path, hidden: int = 64) -> str:
    """A small Llama and a tokenizer of source code, on disk, where trainers find them again. Made before the
    config: that joins a launcher's process group, in which transformers saves on the first rank alone."""
    path = folder / f"tiny-{hidden}"
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = train_tokenizer(list(source_files(CORPUS_CHARS)), VOCAB)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END
    ).save_pretrained(path)
    return str(path)


def data(name: str, columns: list[str]) -> Dataset:
    """The dataset of that name, or one of source code with these columns: the text of a snippet; or its first
    line as the prompt, the lines after it as chosen, and the same with upper and lower case swapped as
    rejected."""
    if name:
        return load_dataset(name, split="train")
    paragraphs = [part.strip("\n") for file in source_files(CORPUS_CHARS) for part in file.split("\n\n")]
    snippets = [part[:400].split("\n", 1) for part in paragraphs if part.count("\n") > 2 and len(part) > 80][
        :512
    ]
    rows = {
        "text": ["\n".join(snippet) for snippet in snippets],
        "prompt": [first[:80] for first, _ in snippets],
        "chosen": [rest for _, rest in snippets],
        "rejected": [rest.swapcase() for _, rest in snippets],
    }
    return Dataset.from_dict({column: rows[column] for column in columns})


def report(trainer: Any, output: str, metric: str = "loss") -> None:
    """How a metric went, from the first to the last quarter of the run, and how the loss was computed
    last."""
    if output:
        trainer.save_model()
    values = [log[metric] for log in trainer.state.log_history if metric in log]
    some = -(-len(values) // 4)
    plan = getattr(trainer, "last_plan", None)
    how = plan.describe() if plan else "TRL's own loss"
    print(f"{metric} {sum(values[:some]) / some:.4f} -> {sum(values[-some:]) / some:.4f}; {how}")
