"""Cross-entropy of a linear head: the problem (shapes, inputs, fp32 truth) and the runs over it."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from benchmarks.ce_peers import PEERS
from benchmarks.measure import Truth, measure
from benchmarks.report import ce_lines, write_json

IGNORE = -100


@dataclass(frozen=True)
class Shape:
    N: int
    H: int
    V: int
    ignored: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `NxHxV`, or `NxHxV@0.5` with half the labels ignored."""
        sizes, _, ignored = text.partition("@")
        try:
            N, H, V = (int(size) for size in sizes.split("x"))
            shape = cls(N, H, V, float(ignored or 0.0))
        except ValueError:
            shape = None
        if shape is None or min(shape.N, shape.H, shape.V) < 1 or not 0.0 <= shape.ignored < 1.0:
            raise ValueError(f"--shapes: expected NxHxV or NxHxV@IGNORED with 0 <= IGNORED < 1; got {text!r}.")
        return shape

    def __str__(self) -> str:
        return f"{self.N}x{self.H}x{self.V}" + (f"@{self.ignored:g}" if self.ignored else "")


# The shapes of ../shared/design.md with their targets: (default fp32 accumulation, accum_dtype=torch.bfloat16). The last one
# is held to the bare products over *all* its rows, of which half carry no label.
TARGETS = {
    Shape(8192, 4096, 128256): (1.08, 1.05),
    Shape(16384, 2048, 151936): (1.08, 1.06),
    Shape(8192, 2304, 256000): (1.10, 1.08),
    Shape(16384, 1024, 151936): (1.14, 1.10),
    Shape(16384, 4096, 128256, ignored=0.5): (0.55, 0.55),
}
SHAPES = tuple(TARGETS)
QUICK_SHAPES = (Shape(96, 32, 517), Shape(96, 32, 517, ignored=0.5))
OURS = ("logitless", "logitless, bf16 d_weight")

# The sweep against N: one head (Qwen-sized) and the implementations worth a line each.
SWEEP_H, SWEEP_V = 2048, 151936
SWEEP_NAMES = ("logitless", "eager, fp32 upcast", "Liger", "TRL ChunkedLogProb")


def sweep_shapes(max_tokens: int) -> tuple[Shape, ...]:
    """N = 1,024 and its doublings up to `max_tokens`."""
    return tuple(Shape(1024 * 2**k, SWEEP_H, SWEEP_V) for k in range(int(math.log2(max_tokens // 1024)) + 1))


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random bf16 leaves hidden (N, H) and weight (V, H), and targets (N,), like those of a trained model.

    Each row leans to its target and to a rival among 64 frequent tokens by random amounts, so that the loss is about 3 and
    half the rows give their target more than 0.5. On plain noise every probability is 1 / V, and a gradient that lacks its
    whole softmax term passes with an error of 8e-3 (at H = 4096); here it has one of 1.0.
    """
    random = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    N, H, V = shape.N, shape.H, shape.V
    weight = torch.randn(V, H, **random, dtype=torch.bfloat16).mul_(H**-0.5)
    targets = torch.randint(V, (N,), **random)
    frequent = min(64, V)
    rivals = torch.randint(frequent, (N,), **random) * (V // frequent)
    hidden = 0.5 * torch.randn(N, H, **random)
    for tokens, most in ((targets, 24.0), (rivals, 16.0)):
        hidden += most * torch.rand(N, 1, **random) * weight[tokens]
    ignored = torch.rand(N, **random) < shape.ignored
    # The first row always counts, so that a tiny shape has a loss.
    ignored[0] = False
    targets = targets.masked_fill(ignored, IGNORE)
    return hidden.bfloat16().requires_grad_(), weight.requires_grad_(), targets


@torch.no_grad()
def truth(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024) -> Truth:
    """Loss, d_hidden and d_weight from fp32 operands, a chunk of logits at a time, without TF32.

    With p = softmax(z): loss = mean(logsumexp(z) - z_y) and d_z = (p - onehot(y)) / count over the supervised rows.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    wide = weight.float()
    d_hidden = torch.zeros(hidden.shape, device=hidden.device)
    d_weight = torch.zeros(weight.shape, device=weight.device)
    total = torch.zeros((), device=hidden.device, dtype=torch.float64)
    supervised = (targets != IGNORE).nonzero().squeeze(1)
    for rows in supervised.split(chunk):
        x, y = hidden[rows].float(), targets[rows, None]
        z = x @ wide.t()
        lse = z.logsumexp(1, keepdim=True)
        total += (lse - z.gather(1, y)).double().sum()
        d_z = z.sub_(lse).exp_()
        d_z.scatter_add_(1, y, torch.full_like(lse, -1.0)).div_(len(supervised))
        d_hidden[rows] = d_z @ wide
        d_weight.addmm_(d_z.t(), x)
    torch.set_float32_matmul_precision(precision)
    return Truth(total.item() / len(supervised), {"hidden": d_hidden, "weight": d_weight})


def run(
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
    present, absent = PEERS.load(device, only, skip)
    document |= {"absent": absent, "sections": [], "complete": False}
    for name, reason in absent.items():
        say(f"absent: {name}: {reason}")
    exhausted: dict[str, Shape] = {}
    for index, shape in enumerate(shapes):
        # What ran out of memory on fewer tokens of the same head is not tried on more.
        hopeless = {name for name, smaller in exhausted.items() if covers(smaller, shape)}
        losses = {name: loss for name, loss in present.items() if name not in hopeless}
        section = measure_shape(shape, losses, device, document["seed"] + index, seconds, say)
        section["rows"] += [{"name": name, "verdict": "out of memory"} for name in present if name in hopeless]
        for row in section["rows"]:
            if row["verdict"] == "out of memory":
                exhausted.setdefault(row["name"], shape)
        document["sections"].append(section)
        write_json(out, document)
        say("\n" + ce_lines(section) + "\n")
    document["complete"] = True
    write_json(out, document)
    return document


def measure_shape(
    shape: Shape, losses: dict[str, Callable], device: torch.device, seed: int, seconds: float, say: Callable[[str], None]
) -> dict:
    """One section of the document: the yardstick, the true loss and a row for each of `losses`."""
    say(f"{shape}: inputs and fp32 truth")
    # Every shape gets fresh graphs: torch.compile keeps at most eight of one function and then runs it uncompiled.
    torch.compiler.reset()
    hidden, weight, targets = inputs(shape, device, seed)
    reference = truth(hidden, weight, targets)
    calls = {name: partial(loss, hidden, weight, targets) for name, loss in losses.items()}
    bare, rows = measure(calls, {"hidden": hidden, "weight": weight}, reference, seconds=seconds, say=say)
    for row in rows:
        judge(row, shape)
    return {"shape": asdict(shape), "yardstick": bare, "loss": reference.loss, "rows": rows}


def covers(smaller: Shape, shape: Shape) -> bool:
    return (smaller.H, smaller.V) == (shape.H, shape.V) and smaller.N <= shape.N


def judge(row: dict, shape: Shape) -> None:
    """Sets our rows' targets beside what was measured: the ratio of design.md, and budget + d_hidden + fp32 d_weight."""
    if row["name"] not in OURS or row["verdict"] != "ok":
        return
    if shape in TARGETS:
        row["target"] = TARGETS[shape][OURS.index(row["name"])]
        row["meets_target"] = row["ratio"] <= row["target"]
    if row["beyond_gradients_bytes"] is not None:
        fp32_d_weight = 4 * shape.V * shape.H if row["name"] == OURS[0] else 0
        row["memory_limit_bytes"] = row["budget_bytes"] + 2 * shape.N * shape.H + fp32_d_weight
        row["meets_memory_limit"] = row["beyond_gradients_bytes"] <= row["memory_limit_bytes"]


def ours_failed(document: dict) -> list[str]:
    """Our own implementations that are absent, wrong or broken anywhere in the document."""
    rows = [row for section in document["sections"] for row in section["rows"]]
    broken = [f"{row['name']}: {row['verdict']}" for row in rows if row["name"] in OURS and row["verdict"] != "ok"]
    return broken + [f"{name}: {reason}" for name, reason in document["absent"].items() if name in OURS]
