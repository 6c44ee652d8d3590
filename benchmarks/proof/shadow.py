"""Shadow gradients: a trainer of TRL trains, and at every step the chunked loss computes loss and gradient of
the same inputs at the same weights.

Two runs beside each other part by rounding, and then differ for that reason alone; here each step is compared
by itself, so the tolerance is that of rounding. Imports TRL: only those that measure import this.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from benchmarks.models.trainer_steps import pair, quiet
from logitless.trl_integration import apply_to

BETA = 0.1


@dataclass(frozen=True)
class World:
    """What trainers train on: a saved model with its tokenizer, and texts."""

    name: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    prompts: list[str]
    right: list[str]
    wrong: list[str]
    reward: Callable[..., list[float]]
    # of GRPO's completions
    tokens: int
    batch: int
    options: dict[str, Any] = field(default_factory=dict)  # of every config

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)


# Gradients of fp32 operands must agree to this, relative to the norm of the gradient; a planted fault must be
# seen to be above this.
LIMIT = 1e-5


@dataclass(frozen=True)
class Kind:
    """How one of TRL's trainers is constructed."""

    columns: Callable[[World], dict[str, list]]
    config: Callable[[World], dict[str, Any]] = lambda world: {}
    arguments: Callable[[World], dict[str, Any]] = lambda world: {}
    lora: dict[str, Any] | None = None  # options of its LoraConfig
    trainer: str = ""  # the name of its class, where that is not its own
    # The largest difference of fp32 gradients, relative to their norm.
    limit: float = LIMIT


def with_completion(world: World) -> dict[str, list]:
    return {"prompt": world.prompts, "completion": world.right}


def with_pairs(world: World) -> dict[str, list]:
    return {"prompt": world.prompts, "chosen": world.right, "rejected": world.wrong}


def with_labels(world: World) -> dict[str, list]:
    """Right and wrong completions in turns."""
    both = [(world.right, world.wrong)[i % 2][i] for i in range(len(world.prompts))]
    labels = [i % 2 == 0 for i in range(len(both))]
    return {"prompt": world.prompts, "completion": both, "label": labels}


def with_prompts(world: World) -> dict[str, list]:
    return {"prompt": world.prompts}


def with_ids(world: World) -> dict[str, list]:
    """Ids of prompt and completion; labels leave out the prompt."""
    rows: dict[str, list] = {"input_ids": [], "labels": []}
    for prompt, completion in zip(world.prompts, world.right, strict=True):
        start = world.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        end = world.tokenizer(completion, add_special_tokens=False)["input_ids"]
        rows["input_ids"].append(start + end)
        rows["labels"].append([-100] * len(start) + end)
    return rows


def collate(rows: list[dict]) -> dict[str, Tensor]:
    """Pads ids and labels on the right; the prompt is what has no labels."""
    width = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list] = {"input_ids": [], "attention_mask": [], "labels": [], "prompts": []}
    for row in rows:
        ids, gap = row["input_ids"], width - len(row["input_ids"])
        batch["input_ids"].append(ids + [0] * gap)
        batch["attention_mask"].append([1] * len(ids) + [0] * gap)
        batch["labels"].append(row["labels"] + [-100] * gap)
        batch["prompts"].append(ids[:1])
    return {name: torch.tensor(values) for name, values in batch.items()}


def rollouts(world: World) -> dict[str, Any]:
    return {"num_generations": 4, "max_completion_length": world.tokens, "temperature": 1.0}


def other_model(world: World) -> dict[str, Any]:
    """A teacher: the model with every weight moved by half of itself. Of a nearer one the divergence, and its
    gradient, is soon a difference of nearly equal numbers."""
    teacher = world.model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.mul_(1 + 0.5 * torch.randn(weight.shape, generator=generator))
    return {"teacher_model": teacher}


# B of every adapter: of zeros, the gradient of A would be zero in the first step.
NONZERO = {"init_lora_weights": False}
KINDS: dict[str, Kind] = {
    "SFT": Kind(with_completion, lambda world: {"completion_only_loss": True}),
    "DPO": Kind(with_pairs, lambda world: {"beta": BETA}),
    "GRPO": Kind(
        with_prompts,
        lambda world: rollouts(world) | {"beta": 0.0},
        lambda world: {"reward_funcs": world.reward},
    ),
    "KTO": Kind(with_labels, lambda world: {"beta": BETA}),
    "ORPO": Kind(with_pairs, lambda world: {"beta": BETA, "max_length": 256}),
    "CPO": Kind(with_pairs, lambda world: {"beta": BETA, "max_length": 256}),
    # Its ratio is the exponential of a difference of sums of log-probabilities. Between -512 and -1,024, fp32
    # rounds such a sum to 3e-5, in stock TRL as well.
    "RLOO": Kind(
        with_prompts,
        lambda world: rollouts(world) | {"beta": 0.0},
        lambda world: {"reward_funcs": world.reward},
        limit=5e-5,
    ),
    "GKD": Kind(
        with_ids,
        lambda world: {"lmbda": 0.0, "max_length": None, "max_new_tokens": world.tokens},
        lambda world: other_model(world) | {"data_collator": collate},
    ),
    "SFT, LoRA": Kind(
        with_completion, lambda world: {"completion_only_loss": True}, lora=NONZERO, trainer="SFT"
    ),
    "DPO, LoRA": Kind(with_pairs, lambda world: {"beta": BETA}, lora=NONZERO, trainer="DPO"),
}


def construct(
    kind: str,
    world: World,
    folder: Path,
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    made: Kind | None = None,
    ours: bool = False,
    **options: Any,
) -> transformers.Trainer:
    """A trainer of TRL, or that of `logitless.trl_integration`; `options` are those of its config.

    `made`: how it is constructed, by default as in `KINDS`.
    """
    made = made or KINDS[kind]
    config, trainer = pair(made.trainer or kind, ours=ours)
    on_gpu = torch.cuda.is_available()
    settings = {
        "output_dir": str(folder),
        "max_steps": steps,
        "use_cpu": not on_gpu,
        "bf16": dtype == torch.bfloat16,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "learning_rate": 1e-4,
        "per_device_train_batch_size": world.batch,
        "seed": 0,
        **made.config(world),
        **world.options,
        **options,
    }
    given: dict[str, Any] = made.arguments(world)
    if made.lora is not None:
        import peft

        given["peft_config"] = peft.LoraConfig(
            r=8, target_modules="all-linear", task_type="CAUSAL_LM", **made.lora
        )
    torch.manual_seed(0)
    trained = trainer(
        model=world.model(dtype),
        args=config(**settings),
        train_dataset=Dataset.from_dict(made.columns(world)),
        processing_class=world.tokenizer,
        **given,
    )
    trained.remove_callback(transformers.PrinterCallback)
    return trained


@dataclass
class Step:
    """One step: losses, and how far gradients are apart, relative to the norm of stock's."""

    loss: float
    loss_difference: float
    norm: float
    gradient: float
    # with operands in bf16: errors of stock and of the chunked loss against fp32
    stock_error: float | None = None
    error: float | None = None


def compare(
    kind: str,
    world: World,
    folder: Path,
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    logits_budget: int | None = None,
    fault: dict[str, Any] | None = None,
    ended: Callable[[], bool] = lambda: False,
    **options: Any,
) -> list[Step]:
    """Train with stock TRL, and compare the gradients of both losses at every step.

    Args:
        kind: a name of `KINDS`.
        dtype: of the model. With bf16 a trainer in fp32 computes the truth at the same weights.
        logits_budget: of the chunked loss.
        fault: attributes of the trainer that have other values while the chunked loss computes, to show that
            the comparison sees a small error.
        ended: whether the time is up; training then stops.
    """
    quiet()
    trainer = construct(kind, world, folder, steps=steps, dtype=dtype, **options)
    exact = None
    if dtype != torch.float32:
        exact = construct(kind, world, folder, steps=steps, **options)
    found: list[Step] = []

    def watched(model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        del trainer.compute_loss  # TRL's own, for both
        try:
            step, loss = one_step(trainer, exact, model, inputs, kwargs, logits_budget, fault or {})
        finally:
            trainer.compute_loss = watched
        found.append(step)
        trainer.control.should_training_stop |= ended()
        return loss

    trainer.compute_loss = watched
    trainer.train()
    return found


def one_step(
    trainer: transformers.Trainer,
    exact: transformers.Trainer | None,
    model: nn.Module,
    inputs: Any,
    kwargs: dict[str, Any],
    logits_budget: int | None,
    fault: dict[str, Any],
) -> tuple[Step, Tensor]:
    """The comparison, and stock's loss to train on."""
    undo = apply_to(trainer, logits_budget=logits_budget)
    try:
        with changed(trainer, fault):
            ours = trainer.compute_loss(model, copy.copy(inputs), **kwargs)
            our_loss, our_gradient = ours.item(), gradient(ours, trainer.model)
        if getattr(trainer, "last_plan", None) is None:
            raise RuntimeError("last_plan: expected the plan of a chunked loss, got None.")
    finally:
        undo()
    stock = trainer.compute_loss(model, copy.copy(inputs), **kwargs)
    stock_gradient = gradient(stock, trainer.model)
    difference = distance(our_gradient, stock_gradient)
    step = Step(stock.item(), abs(our_loss - stock.item()), norm_of(stock_gradient), difference)
    if exact is not None:
        with torch.no_grad():
            pairs = zip(exact.model.parameters(), trainer.model.parameters(), strict=True)
            for target, source in pairs:
                target.copy_(source)
        exact.state.global_step = trainer.state.global_step
        exact.model.train()
        for name in ("current_gradient_accumulation_steps",):
            if hasattr(trainer, name):
                setattr(exact, name, getattr(trainer, name))
        with torch.autocast("cuda", enabled=False):
            loss = exact.compute_loss(exact.model, copy.copy(inputs), **kwargs)
            true = gradient(loss, exact.model)
        step.stock_error, step.error = distance(stock_gradient, true), distance(our_gradient, true)
    # The loss to train on is computed again: its graph was freed by the gradient above.
    return step, trainer.compute_loss(model, inputs, **kwargs)


@contextmanager
def changed(trainer: Any, attributes: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(trainer, name) for name in attributes}
    for name, value in attributes.items():
        setattr(trainer, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


def gradient(loss: Tensor, model: nn.Module) -> list[Tensor | None]:
    """Of every parameter that is trained."""
    return list(
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    )


def norm_of(gradients: list[Tensor | None]) -> float:
    squares = [g.double().square().sum() for g in gradients if g is not None]
    return torch.stack(squares).sum().sqrt().item()


def distance(got: list[Tensor | None], true: list[Tensor | None]) -> float:
    """Norm of the difference by the norm of the truth; a missing gradient counts as 0."""
    differences = []
    for ours, theirs in zip(got, true, strict=True):
        if ours is None and theirs is None:
            continue
        ours = 0.0 if ours is None else ours.double()
        theirs = 0.0 if theirs is None else theirs.double()
        differences.append(ours - theirs)
    norm = norm_of(true)
    if norm == 0:  # a step without a gradient, as when all rewards of GRPO are equal
        return 0.0 if all(not d.any() for d in differences) else float("inf")
    return norm_of(differences) / norm
