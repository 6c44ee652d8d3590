"""A few training steps with one of TRL's trainers or of ours, timed from outside. Imports TRL: only
`trainers.run` imports this."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    TrainerCallback,
)

import logitless.trl_integration as our_trainers
from benchmarks.harness.measure import synchronize
from benchmarks.harness.registry import one_line
from benchmarks.harness.timing import release, spread
from benchmarks.models.trainers import TRAINERS, WARM, Case, Scale

# Completions of one prompt in GRPO, TRL's default.
GENERATIONS = 8
# The tokenizer's words; a whole vocabulary of them would only make the trainers slow to construct.
WORDS = 512
PAD, EOS = 0, 1


def save_model(sizes: dict, folder: Path, device: torch.device, seed: int) -> None:
    """A model with random weights, in bf16 on a GPU, and its tokenizer: every run loads it, and DPO's
    reference too."""
    quiet()
    config = Qwen3Config(**sizes, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype_on(device), attn_implementation="sdpa")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": PAD, "</s>": EOS} | {f"w{i}": i for i in range(2, WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def measure(
    case: Case, scale: Scale, size: int, folder: Path, device: torch.device, seed: int, *, ours: bool
) -> dict:
    """The verdict of one run, and its numbers if it is "ok"."""
    return attempt(partial(train, case, scale, size, folder, device, seed, ours=ours), device)


def attempt(run: Callable[[], dict], device: torch.device) -> dict:
    """What the run returns, or the verdict if it fails."""
    # Here, with its traceback gone, nothing holds the model of an earlier run that failed.
    release(device)
    try:
        return run()
    # A trainer may fail in any way at a size it was not made for; the others must still be measured.
    except Exception as error:
        # Triton and cuBLAS have their own errors for it.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return {"verdict": "out of memory"}
        return {"verdict": "failed", "reason": one_line(error)}


def train(
    case: Case, scale: Scale, size: int, folder: Path, device: torch.device, seed: int, *, ours: bool
) -> dict:
    """Trains from the saved weights on the same batches, whoever's trainer it is."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    trainer = construct(case, scale, size, folder, device, seed, ours=ours)
    watch = watched(trainer, Watch(device))
    trainer.train()
    return numbers(trainer, watch, before, ours=ours)


def watched(trainer: transformers.Trainer, watch: "Watch") -> "Watch":
    trainer.add_callback(watch)
    # Prints every log where there is no progress bar.
    trainer.remove_callback(PrinterCallback)
    return watch


def numbers(trainer: transformers.Trainer, watch: "Watch", before: int | None, *, ours: bool) -> dict:
    """A row; `before`: bytes that were allocated already, None: memory is not measured."""
    logs = [log for log in trainer.state.log_history if "loss" in log]
    measured = before is not None and watch.device.type == "cuda"
    row = {
        "verdict": "ok",
        **spread(watch.ms[WARM:]),
        "times": watch.ms[WARM:],
        "peak_bytes": torch.cuda.max_memory_allocated(watch.device) - before if measured else None,
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
    }
    plan = {"strategy": trainer.last_plan.strategy, "plan": trainer.last_plan.describe()} if ours else {}
    return row | plan


def train_in_turns(
    case: Case, scale: Scale, size: int, folder: Path, device: torch.device, seed: int
) -> dict[str, dict]:
    """Both trainers at once, step by step in turns (TRL, ours, ours, TRL): a row for each.

    What slows the machine down for longer than a step slows down both. Each trainer has a thread, and only
    the one whose turn it is runs, from the beginning of its step to that of its next.
    """
    turns, watches = Turns(), {}
    for name in TRAINERS:
        ours = name == "logitless"
        trainer = construct(case, scale, size, folder, device, seed, ours=ours)
        watches[name] = trainer, watched(trainer, Watch(device, turns=turns, number=len(watches)))

    def train_one(name: str) -> None:
        trainer, watch = watches[name]
        try:
            trainer.train()
        finally:
            turns.leave(watch.number)

    with ThreadPoolExecutor(len(watches)) as threads:
        list(threads.map(train_one, watches))
    return {
        name: numbers(trainer, watch, None, ours=name == "logitless")
        for name, (trainer, watch) in watches.items()
    }


class Turns:
    """Whose turn it is among two: 0, 1, 1, 0 and again."""

    def __init__(self) -> None:
        self._at, self._left, self._changed = 0, set(), threading.Condition()

    def _whose(self) -> int:
        return (0, 1, 1, 0)[self._at % 4]

    def take(self, number: int) -> None:
        """Waits for a turn of this one."""
        with self._changed:
            self._changed.wait_for(lambda: self._whose() == number or self._left)

    def give(self) -> None:
        """Ends a turn."""
        with self._changed:
            self._at += 1
            self._changed.notify_all()

    def leave(self, number: int) -> None:
        """From now on the other one waits for nobody."""
        with self._changed:
            self._left.add(number)
            self._changed.notify_all()


class Watch(TrainerCallback):
    """The milliseconds of every step, and the peak memory behind the first `warm` alone."""

    def __init__(
        self, device: torch.device, warm: int = WARM, turns: Turns | None = None, number: int = 0
    ) -> None:
        self.device, self.warm, self.ms, self.start = device, warm, [], 0.0
        self.turns, self.number = turns, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.turns is not None:
            if self.ms:
                self.turns.give()
            self.turns.take(self.number)
        synchronize(self.device)
        if self.device.type == "cuda" and state.global_step == self.warm:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self.ms.append(1e3 * (time.perf_counter() - self.start))


def construct(
    case: Case, scale: Scale, size: int, folder: Path, device: torch.device, seed: int, *, ours: bool
) -> transformers.Trainer:
    batch = scale.batch(case, size)
    on_gpu = device.type == "cuda"
    settings = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": batch,
        "max_steps": WARM + scale.timed,
        "logging_steps": 1,
        "seed": seed,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **case.options,
    }
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_on(device), attn_implementation="sdpa")
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer()}
    if case.lora:
        import peft

        given["peft_config"] = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    random = torch.Generator().manual_seed(seed)
    config, trainer = pair(case.kind, ours=ours)
    if ours:
        settings |= {"use_chunked_loss": True, "use_fused_layers": scale.fused_layers}
    if case.kind == "GRPO":
        prompt, completion = scale.completion(case, size)
        settings |= {"num_generations": min(GENERATIONS, batch), "max_completion_length": completion}
        given |= {"train_dataset": Dataset.from_dict({"prompt": ["w2"] * batch}), "reward_funcs": no_reward}
        made = type(trainer.__name__, (GivenRollout, trainer), {})(args=config(**settings), **given)
        made.rollout = rollout(batch, prompt, completion, scale.model["vocab_size"], random, device)
        return made
    length = scale.length(case, size)
    if case.kind == "SFT":
        settings["max_length"] = length
        ids = torch.randint(2, scale.model["vocab_size"], (batch, length), generator=random)
        given["train_dataset"] = Dataset.from_dict({"input_ids": ids.tolist()})
    else:
        settings["max_length"] = length // 2
        given["train_dataset"] = preferences(batch, length // 2, random)
    return trainer(args=config(**settings), **given)


def pair(kind: str, *, ours: bool) -> tuple[type, type]:
    names = f"{kind}Config", f"{kind}Trainer"
    stock = trl if hasattr(trl, names[1]) else import_module(f"trl.experimental.{kind.lower()}")
    config, trainer = (getattr(our_trainers if ours else stock, name) for name in names)
    return config, trainer


def preferences(pairs: int, length: int, random: torch.Generator) -> Dataset:
    """Text whose two sequences have `length` tokens each, the prompt a quarter of them and the end of the
    sequence one."""

    def column(words: int) -> list[str]:
        ids = torch.randint(2, WORDS, (pairs, words), generator=random).tolist()
        return ["".join(f" w{i}" for i in row) for row in ids]

    prompt = length // 4
    completion = length - prompt - 1
    return Dataset.from_dict(
        {"prompt": column(prompt), "chosen": column(completion), "rejected": column(completion)}
    )


class GivenRollout:
    """A GRPO trainer whose completions exist already."""

    rollout: dict[str, Tensor]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Tensor]:
        return self.rollout


def rollout(
    batch: int, prompt: int, completion: int, vocabulary: int, random: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Random prompts and completions with random advantages, in the shape in which the trainer's generation
    returns them.

    They are the policy's own, so that every ratio is 1 and the loss minus the mean advantage: what tells is
    the gradient.
    """
    ids = torch.randint(2, vocabulary, (batch, prompt + completion), generator=random).to(device)
    mask = torch.ones_like(ids)
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": torch.randn(batch, generator=random).to(device),
        "num_items_in_batch": mask[:, prompt:].sum(),
    }


def no_reward(completions: list, **kwargs: Any) -> list[float]:
    """Never called: the advantages are given."""
    raise AssertionError("a given rollout needs no reward")
