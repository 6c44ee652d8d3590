"""Prompts and completions of held-out text, for trainers of TRL on a model that was trained on such text."""

from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerFast

from benchmarks.proof.curves import Trainer
from benchmarks.proof.shadow import World
from benchmarks.proof.sources import TOKENIZER

# Tokens of a prompt, of its completion, and of a sampled completion
PROMPT, COMPLETION, SAMPLED = 48, 80, 32
BATCH = 8


def world(folder: Path, model: nn.Module, trainer: Trainer, data: Path) -> World:
    """Prompts with their continuation, and with that of another document as the wrong one.

    GRPO's reward is the mean length of a completion's words: a model of this size has learned no task, and
    few groups of completions have equal rewards.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data / TOKENIZER), pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = trainer.held_out[:, : PROMPT + COMPLETION].tolist()
    right = [tokenizer.decode(row[PROMPT:]) for row in rows]
    half = len(rows) // 2
    return World(
        f"Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M after its run",
        folder,
        tokenizer,
        [tokenizer.decode(row[:PROMPT]) for row in rows],
        right,
        right[half:] + right[:half],
        word_length,
        SAMPLED,
        BATCH,
    )


def word_length(completions: list[str], **kwargs) -> list[float]:
    words = [completion.split() for completion in completions]
    return [sum(map(len, each)) / max(len(each), 1) for each in words]
