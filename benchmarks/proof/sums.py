"""A tiny model that has learned sums, `12+34=46`: a task with a verifier that a CPU learns in seconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.proof.shadow import World

PAD, EOS = 0, 1
WORDS = {"<pad>": PAD, "<eos>": EOS} | {letter: i for i, letter in enumerate("0123456789+=", 2)}
LARGEST = 40
TOKENS = 4  # of an answer: at most two digits, and the end


# Symmetric: x+y is held out where y+x is.
_DRAWN = torch.rand(LARGEST, LARGEST, generator=torch.Generator().manual_seed(0)).triu()
_IS_HELD_OUT = _DRAWN + _DRAWN.triu(1).t() < 0.2
TRAINED: list[list[int]] = (~_IS_HELD_OUT).nonzero().tolist()
HELD_OUT: list[list[int]] = _IS_HELD_OUT.nonzero().tolist()


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def trained(steps: int, seed: int = 0, device: str = "cpu") -> nn.Module:
    """A model after this many steps on random sums, none of them held out."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=EOS,
        )
    )
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        pairs = [TRAINED[i] for i in torch.randint(len(TRAINED), (64,), generator=generator)]
        rows = [[*(WORDS[letter] for letter in f"{x}+{y}={x + y}"), EOS] for x, y in pairs]
        width = max(map(len, rows))
        ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=device)
        labels = ids.masked_fill(ids == PAD, -100)
        model(input_ids=ids, attention_mask=(ids != PAD).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def reward(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """1 for the right sum. A wrong one gets up to 0.5 for being near, so that few groups are all equal."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = prompt.rstrip("=").split("+")
        answer = completion.replace("<eos>", "").replace("<pad>", "")
        off = abs(int(left) + int(right) - int(answer)) if answer.isdecimal() else 1000
        found.append(1.0 if off == 0 else 0.5 / off)
    return found


def is_right(prompts: list[str], completions: list[str], **kwargs) -> list[float]:
    """1 for the right sum, and 0 for any other."""
    return [float(each == 1) for each in reward(prompts, completions)]


def questions(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [TRAINED[i] for i in torch.randint(len(TRAINED), (count,), generator=generator)]


def texts(pairs: list[list[int]]) -> tuple[list[str], list[str], list[str]]:
    """Prompts, right answers, and answers that are too large by 1 to 8."""
    off = torch.randint(1, 9, (len(pairs),), generator=torch.Generator().manual_seed(6)).tolist()
    wrong = [f"{x + y + more}" for (x, y), more in zip(pairs, off, strict=True)]
    return [f"{x}+{y}=" for x, y in pairs], [f"{x + y}" for x, y in pairs], wrong


def world(folder: Path, *, steps: int, examples: int = 256, batch: int = 16, device: str = "cpu") -> World:
    """The world of a model after `steps` steps, saved in the folder."""
    trained(steps, device=device).save_pretrained(folder)
    words = tokenizer()
    words.save_pretrained(folder)
    data = texts(questions(examples, 5))
    return World(f"sums, {steps} steps", folder, words, *data, reward, TOKENS, batch)
