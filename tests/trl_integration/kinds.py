"""What each kind of trainer needs for a run of a few steps: its data and its settings."""

import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
import trl
from accelerate import DistributedType, PartialState
from datasets import Dataset

from logitless.models.heads import base_of

from .compare import RTOL, STEPS, options, stock, unchanged
from .tiny import VOCAB, Run, prepare, save, tiny_dataset, tiny_model, words

KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "ORPO", "CPO", "GKD", "Distillation")

ROLLED = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": STEPS,
}
DISTILLED = {"max_completion_length": 6, "optim": "sgd", "learning_rate": 0.3}
SETTINGS: dict[str, dict[str, Any]] = {
    "ORPO": {"max_length": 48},
    "CPO": {"max_length": 48},
    "KTO": {"per_device_train_batch_size": 4},
    # with a reference model
    "GRPO": ROLLED | {"beta": 0.1},
    "RLOO": ROLLED | {"beta": 0.1},
    "GMPO": ROLLED,
    "OnlineDPO": {"max_new_tokens": 6, "max_length": 64},
    "A2PO": {"max_completion_length": 6, "num_value_samples": 2, "filter_all_incorrect": False},
    "GKD": {"lmbda": 0.0, "max_length": None},
    "Distillation": {"max_completion_length": 6},
    "SDFT": DISTILLED | {"num_generations": 1, "distillation_topk": 7, "per_device_train_batch_size": 4},
    "SDPO": DISTILLED
    | {
        "distillation_weight": 0.5,
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "success_reward_threshold": 0.3,
        "include_environment_feedback": True,
    },
    "IWOPD": DISTILLED
    | {"beta": 0.4, "loss_top_k": 3, "lmbda": 0.0, "max_length": 48, "distillation_objective": "jsd"},
    "GOLD": DISTILLED | {"lmbda": 0.0, "max_length": 48, "dataset_kwargs": {"skip_prepare_dataset": True}},
    "ServerDistillation": DISTILLED | {"teacher_model_server_url": "http://nowhere"},
}
# of those that take a model and a dataset; AsyncGRPO and AsyncDistillation load the model and ask a server
ALL = (*KINDS, "GMPO", "OnlineDPO", "A2PO", "TPO", "SDFT", "SDPO", "IWOPD", "GOLD", "ServerDistillation")

# Rounding may draw another token, and the values of a divergence are small.
LOOSER = ("GRPO", "RLOO", "OnlineDPO", "A2PO", "GMPO", "Distillation")
LOOSER += ("SDFT", "SDPO", "IWOPD", "GOLD", "ServerDistillation")


def text(examples: int, seed: int) -> list[str]:
    """Lines of 2 to 11 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (examples,), generator=generator).tolist()
    rows = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(f"w{i}" for i in row) for row in rows]


def preference_dataset(examples=24) -> Dataset:
    return Dataset.from_dict(
        {"prompt": text(examples, 0), "chosen": text(examples, 1), "rejected": text(examples, 2)}
    )


def kto_dataset(examples=24) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": text(examples, 0),
            "completion": text(examples, 1),
            "label": [i % 3 > 0 for i in range(examples)],
        }
    )


def prompt_dataset(examples=12) -> Dataset:
    return Dataset.from_dict({"prompt": text(examples, 0)})


def triple_dataset(examples=24) -> Dataset:
    names = ("prompt", "chosen", "rejected", "reference")
    return Dataset.from_dict({name: text(examples, seed) for seed, name in enumerate(names)})


def privileged_dataset(examples=12) -> Dataset:
    return Dataset.from_dict({"prompt": text(examples, 0), "privileged_context": text(examples, 1)})


def reward(completion_ids, **kwargs) -> list[float]:
    """Any number that differs between completions."""
    return [sum(ids[:4]) % 13 / 13 for ids in completion_ids]


def text_reward(prompts, completions, **kwargs) -> list[float]:
    return [len(set(completion)) % 7 / 7 for completion in completions]


def teacher(tmp_path) -> transformers.PreTrainedModel:
    path = tmp_path / "teacher"
    if not path.exists():
        save(tiny_model(hidden_size=48), path)
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


def batches(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows padded on the left, as TRL's collators do; the first third of each is the prompt."""
    batch = collate(rows)
    full, prompts = batch["input_ids"].shape[1], [len(row["input_ids"]) // 3 for row in rows]
    order = [(torch.arange(full) + len(row["input_ids"])) % full for row in rows]
    for name in ("input_ids", "attention_mask", "labels"):
        batch[name] = torch.stack([x[rule] for x, rule in zip(batch[name], order, strict=True)])
    width = max(prompts)
    batch["prompts"] = torch.stack(
        [torch.tensor([0] * (width - n) + row["input_ids"][:n]) for n, row in zip(prompts, rows, strict=True)]
    )
    batch["prompt_attention_mask"] = torch.stack([torch.tensor([0] * (width - n) + [1] * n) for n in prompts])
    return batch


def needs(kind: str, folder: Path) -> tuple[Dataset, dict[str, Any], dict[str, Any]]:
    """(dataset, settings of the config, arguments of the trainer)."""
    settings, trainer = dict(SETTINGS.get(kind, {})), {}
    if kind in ("GRPO", "RLOO", "GMPO", "SDPO"):
        trainer["reward_funcs"] = reward
    if kind in ("OnlineDPO", "A2PO"):
        trainer["reward_funcs"] = text_reward
    if kind in ("GKD", "Distillation", "IWOPD", "GOLD"):
        trainer["teacher_model"] = teacher(folder)
    if kind in ("IWOPD", "GOLD"):
        trainer["data_collator"] = batches
    if kind == "GKD":
        trainer["data_collator"] = collate
    data: dict[str, Callable] = {"KTO": kto_dataset, "TPO": triple_dataset}
    data |= dict.fromkeys(("SFT", "GKD", "IWOPD", "GOLD"), tiny_dataset)
    data |= dict.fromkeys(("DPO", "ORPO", "CPO"), preference_dataset)
    data |= dict.fromkeys(("SDFT", "SDPO"), privileged_dataset)
    return data.get(kind, prompt_dataset)(), settings, trainer


def tolerance(kind: str) -> float:
    """Of two runs' numbers, relative."""
    return 1e-3 if kind in LOOSER else RTOL


def step(kind: str, folder, **options: Any) -> Run:
    """One step of the stock pair, or of another; the arguments are those of `prepare_step`."""
    return prepare_step(kind, folder, **options)[1]()


def prepare_step(
    kind: str, folder, *, config=None, trainer=None, wrap=unchanged, change=unchanged, **more
) -> tuple[Any, Callable[[], Run]]:
    """A trainer, `wrap` made to its model and `change` to it, and the function that trains it for a step."""
    dataset, settings, given = needs(kind, folder)
    torch.manual_seed(0)
    model = wrap(transformers.AutoModelForCausalLM.from_pretrained(folder / "model"))
    config, trainer = config or stock(f"{kind}Config"), trainer or stock(f"{kind}Trainer")

    def build(*args, **kwargs):
        made = trainer(*args, **kwargs)
        change(made)
        return made

    args = config(**options(folder / "out", **settings | {"max_steps": 1} | more))
    return prepare(build, args, model, dataset, tokenizer=words(), **given)


def entered_twice(cls: type) -> type:
    """The trainer whose method of the loss calls itself, and TRL's."""
    name = "compute_loss" if hasattr(cls, "compute_loss") else "_forward"

    def method(self, model, inputs, *args, **kwargs):
        if vars(self).setdefault("is_inside", False):
            return getattr(super(Twice, self), name)(model, inputs, *args, **kwargs)
        self.is_inside = True
        first = getattr(self, name)(model, dict(inputs), *args, **kwargs)
        self.is_inside = False
        return (first + getattr(cls, name)(self, model, inputs, *args, **kwargs)) / 2

    Twice = type("Twice", (cls,), {name: method})
    return Twice


def train_together(*prepared: tuple[Any, Callable[[], Run]]) -> list[Run]:
    """Trains each in a thread of its own; they meet in the forward passes of their models."""
    meeting = threading.Barrier(len(prepared))

    def meet(*args: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(10)

    def run(trainer: Any, train: Callable[[], Run]) -> Run:
        hook = base_of(trainer.model).get_decoder().layers[0].register_forward_pre_hook(meet)
        try:
            return train()
        finally:
            hook.remove()
            meeting.abort()  # the others go on alone

    with ThreadPoolExecutor(len(prepared)) as threads:
        return list(threads.map(lambda x: run(*x), prepared))


def for_ranks(kind: str) -> dict[str, Any]:
    """Settings of a config in one of several processes."""
    actual = {"use_cpu": dist.get_backend() == "gloo"}
    if kind in ("DPO", "KTO", "GRPO", "RLOO"):
        # Else TRL spreads the reference model over all cards, whoever has them.
        actual["model_init_kwargs"] = {"device_map": None}
    return actual


def rollout(prompt_ids: list[list[int]]) -> list[list[int]]:
    """Completions that depend on the prompt and on how many it had before, whichever process asks."""
    seen, actual = {}, []
    for ids in prompt_ids:
        count = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
        generator = torch.Generator().manual_seed(1000 * sum(ids) + count)
        length = torch.randint(2, 7, (), generator=generator)
        actual.append(torch.randint(3, VOCAB, (length,), generator=generator).tolist())
    return actual


def rolled_out(cls: type) -> type:
    """The trainer with completions that any number of processes agree on."""

    class RolledOut(cls):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            actual = rollout(prompt_ids)
            return (actual, None) if issubclass(cls, trl.GRPOTrainer) else actual

    return RolledOut if hasattr(cls, "_generate_single_turn") else cls


def attempt(function: Callable, *args: Any) -> Any:
    """What the function returns, or as text what it raises, so that a rank goes on with the next trainer."""
    try:
        return function(*args)
    except Exception:
        return traceback.format_exc()


def decided(trainer: Any) -> None:
    """Lets the models of a trainer generate completions that depend on the prompts alone: torch's generator
    is shared by threads."""

    def generate(input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> torch.Tensor:
        prompts = input_ids.repeat_interleave(generation_config.num_return_sequences or 1, 0)
        completions = [[*ids, 2, *[0] * (6 - len(ids))] for ids in rollout(prompts.tolist())]
        return torch.cat([prompts, torch.tensor(completions)[:, : generation_config.max_new_tokens]], dim=1)

    for name in ("model", "ref_model"):
        model = getattr(trainer, name, None)
        if model is not None:
            model.generate = generate


@contextmanager
def with_cards() -> Iterator[None]:
    """Accelerate shards models for processes with cards alone: those of gloo pass for them.

    Trainers make what they make on the CPU and move it themselves.
    """
    made = PartialState.__init__

    def passing(self, *args, **kwargs):
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with mock.patch.object(PartialState, "__init__", passing), torch.device("cpu"):
        yield
