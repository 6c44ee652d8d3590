"""Training runs of the same model with each implementation of cross-entropy, and how far they part.

The yardstick is what PyTorch's loss does to itself: the same run again (atomics in the backward pass of
attention), and from first weights moved by 1e-6. Another seed would hide any error, and zero is not reached.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.proof.gradient_errors import Head
from benchmarks.proof.sources import Text

EAGER = "eager"
# Steps before chaos grows
EARLY = 20
# A difference: the early distance above this multiple of the null's largest
EARLY_FACTOR = 10
# Equivalence: the interval of the held-out difference is within this share of the deviation between seeds.
MARGIN = 0.2
# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
LOW = torch.bfloat16


@dataclass(frozen=True)
class Size:
    """A model and its training."""

    model: dict
    batch: tuple[int, int]  # sequences, tokens
    learning_rate: float
    warm: int
    # Batches and rows of a head for `gradient_errors`, and its rows in one large batch
    head: tuple[int, int]
    large: int


FULL = Size(
    {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    (16, 512),
    8e-4,
    40,
    (4, 4096),
    16384,
)
QUICK = Size(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    (4, 32),
    3e-3,
    2,
    (2, 128),
    256,
)


@dataclass(frozen=True)
class Variant:
    """One run of a seed: an implementation, `name` in tables, first weights moved by `moved`, by the
    generator seeded with `draw`."""

    name: str
    implementation: str
    moved: float = 0.0
    draw: int = 0

    @property
    def is_null(self) -> bool:
        return self.implementation == EAGER


VARIANTS = (
    Variant(EAGER, EAGER),
    Variant("eager again", EAGER),
    Variant("eager, moved", EAGER, 1e-6, 1),
    Variant("eager, moved again", EAGER, 1e-6, 2),
    *(
        Variant(name, name)
        for name in (
            "logitless",
            "logitless, several chunks",
            "torch.compile",
            "TRL",
            "Liger",
            "CCE (filtered)",
            "eager, fp32 logits",
        )
    ),
)


@dataclass
class Trainer:
    """Trains models of one size on one text."""

    text: Text
    size: Size
    device: torch.device
    steps: int  # of the schedule
    train: Tensor = field(init=False)
    held_out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        length = self.size.batch[1] + 1
        self.train = self.text.train[: len(self.text.train) // length * length].view(-1, length)
        held_out = self.text.held_out[: len(self.text.held_out) // length * length].view(-1, length)
        self.held_out = held_out.to(self.device)

    def model(self, seed: int, moved: float = 0.0, draw: int = 0) -> torch.nn.Module:
        """A Llama with fp32 weights; `moved`: every weight times 1 + moved * noise."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=self.text.vocabulary,
            max_position_embeddings=self.size.batch[1] + 256,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            **self.size.model,
        )
        with self.device:
            model = LlamaForCausalLM(config)
        if moved:
            generator = torch.Generator(self.device).manual_seed(draw)
            with torch.no_grad():
                for weight in model.parameters():
                    noise = torch.randn(weight.shape, generator=generator, device=self.device)
                    weight.mul_(1 + moved * noise)
        return model

    def hidden(self, model: torch.nn.Module, ids: Tensor) -> Tensor:
        """Last hidden states (N, H): in bf16 on a GPU, in fp32 on a CPU."""
        with torch.autocast(self.device.type, LOW, enabled=self.device.type == "cuda"):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return LOW if self.device.type == "cuda" else torch.float32

    def run(
        self,
        loss_fn: Callable,
        seed: int,
        steps: int,
        *,
        moved: float = 0.0,
        draw: int = 0,
        stages: tuple[int, ...] = (),
    ) -> tuple[dict, torch.nn.Module, dict[int, Head]]:
        """Trains; returns losses and the held-out loss, the model, and the heads at these steps."""
        began = time.perf_counter()
        model, on_gpu = self.model(seed, moved, draw), self.device.type == "cuda"
        rate = self.size.learning_rate
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
        )
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(1000 + seed))
        losses, heads = [], {}
        for step in range(steps):
            if step in stages:
                heads[step] = self.head(model, step)
            warm = min(1.0, (step + 1) / self.size.warm)
            decay = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
            for group in optimizer.param_groups:
                group["lr"] = rate * warm * decay
            first = step * self.size.batch[0]
            rows = order[torch.arange(first, first + self.size.batch[0]) % len(order)]
            ids = self.train[rows].to(self.device, non_blocking=True)
            # Every implementation gets operands in bf16: a cast inside of it would be another comparison.
            weight = model.lm_head.weight.to(self.dtype)
            loss = loss_fn(self.hidden(model, ids[:, :-1]), weight, ids[:, 1:].flatten())
            loss = getattr(loss, "loss", loss)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        if steps in stages:
            heads[steps] = self.head(model, steps)
        result = {
            "seed": seed,
            "moved": moved,
            "loss": short(torch.stack(losses)),
            "held_out": self.evaluate(model),
            "seconds": round(time.perf_counter() - began, 2),
        }
        return result, model, heads

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module, rows: int = 64) -> float:
        """Held-out loss in fp32 logits, computed in the same way for every run."""
        weight, total, count = model.lm_head.weight.float(), 0.0, 0
        for ids in self.held_out[:rows].split(8):
            logits = self.hidden(model, ids[:, :-1]).float() @ weight.t()
            targets = ids[:, 1:].flatten()
            total += F.cross_entropy(logits, targets, reduction="sum").item()
            count += len(targets)
        return total / count

    @torch.no_grad()
    def head(self, model: torch.nn.Module, step: int) -> Head:
        """The head in bf16, with hidden states of held-out text."""
        K, N = self.size.head
        need = -(-max(K * N, self.size.large) // self.size.batch[1])
        ids = self.held_out.repeat(-(-need // len(self.held_out)), 1)[:need]
        hidden = torch.cat([self.hidden(model, rows[:, :-1]) for rows in ids.split(8)])[: K * N]
        seen = torch.zeros(self.text.vocabulary, dtype=torch.bool)
        seen[self.text.train] = True
        return Head(
            f"step {step:,}",
            model.lm_head.weight.detach().to(LOW),
            hidden.to(LOW).view(K, N, -1),
            ids[:, 1:].flatten()[: K * N].view(K, N),
            seen.to(self.device),
        )


def short(values: Tensor) -> list[float]:
    """As a list, in seven digits."""
    return [float(f"{value:.7g}") for value in values.double().tolist()]


def key(variant: str, seed: int) -> str:
    return f"{variant}, seed {seed}"


# -- statistics


def early(a: dict, b: dict) -> float:
    """Mean distance of two runs' losses before chaos grows."""
    pairs = list(zip(a["loss"], b["loss"]))[:EARLY]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def late(a: dict, b: dict) -> float:
    """Root mean square distance of the second half."""
    pairs = list(zip(a["loss"], b["loss"]))
    pairs = pairs[len(pairs) // 2 :]
    return math.sqrt(sum((x - y) ** 2 for x, y in pairs) / len(pairs))


def interval(values: list[float]) -> tuple[float, float] | None:
    """95% interval of the mean of a few paired differences; None for fewer than two."""
    if len(values) < 2:
        return None
    half = STUDENT[min(len(values) - 2, len(STUDENT) - 1)] * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def statistics(runs: list[dict]) -> dict:
    """The null, and for each variant the three statistics and a verdict.

    Verdicts: "difference" if the early distance is above ten times the null's largest, or the late distance
    above the null's largest of the same seed in most seeds, or the interval of the held-out difference
    excludes 0 and its mean is above the null's largest; "equivalent" if that interval is within 0.2 standard
    deviations between seeds; else "none found".
    """
    found = {(run["variant"], run["seed"]): run for run in runs}
    seeds = sorted({run["seed"] for run in runs if (EAGER, run["seed"]) in found})
    nulls = [variant.name for variant in VARIANTS if variant.is_null and variant.name != EAGER]
    null: dict = {"seeds": len(seeds), "early": 0.0, "late": 0.0, "held_out": 0.0, "by_seed": {}}
    for seed in seeds:
        base = found[EAGER, seed]
        others = [found[name, seed] for name in nulls if (name, seed) in found]
        if others:
            largest = {
                "early": max(early(base, other) for other in others),
                "late": max(late(base, other) for other in others),
                "held_out": max(abs(other["held_out"] - base["held_out"]) for other in others),
            }
            null["by_seed"][seed] = largest
            for name, value in largest.items():
                null[name] = max(null[name], value)
    held = [found[EAGER, seed]["held_out"] for seed in seeds]
    null["deviation_between_seeds"] = stdev(held) if len(held) > 1 else None
    null["late_between_seeds"] = (
        late(found[EAGER, seeds[0]], found[EAGER, seeds[1]]) if len(seeds) > 1 else None
    )
    rows = []
    names = dict.fromkeys(run["variant"] for run in runs)
    for name in names:
        of = [seed for seed in seeds if (name, seed) in found]
        if name == EAGER or not of:
            continue
        pairs = [(found[EAGER, seed], found[name, seed]) for seed in of]
        differences = [b["held_out"] - a["held_out"] for a, b in pairs]
        lates = [late(a, b) for a, b in pairs]
        row = {
            "name": name,
            "seeds": len(of),
            "first_step": max(abs(a["loss"][0] - b["loss"][0]) for a, b in pairs),
            "early": max(early(a, b) for a, b in pairs),
            "late": max(lates),
            "held_out": mean(differences),
            "interval": interval(differences),
        }
        rows.append(row | {"verdict": verdict(row, lates, of, null, is_null=name in nulls)})
    return {"null": null, "rows": rows}


def verdict(row: dict, lates: list[float], seeds: list[int], null: dict, *, is_null: bool) -> str:
    if is_null:
        return "null"
    by_seed = null["by_seed"]
    if not by_seed:
        return "no null"
    above = sum(value > by_seed[seed]["late"] for value, seed in zip(lates, seeds) if seed in by_seed)
    reasons = []
    if row["early"] > EARLY_FACTOR * null["early"]:
        reasons.append("early")
    if 2 * above > len(seeds):
        reasons.append("late")
    excludes_zero = row["interval"] and not row["interval"][0] <= 0 <= row["interval"][1]
    if excludes_zero and abs(row["held_out"]) > null["held_out"]:
        reasons.append("held out")
    if reasons:
        return "difference: " + ", ".join(reasons)
    deviation = null["deviation_between_seeds"]
    if row["interval"] and deviation and max(map(abs, row["interval"])) <= MARGIN * deviation:
        return "equivalent"
    return "none found"


def table(found: dict, form: str = "simple") -> str:
    """The statistics beside the null."""
    null, body = found["null"], []
    for row in found["rows"]:
        times = f" ({row['early'] / null['early']:.1f} x null)" if null["early"] else ""
        between = "" if row["interval"] is None else "{:+.4f} to {:+.4f}".format(*row["interval"])
        body.append(
            [
                row["name"],
                row["seeds"],
                f"{row['early']:.1e}{times}",
                f"{row['late']:.4f}",
                f"{row['held_out']:+.4f}",
                between,
                row["verdict"],
            ]
        )
    headers = ["", "seeds", "early", "late", "held out", "95% interval", "difference"]
    return tabulate(body, headers, tablefmt=form, disable_numparse=True)
