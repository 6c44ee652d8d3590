"""Outcomes of recipes on held-out prompts: stock, with the flag, and stock from weights moved by 1e-7.

Every run starts from one checkpoint, a tiny model that has half learned sums (`sums.py`). A seed is an order
of the prompts and the random numbers of sampling, and the three runs of a seed are compared. The moved run is
the null: where tokens are sampled, rounding alone makes runs part, and one run beside another shows nothing.

Imports TRL: only those that measure import this.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.registry import one_line
from benchmarks.models.trainer_steps import quiet
from benchmarks.proof import shadow_heads, sums
from benchmarks.proof.curves import interval
from benchmarks.proof.shadow import KINDS, Kind, World, construct, with_prompts
from logitless import MedusaHeads

MOVED = 1e-7
TEACHER = "teacher"
# Runs have parted once their training losses (of GRPO, the mean rewards) differ by this share.
PARTED = 0.01
# A smaller share of the metric is no difference.
LEAST = 1e-4
VARIANTS: dict[str, dict[str, bool]] = {"stock": {}, "flag": {"ours": True}, "moved": {"moved": True}}


@dataclass(frozen=True)
class Start:
    """What all runs start from."""

    folder: Path
    world: World
    moved: World  # the checkpoint with every weight times 1 + 1e-7 noise
    device: str
    most_steps: int  # of a run


def begin(folder: Path, device: str, *, quick: bool = False) -> Start:
    """Train the checkpoint and the teacher, and save them in the folder."""
    quiet()
    steps, more, examples, most = (20, 40, 64, 2) if quick else (400, 800, 1024, 1000)
    world = sums.world(folder / "model", steps=steps, examples=examples, batch=32, device=device)
    sums.trained(more, device=device).save_pretrained(folder / TEACHER)
    model = world.model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + MOVED * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder / "moved")
    world.tokenizer.save_pretrained(folder / "moved")
    return Start(folder, world, replace(world, folder=folder / "moved"), device, most)


def taught_by(world: World) -> dict[str, nn.Module]:
    """The teacher, of any of the checkpoints."""
    return {"teacher_model": replace(world, folder=world.folder.parent / TEACHER).model()}


# -- metrics


def rows(start: Start, prompts: list[str], answers: list[str]) -> tuple[Tensor, Tensor]:
    """Ids (B, T), padded on the right, and labels, -100 outside of the answers."""
    ids, labels = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        first, last = (start.world.tokenizer(text)["input_ids"] for text in (prompt, answer))
        ids.append(torch.tensor([*first, *last, sums.EOS]))
        labels.append(torch.tensor([*[-100] * len(first), *last, sums.EOS]))
    pad = nn.utils.rnn.pad_sequence
    return pad(ids, True, sums.PAD).to(start.device), pad(labels, True, -100).to(start.device)


def log_probabilities(model: nn.Module, start: Start, answers: list[str]) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T - 1, V) of the next ids, and labels (B, T - 1)."""
    prompts, *_ = sums.texts(sums.HELD_OUT)
    ids, labels = rows(start, prompts, answers)
    return model(input_ids=ids).logits[:, :-1].log_softmax(-1), labels[:, 1:]


def greedy(model: nn.Module, start: Start) -> Tensor:
    """Greedy completions (B, TOKENS) of the held-out prompts."""
    prompts, *_ = sums.texts(sums.HELD_OUT)
    batch = start.world.tokenizer(prompts, return_tensors="pt", padding=True).to(start.device)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ids = model.generate(**inputs, max_new_tokens=sums.TOKENS, do_sample=False)
    return ids[:, inputs["input_ids"].shape[1] :]


def accuracy(model: nn.Module, start: Start) -> float:
    """Share of the held-out sums that greedy decoding answers right."""
    _, right, _ = sums.texts(sums.HELD_OUT)
    got = start.world.tokenizer.batch_decode(greedy(model, start), skip_special_tokens=True)
    return mean(float(a == b) for a, b in zip(got, right, strict=True))


def margin(model: nn.Module, start: Start) -> float:
    """Mean log-probability of the right answer less that of the wrong one."""
    _, *both = sums.texts(sums.HELD_OUT)
    of = []
    for answers in both:
        logps, labels = log_probabilities(model, start, answers)
        logps = logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        of.append(logps.masked_fill(labels == -100, 0).sum(1))
    return (of[0] - of[1]).mean().item()


def divergence(model: nn.Module, start: Start) -> float:
    """KL(teacher || model), mean over the tokens of the right answers."""
    _, right, _ = sums.texts(sums.HELD_OUT)
    teacher = taught_by(start.world)["teacher_model"].to(start.device).eval()
    (p, labels), (q, _) = (log_probabilities(each, start, right) for each in (teacher, model))
    return (p.exp() * (p - q)).sum(-1)[labels != -100].mean().item()


@torch.no_grad()
def accepted(model: nn.Module, heads: MedusaHeads, start: Start) -> float:
    """Mean accepted length at the first token of an answer: this token, and the following ones of greedy
    decoding that the heads guess in a row."""
    prompts, *_ = sums.texts(sums.HELD_OUT)
    ids, labels = rows(start, prompts, [""] * len(prompts))
    last = (labels != -100).int().argmax(1) - 1  # of the prompt
    hidden = model.base_model(input_ids=ids).last_hidden_state[torch.arange(len(ids)), last]
    following = greedy(model, start)[:, 1 : 1 + shadow_heads.HEADS]
    # Greedy decoding stops once every prompt has its end.
    missing = shadow_heads.HEADS - following.shape[1]
    following = nn.functional.pad(following, (0, missing), value=sums.PAD)
    right = (heads(hidden).argmax(-1).t() == following) & (following != sums.PAD)
    return 1 + right.int().cumprod(1).sum(1).float().mean().item()


# -- recipes


@dataclass(frozen=True)
class Run:
    """One run: the metric on held-out prompts, and a number of every step, by which runs are seen to part."""

    metric: float
    series: list[float]


@dataclass(frozen=True)
class OfTrainer:
    """A recipe with one of TRL's trainers. The metric is computed in fp32."""

    trainer: str
    metric: Callable[[nn.Module, Start], float]
    learning_rate: float
    steps: int = 60
    made: Kind | None = None  # by default that of `shadow.KINDS`
    options: dict[str, Any] = field(default_factory=dict)  # of the config

    def before(self, start: Start) -> float:
        return self.evaluate(start.world.model(), start)

    def evaluate(self, model: nn.Module, start: Start) -> float:
        with torch.no_grad():
            return self.metric(model.to(start.device).eval(), start)

    def train(
        self, start: Start, seed: int, *, ours: bool = False, moved: bool = False, **options: Any
    ) -> Run:
        world = start.moved if moved else start.world
        settings: dict[str, Any] = {"seed": seed, "learning_rate": self.learning_rate}
        settings |= {"bf16": start.device == "cuda", "use_cpu": start.device == "cpu"} | self.options
        if ours:
            settings["use_chunked_loss"] = True
        folder = start.folder / f"{self.trainer}-{seed}"
        steps = min(self.steps, start.most_steps)
        trainer = construct(
            self.trainer, world, folder, steps=steps, made=self.made, ours=ours, **settings | options
        )
        trainer.train()
        if ours and trainer.last_plan is None:
            raise RuntimeError("last_plan: expected the plan of a chunked loss, got None.")
        logs = [log for log in trainer.state.log_history if "loss" in log]
        # Without the trainer's autocast and adapters
        trained = getattr(trainer.model, "merge_and_unload", lambda: trainer.model)()
        model = world.model()
        model.load_state_dict(trained.state_dict())
        return Run(self.evaluate(model, start), [log.get("reward", log["loss"]) for log in logs])


@dataclass(frozen=True)
class OfMedusa:
    """Medusa's heads on the frozen model, in fp32, beside PyTorch on full logits."""

    learning_rate: float
    steps: int
    metric: Callable[..., float] = accepted

    def before(self, start: Start) -> float:
        return self.train(replace(start, most_steps=0), 0).metric

    def train(self, start: Start, seed: int, *, ours: bool = False, moved: bool = False) -> Run:
        world = start.moved if moved else start.world
        model = world.model().to(start.device).requires_grad_(False)
        heads = shadow_heads.medusa_heads(model)
        trained, full, chunked = shadow_heads.medusa(model, stage=1, logits_budget=None, heads=heads)
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate)
        generator, losses = torch.Generator().manual_seed(seed), []
        ids, labels = rows(start, world.prompts, world.right)
        for _ in range(min(self.steps, start.most_steps)):
            chosen = torch.randint(len(ids), (world.batch,), generator=generator).to(start.device)
            loss = (chunked if ours else full)(ids[chosen], labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(self.metric(model, heads, start), losses)


def all_sums(world: World) -> dict[str, list]:
    """Every sum that is not held out, as a prompt."""
    prompts, *_ = sums.texts(sums.TRAINED)
    return {"prompt": prompts}


# With 16 prompts a step and a learning rate of 1e-3, the first 20 steps lower the mean reward, and the others
# only regain it. A reward for near sums, as of `sums.reward`, takes away from the gain as well.
GROUPS = {"per_device_train_batch_size": 512, "num_generations": 8}
RECIPES: dict[str, OfTrainer | OfMedusa] = {
    "SFT": OfTrainer("SFT", accuracy, 1e-3),
    "SFT, LoRA": OfTrainer("SFT", accuracy, 5e-3, made=replace(KINDS["SFT, LoRA"], lora={})),
    "DPO": OfTrainer("DPO", margin, 3e-4),
    "GRPO": OfTrainer(
        "GRPO",
        accuracy,
        5e-4,
        150,
        made=replace(
            KINDS["GRPO"], columns=all_sums, arguments=lambda world: {"reward_funcs": sums.is_right}
        ),
        options=GROUPS,
    ),
    "distillation": OfTrainer(
        "Distillation",
        divergence,
        1e-3,
        made=Kind(with_prompts, lambda world: {"max_completion_length": world.tokens}, taught_by),
    ),
    "Medusa": OfMedusa(1e-2, 200),
}
METRICS = {
    accuracy: "accuracy",
    margin: "margin, nats",
    divergence: "KL from the teacher, nats",
    accepted: "accepted length",
}


def measure(start: Start, name: str, seed: int, fault: dict[str, Any] | None = None) -> dict:
    """The metric after the three runs of a seed; `fault`: options of the config with the flag alone."""
    began, recipe = time.perf_counter(), RECIPES[name]
    runs = {
        variant: recipe.train(start, seed, **how, **((fault or {}) if variant == "flag" else {}))
        for variant, how in VARIANTS.items()
    }
    for variant, run in runs.items():
        if not isfinite(run.metric):
            raise ValueError(f"{variant}: expected a finite metric, got {run.metric}.")
    stock = runs["stock"].series
    return {
        "seed": seed,
        **{variant: run.metric for variant, run in runs.items()},
        "parted": {variant: parted(stock, runs[variant].series) for variant in ("flag", "moved")},
        "seconds": round(time.perf_counter() - began, 1),
    }


def parted(stock: list[float], other: list[float]) -> int | None:
    """The first step, from 1, whose numbers differ by more than 1%; None if none does."""
    pairs = enumerate(zip(stock, other, strict=True), 1)
    return next((step for step, (a, b) in pairs if not abs(a - b) <= PARTED * abs(a)), None)


def attempt(start: Start, unit: tuple[str, int]) -> tuple[tuple[str, int], dict]:
    try:
        return unit, measure(start, *unit)
    # A trainer may fail in any way; the others must still be measured.
    except Exception as error:
        return unit, {"seed": unit[1], "failed": one_line(error)}


def alone() -> None:
    """In a process beside others."""
    torch.set_num_threads(1)
    quiet()


def measured(
    start: Start, units: list[tuple[str, int]], jobs: int, left: Callable[[], float]
) -> Iterator[tuple[tuple[str, int], dict]]:
    """Results of recipes and seeds as they come, until no seconds are left."""
    if jobs == 1:
        longest = 0.0
        for unit in units:
            if left() < 1.3 * longest + 5:
                continue
            found = attempt(start, unit)
            longest = max(longest, found[1].get("seconds", 0.0))
            yield found
        return
    with get_context("spawn").Pool(jobs, alone) as pool:
        results = pool.imap_unordered(partial(attempt, start), units)
        for _ in units:
            try:
                yield results.next(timeout=max(0.0, left()))
            except TimeoutError:
                return


# -- statistics


def row(name: str, start: Start) -> dict:
    """Of the table, before its first seed."""
    recipe = RECIPES[name]
    return {
        "name": name,
        "metric": METRICS[recipe.metric],
        "steps": min(recipe.steps, start.most_steps),
        "before": recipe.before(start),
        "seeds": [],
        "verdict": "not measured",
    }


def summary(row: dict) -> dict:
    """Means, and a verdict: a difference if the interval excludes 0, and the mean is larger than all of the
    null's interval and than 1e-4 of the metric."""
    seeds = sorted((each for each in row["seeds"] if "failed" not in each), key=lambda each: each["seed"])
    if not seeds:
        return {"verdict": "failed"}
    found: dict[str, Any] = {"stock": mean(each["stock"] for each in seeds)}
    for variant in ("flag", "moved"):
        differences = [each[variant] - each["stock"] for each in seeds]
        found[variant] = {"mean": mean(differences), "interval": interval(differences)}
    flag, null = found["flag"], found["moved"]
    if len(seeds) < 2:
        return found | {"verdict": "one seed"}
    size, bound = abs(flag["mean"]), max(map(abs, flag["interval"]))
    excludes_zero = not flag["interval"][0] <= 0 <= flag["interval"][1]
    floor = max(*map(abs, null["interval"]), LEAST * abs(found["stock"]))
    if excludes_zero and size > floor:
        verdict = "difference"
    elif bound == 0:
        verdict = "none: equal in every seed"
    else:
        verdict = f"none found, smaller than {1.05 * bound:.2g}"  # rounded up
    return found | {"verdict": verdict}


def line(name: str, found: dict) -> str:
    if "failed" in found:
        return f"{name}, seed {found['seed']}: failed, {found['failed']}"
    metrics = ", ".join(f"{variant} {found[variant]:.4f}" for variant in VARIANTS)
    return f"{name}, seed {found['seed']}: {metrics}; {found['seconds']:.0f} s"
