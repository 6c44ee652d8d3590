"""Whether the losses are right where it matters: on trained heads, and over a training run.

Four parts, in the order of what they can show:

1. gradients: errors against fp64 on the head of a real model and on heads of our own run, at several steps.
2. shadow: the gradients of TRL's trainers and of the chunked loss at every step of a run.
3. curves: training runs with each implementation, beside what PyTorch's loss does to itself.
4. outcomes: what recipes reach on held-out prompts of a synthetic task, with the flag and without.

Heads, models and text come from `sources.py`; our own run trains a Llama of 107M parameters.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import picked
from benchmarks.harness.registry import one_line, package_version
from benchmarks.harness.report import write_json
from benchmarks.harness.timing import release
from benchmarks.proof import curves, gradient_errors, sources, tables
from benchmarks.proof.curves import EAGER, VARIANTS, Trainer, key
from benchmarks.proof.gradient_errors import CE, DEFAULT, OBJECTIVES, ON_LORA, Head, measure

PARTS = ("gradients", "shadow", "curves", "outcomes")
# Objectives of a head with a loss of groups beside cross-entropy.
WITH_GROUPS = ("CE", "DPO", "GRPO")
# In bf16 the chunked loss may be this many times as far from fp32 as stock TRL.
SHADOW_BF16 = 2.0
REAL_BATCHES = 4


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...]
    data: Path
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()  # all
    seeds: int = 5
    steps: int = 180  # of each compared run
    long_steps: int = 500  # of the run whose heads are looked at
    shadow_steps: int = 20
    outcome_seeds: int = 8
    jobs: int = 1  # processes that train for outcomes
    minutes: float = 30.0
    quick: bool = False


class Proof:
    """One call of the command."""

    def __init__(
        self,
        document: dict,
        device: torch.device,
        settings: Settings,
        out: Path | None,
        say: Callable[[str], None],
    ):
        self.document, self.device, self.settings, self.out, self.say = document, device, settings, out, say
        self.began = time.perf_counter()
        self.size = curves.QUICK if settings.quick else curves.FULL
        self.model: torch.nn.Module | None = None  # after the long run
        self.heads: dict[int, Head] = {}

    @cached_property
    def trainer(self) -> Trainer:
        quick, data = self.settings.quick, self.settings.data
        text = sources.bytes_of_the_library() if quick else sources.load_text(data)
        return Trainer(text, self.size, self.device, self.settings.long_steps)

    def run(self) -> None:
        document = self.document
        document |= {"complete": False, "seconds": {}, "left_out": [], "absent": {}}
        for part in self.settings.parts:
            start = time.perf_counter()
            getattr(self, part)()
            document["seconds"][part] = round(time.perf_counter() - start, 1)
            self.write()
        document["complete"] = not document["left_out"]
        if self.device.type == "cuda":
            document["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        self.write()

    def write(self) -> None:
        write_json(self.out, self.document)

    def left(self) -> float:
        """Seconds."""
        return 60 * self.settings.minutes - (time.perf_counter() - self.began)

    def ended(self) -> bool:
        return self.left() < 5

    def leave_out(self, what: str) -> bool:
        """Whether the time is up, in which case `what` is noted as left out."""
        if self.ended():
            self.document["left_out"].append(what)
            return True
        return False

    def load(self, peers: Any, *, named: tuple[str, ...] = ()) -> dict[str, Callable]:
        """The implementations that can be had here, of those that are chosen."""
        names = [peer.name for peer in peers.peers]
        chosen = picked(names, list(self.settings.only)) if self.settings.only else names
        if self.settings.skip:
            skipped = picked(names, list(self.settings.skip))
            chosen = [name for name in chosen if name not in skipped]
        wanted = [name for name in names if name in chosen or name in named]
        if not wanted:
            return {}
        present, absent = peers.load(self.device, tuple(wanted))
        self.document["absent"] |= absent
        return present

    # -- gradients

    def long_run(self) -> None:
        """Train our own model with PyTorch's loss, and keep its heads at three steps."""
        if self.model is not None:
            return
        long = self.settings.long_steps
        stages = (0, max(1, long // 10), long)
        result, self.model, self.heads = self.trainer.run(
            self.load(CE, named=(EAGER,))[EAGER], 0, long, stages=stages
        )
        self.document["long_run"] = result
        self.say(f"our own run: {long} steps, held out {result['held_out']:.3f}, {result['seconds']:.0f} s")

    def gradients(self) -> None:
        sections = self.document["gradients"] = []
        real = self.real_heads()
        for head in real:
            objectives = WITH_GROUPS if head.name.endswith("read") else ("CE",)
            self.measure(head, sections, objectives, without=("torch.compile",))
        self.long_run()
        last = self.settings.long_steps
        for step, head in self.heads.items():
            self.measure(head, sections, WITH_GROUPS if step == last else ("CE",))
        # Its logits do not fit into one chunk of the default budget.
        head, one = self.heads[last], (1, -1)
        large = Head(
            f"{head.name}, one batch",
            head.weight,
            head.hidden.reshape(*one, head.hidden.shape[-1]),
            head.targets.reshape(one),
            head.seen,
        )
        self.measure(large, sections, ("CE",), without=("torch.compile",))
        for adapted in (*[head for head in real if head.name.endswith("read")], self.heads[last]):
            self.measure(adapted, sections, (ON_LORA,))
        self.heads = {}

    def real_heads(self) -> list[Head]:
        path = self.settings.data / sources.SMOLLM2
        if self.settings.quick or not path.exists():
            if not self.settings.quick:
                self.document["left_out"].append(f"SmolLM2: {sources.SMOLLM2} is missing")
            return []
        real = sources.load_real_model(self.settings.data)
        weight = real.weight.to(self.device)
        return [
            Head(
                f"SmolLM2-135M, text {kind}",
                weight,
                hidden.view(REAL_BATCHES, -1, hidden.shape[1]).to(self.device),
                real.targets[kind].view(REAL_BATCHES, -1).to(self.device),
            )
            for kind, hidden in real.hidden.items()
        ]

    def measure(
        self, head: Head, sections: list, objectives: tuple[str, ...], without: tuple[str, ...] = ()
    ) -> None:
        for objective in objectives:
            if self.leave_out(f"gradients: {head.name}, {objective}"):
                continue
            problem, peers = OBJECTIVES[objective]
            calls = {name: call for name, call in self.load(peers).items() if name not in without}
            if calls:
                section = measure(head, calls, problem=problem, ended=self.ended)
                sections.append(section)
                self.say(f"{gradient_errors.title(section)}\n{gradient_errors.table(section)}\n")
                self.write()
            release(self.device)

    # -- shadow

    def shadow(self) -> None:
        sections = self.document["shadow"] = []
        if package_version("trl") is None:
            self.document["absent"]["shadow"] = "trl is not installed"
            return
        from benchmarks.proof import shadow, shadow_heads

        words = list(self.settings.trainers) or (["SFT"] if self.settings.quick else None)
        kinds = picked([*shadow.KINDS, *shadow_heads.KINDS], words)
        low = [torch.bfloat16] if self.device.type == "cuda" else []
        with tempfile.TemporaryDirectory() as folder:
            world = self.world(Path(folder))
            options = {
                "steps": self.settings.shadow_steps,
                "logits_budget": world_budget(self.settings.quick),
                "ended": self.ended,
            }
            for kind in kinds:
                of_trainer = kind in shadow.KINDS
                for dtype in (torch.float32, *(low if of_trainer else [])):
                    name = str(dtype).removeprefix("torch.")
                    if self.leave_out(f"shadow: {kind}, {name}"):
                        continue
                    section: dict = {"trainer": kind, "model": world.name, "dtype": name}
                    start = time.perf_counter()
                    try:
                        if of_trainer:
                            found = shadow.compare(kind, world, Path(folder) / "out", dtype=dtype, **options)
                        else:
                            found = shadow_heads.compare(kind, world, **options)
                        limit = shadow.KINDS[kind].limit if of_trainer else shadow.LIMIT
                        section |= shadow_summary([asdict(step) for step in found], limit)
                    # A trainer may fail in any way; the others must still be measured.
                    except Exception as error:
                        section |= {"verdict": "failed", "reason": one_line(error), "steps": []}
                    section["seconds"] = round(time.perf_counter() - start, 1)
                    sections.append(section)
                    self.say(f"shadow: {kind}, {name}: {shadow_line(section)}")
                    self.write()
                    release(self.device)

    def world(self, folder: Path) -> Any:
        """What TRL's trainers train on: our own model after its long run; in a quick run, one that adds."""
        from benchmarks.proof import sums, texts

        if self.settings.quick:
            return sums.world(folder / "model", steps=5, examples=16, batch=4)
        self.long_run()
        return texts.world(folder / "model", self.model, self.trainer, self.settings.data)

    # -- curves

    def curves(self) -> None:
        runs = self.document["runs"] = []
        calls = self.load(CE, named=(EAGER,))
        longest = 0.0
        for seed in range(self.settings.seeds):
            for variant in VARIANTS:
                if variant.implementation not in calls:
                    continue
                name = key(variant.name, seed)
                if self.left() < 1.3 * longest + 5:
                    self.document["left_out"].append(f"curves: {name}")
                    continue
                run, *_ = self.trainer.run(
                    calls[variant.implementation],
                    seed,
                    self.settings.steps,
                    moved=variant.moved,
                    draw=variant.draw,
                )
                longest = max(longest, run["seconds"])
                runs.append({"name": name, "variant": variant.name} | run)
                self.document["statistics"] = curves.statistics(runs)
                self.say(f"{name}: held out {run['held_out']:.4f}, {run['seconds']:.1f} s")
                self.write()
                release(self.device)
        if runs:
            self.say(f"curves\n{curves.table(self.document['statistics'])}")

    # -- outcomes

    def outcomes(self) -> None:
        rows = self.document["outcomes"] = []
        if package_version("trl") is None:
            self.document["absent"]["outcomes"] = "trl is not installed"
            return
        from benchmarks.proof import outcomes

        names = picked(outcomes.RECIPES, list(self.settings.trainers) or None)
        # Seed after seed, so that a run cut short has all recipes.
        units = [(name, seed) for seed in range(self.settings.outcome_seeds) for name in names]
        with tempfile.TemporaryDirectory() as folder:
            start = outcomes.begin(Path(folder), self.device.type, quick=self.settings.quick)
            by_name = {name: outcomes.row(name, start) for name in names}
            rows += by_name.values()
            missing = dict.fromkeys(units)
            for unit, found in outcomes.measured(start, units, self.settings.jobs, self.left):
                del missing[unit]
                row = by_name[unit[0]]
                row["seeds"].append(found)
                row |= outcomes.summary(row)
                self.say(f"outcomes: {outcomes.line(unit[0], found)}")
                self.write()
        self.document["left_out"] += [f"outcomes: {name}, seed {seed}" for name, seed in missing]
        self.say(f"outcomes\n{tables.outcomes(rows)}")


def world_budget(quick: bool) -> int:
    """A logits_budget for which batches have several chunks."""
    return 2048 if quick else 16 * 2**20


def shadow_summary(steps: list[dict], limit: float) -> dict:
    """The largest differences of a trainer, and a verdict.

    In fp32 the gradients must agree to `limit`. In bf16 the chunked loss may be twice as far from fp32
    as stock TRL, on average over the steps.
    """
    live = [step for step in steps if step["norm"] > 0]
    if not live:
        return {"verdict": "no gradient", "steps": []}
    largest = max(step["gradient"] for step in live)
    summary = {
        "largest": largest,
        "largest_loss_difference": max(step["loss_difference"] for step in live),
        "steps_without_gradient": len(steps) - len(live),
    }
    if live[0]["error"] is None:
        right = largest < limit
    else:
        summary |= {name: sum(step[name] for step in live) / len(live) for name in ("stock_error", "error")}
        right = summary["error"] <= SHADOW_BF16 * summary["stock_error"]
    rounded = [{name: value and float(f"{value:.5g}") for name, value in step.items()} for step in steps]
    return {"verdict": "ok" if right else "wrong", **summary, "steps": rounded}


def shadow_line(section: dict) -> str:
    if "largest" not in section:
        return f"{section['verdict']}: {section.get('reason', '')}"
    against = ""
    if "error" in section:
        against = f", against fp32 {section['error']:.1e} (stock {section['stock_error']:.1e})"
    return (
        f"{section['verdict']}, {len(section['steps'])} steps, gradients differ by at most "
        f"{section['largest']:.1e}{against}; {section['seconds']:.0f} s"
    )


def failed(document: dict) -> list[str]:
    """What of ours is wrong: an implementation that failed, a shadow gradient, a curve or an
    outcome that differs."""
    found = [
        f"{section['head']}, {section['objective']}, {row['name']}: {row['reason']}"
        for section in document.get("gradients", ())
        for row in section["rows"]
        if row["verdict"] == "failed" and row["name"].startswith(DEFAULT)
    ]
    found += [
        f"shadow {section['trainer']}, {section['dtype']}: {section['verdict']} {section.get('reason', '')}"
        for section in document.get("shadow", ())
        if section["verdict"] != "ok"
    ]
    found += [
        f"curve of {row['name']}: {row['verdict']}"
        for row in document.get("statistics", {}).get("rows", ())
        if row["name"].startswith(DEFAULT)
        and row["verdict"].startswith("difference")
        # Runs of a few steps have no null to speak of.
        and not document["quick"]
    ]
    for row in document.get("outcomes", ()):
        reasons = [each["failed"] for each in row["seeds"] if "failed" in each]
        # Two seeds of two steps show no difference.
        if row["verdict"] == "difference" and not document["quick"]:
            reasons.append("a difference")
        found += [f"outcomes of {row['name']}: {reason}" for reason in reasons]
    return found
