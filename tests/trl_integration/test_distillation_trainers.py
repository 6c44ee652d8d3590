"""Our GKD and Distillation pairs beside TRL's: the same losses, gradient norms and metrics over several
optimizer steps."""

import pytest
import torch
import transformers
from datasets import Dataset

import logitless.trl_integration as ours

from .test_log_prob_trainers import assert_same, prompt_dataset, side_by_side, stock, words
from .test_sft import options
from .tiny import tiny_dataset, tiny_model, train

FUSED = frozenset({"fused", "loss_only"})


def teacher(tmp_path, **options) -> transformers.PreTrainedModel:
    path = tmp_path / "teacher"
    if not path.exists():
        tiny_model(hidden_size=48, **options).save_pretrained(path)
        words().save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Pads the rows; the first third of each is the prompt."""
    width = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": [], "attention_mask": [], "labels": [], "prompts": []}
    for row in rows:
        ids, gap = row["input_ids"], width - len(row["input_ids"])
        start = len(ids) // 3
        batch["input_ids"].append(ids + [0] * gap)
        batch["attention_mask"].append([1] * len(ids) + [0] * gap)
        batch["labels"].append([-100] * start + ids[start:] + [-100] * gap)
        batch["prompts"].append(ids[:2])
    return {name: torch.tensor(rows) for name, rows in batch.items()}


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize(
    "changes",
    [{"beta": 0.5}, {"beta": 0.0, "gradient_accumulation_steps": 2}, {"beta": 1.0}],
    ids=["jsd", "forward", "reverse"],
)
def test_gkd(tmp_path, family, changes):
    dataset: Dataset = tiny_dataset()
    trainer = {"teacher_model": teacher(tmp_path), "data_collator": collate}
    runs = side_by_side(
        tmp_path, "GKD", dataset, family=family, trainer=trainer, lmbda=0.0, max_length=None, **changes
    )
    assert_same(*runs, strategies=FUSED)


@pytest.mark.parametrize(
    "changes",
    [{"beta": 0.5}, {"beta": 0.0, "gradient_accumulation_steps": 2, "temperature": 1.5}],
    ids=["jsd", "forward"],
)
def test_distillation(tmp_path, changes):
    trainer = {"teacher_model": teacher(tmp_path)}
    runs = side_by_side(
        tmp_path, "Distillation", prompt_dataset(), trainer=trainer, max_completion_length=6, **changes
    )
    assert_same(*runs, strategies=FUSED, rtol=1e-3)


def test_gkd_teacher_under_autocast(tmp_path):
    """bf16=True leaves its weights in fp32, and its layers run in bf16, as the stock trainer's do."""
    dtypes = []
    for changes in ({}, {"use_chunked_loss": True}):
        taught = teacher(tmp_path)
        taught.base_model.layers[0].mlp.down_proj.register_forward_hook(
            lambda module, args, out: dtypes.append(out.dtype)
        )
        kind = (ours.GKDTrainer, ours.GKDConfig) if changes else (stock("GKDTrainer"), stock("GKDConfig"))
        settings = {"lmbda": 0.0, "max_length": None, "bf16": True, "max_steps": 1} | changes
        given = {"teacher_model": taught, "data_collator": collate, "tokenizer": words()}
        train(kind[0], kind[1](**options(tmp_path, **settings)), tiny_model(), tiny_dataset(), **given)
    assert dtypes == [torch.bfloat16] * 2
