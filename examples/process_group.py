"""What the examples of several processes share: devices and a process group, a tiny model, and text."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

# Bytes are the tokens of the tiny model.
VOCAB, PAD = 258, 257


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the processes that torchrun started: NCCL with a GPU each, else gloo on the CPU.

    A process that raises writes its cause and ends at once; leaving the group in order would wait for the
    others. torchrun then ends those.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        on_gpu = device.type == "cuda"
        options = {"device_id": device} if on_gpu else {}
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10), **options)
    try:
        yield device
    except BaseException:
        if not ours:
            raise
        print(f"rank {dist.get_rank()}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    if ours:
        dist.destroy_process_group()


def tiny_model() -> transformers.LlamaForCausalLM:
    """The same weights in every process."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=256,
        eos_token_id=256,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def model_of(name: str) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(name) if name else tiny_model()


def batch(step: int, size: int, length: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch number `step` of this file's source code: ids and labels (size, length), of uneven lengths."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (size,), generator=generator)
    lengths = torch.randint(length // 3, length + 1, (size, 1), generator=generator)
    ids = torch.stack([text[start : start + length] for start in starts])
    filled = torch.arange(length) < lengths
    return torch.where(filled, ids, PAD), torch.where(filled, ids, -100)
