"""What is measured: an objective with its implementations and its problems, and the run over its shapes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.harness.measure import Truth, measure
from benchmarks.harness.registry import Peers
from benchmarks.harness.report import lines, write_json
from benchmarks.harness.yardstick import Yardstick


class Shape(Protocol):
    """A frozen dataclass of sizes (int), shares (float), switches (bool) and names (str), with `N` tokens in
    all.

    `str` gives what `--shapes` reads, and `report.sizes` prints the fields by their names. `GROWS` names the
    fields that grow with the batch, where they are others than `N`.
    """

    N: int


@dataclass(frozen=True)
class Problem:
    """One shape's fresh inputs and what is true of them."""

    arguments: tuple  # what every implementation is called with
    leaves: dict[str, Tensor]  # the tensors among them that get gradients
    truth: Truth
    yardstick: Yardstick


@dataclass(frozen=True)
class Goal:
    """What one of our own implementations is held to at a shape."""

    ratio: float | None  # time over the yardstick's
    extra_bytes: int  # peak memory beyond the budget and the gradients handed back


@dataclass(frozen=True)
class Objective:
    shapes: tuple[Shape, ...]
    quick_shapes: tuple[Shape, ...]
    parse: Callable[[str], Shape]
    peers: Peers
    problem: Callable[[Shape, torch.device, int], Problem]  # (shape, device, seed)
    goals: Callable[
        [Shape], dict[str, Goal]
    ]  # by the names of our own implementations, the same at every shape
    measure: Callable[..., tuple[dict, list[dict]]] = (
        measure  # the yardstick's numbers and the rows of a problem's calls
    )

    def run(
        self,
        document: dict,
        shapes: tuple[Shape, ...],
        device: torch.device,
        *,
        only: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
        seconds: float,
        out: Path | None,
        say: Callable[[str], None],
    ) -> dict:
        """Measures every shape and fills `document`, which is written to `out` after each one."""
        present, absent = self.peers.load(device, only, skip)
        document |= {"absent": absent, "sections": [], "complete": False}
        for name, reason in absent.items():
            say(f"absent: {name}: {reason}")
        exhausted: dict[str, Shape] = {}
        for index, shape in enumerate(shapes):
            # What ran out of memory on fewer tokens of the same problem is not tried on more.
            hopeless = {name for name, smaller in exhausted.items() if covers(smaller, shape)}
            losses = {name: loss for name, loss in present.items() if name not in hopeless}
            section = self.measure_shape(shape, losses, device, document["seed"] + index, seconds, say)
            section["rows"] += [
                {"name": name, "verdict": "out of memory"} for name in present if name in hopeless
            ]
            for row in section["rows"]:
                if row["verdict"] == "out of memory":
                    exhausted.setdefault(row["name"], shape)
            document["sections"].append(section)
            write_json(out, document)
            say("\n" + lines(section) + "\n")
        document["complete"] = True
        write_json(out, document)
        return document

    def measure_shape(
        self,
        shape: Shape,
        losses: dict[str, Callable],
        device: torch.device,
        seed: int,
        seconds: float,
        say: Callable[[str], None],
        yardstick: Callable[[Problem], Yardstick] = attrgetter("yardstick"),
    ) -> dict:
        """One section of the document: the yardstick, the true loss and a row for each of `losses`."""
        say(f"{shape}: inputs and fp32 truth")
        # Every shape gets fresh graphs: torch.compile keeps at most eight of one function and then runs it
        # uncompiled.
        torch.compiler.reset()
        problem = self.problem(shape, device, seed)
        calls = {name: partial(loss, *problem.arguments) for name, loss in losses.items()}
        bare, rows = self.measure(
            calls, problem.leaves, problem.truth, yardstick(problem), seconds=seconds, say=say
        )
        goals = self.goals(shape)
        for row in rows:
            if row["name"] in goals:
                judge(row, goals[row["name"]])
        return {"shape": asdict(shape), "yardstick": bare, "loss": problem.truth.loss, "rows": rows}

    def ours_failed(self, document: dict) -> list[str]:
        """Our own implementations that are absent, wrong or broken anywhere in the document."""
        ours = self.goals(self.shapes[0])
        rows = [row for section in document["sections"] for row in section["rows"]]
        broken = [
            f"{row['name']}: {row['verdict']}"
            for row in rows
            if row["name"] in ours and row["verdict"] != "ok"
        ]
        return broken + [f"{name}: {reason}" for name, reason in document["absent"].items() if name in ours]


def covers(smaller: Shape, shape: Shape) -> bool:
    batch = {name: getattr(shape, name) for name in getattr(shape, "GROWS", ("N",))}
    return (
        all(getattr(smaller, name) <= size for name, size in batch.items())
        and replace(smaller, **batch) == shape
    )


def judge(row: dict, goal: Goal) -> None:
    """Sets the goal beside what was measured."""
    if row["verdict"] != "ok":
        return
    if goal.ratio is not None:
        row["target"] = goal.ratio
        row["meets_target"] = row["ratio"] <= goal.ratio
    if row["beyond_gradients_bytes"] is not None:
        row["memory_limit_bytes"] = row["budget_bytes"] + goal.extra_bytes
        row["meets_memory_limit"] = row["beyond_gradients_bytes"] <= row["memory_limit_bytes"]
