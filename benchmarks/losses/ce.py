"""Cross-entropy of a linear head: the problem (shapes, inputs, fp32 truth)."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from benchmarks.harness.measure import Truth, exact_products
from benchmarks.harness.objective import Goal, Objective, Problem
from benchmarks.harness.yardstick import yardstick
from benchmarks.peers.ce import FP32_LOGITS, PEERS, PORTABLE

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
            raise ValueError(
                f"--shapes: expected NxHxV or NxHxV@IGNORED with 0 <= IGNORED < 1; got {text!r}."
            )
        return shape

    def __str__(self) -> str:
        return f"{self.N}x{self.H}x{self.V}" + (f"@{self.ignored:g}" if self.ignored else "")


# The shapes with their targets: (default fp32 accumulation, accum_dtype=torch.bfloat16). The one with ignored
# labels is held to the bare products over *all* its rows, of which half carry no label.
TARGETS = {
    Shape(8192, 4096, 128256): (1.08, 1.05),
    Shape(16384, 2048, 151936): (1.08, 1.06),
    Shape(8192, 2304, 256000): (1.10, 1.08),
    Shape(16384, 1024, 151936): (1.14, 1.10),
    Shape(16384, 4096, 128256, ignored=0.5): (0.55, 0.55),
}
SHAPES = tuple(TARGETS)
# Measured without a target: shapes that users of TRL ask about, and batches of few tokens.
LARGE = 8192
MEASURED = (
    *SHAPES,
    Shape(8192, 4096, 151936),
    Shape(16384, 2048, 248320),
    *(Shape(N, 2048, 151936) for N in (256, 512, 2048)),
)
QUICK_SHAPES = (Shape(96, 32, 517), Shape(96, 32, 517, ignored=0.5))

# On a CPU, where a full shape would take minutes.
CPU_SHAPE = Shape(2048, 1024, 32000)

# The sweep against N: one head (Qwen-sized) and the implementations worth a line each.
SWEEP_H, SWEEP_V = 2048, 151936
SWEEP_NAMES = (
    "logitless",
    "eager, fp32 upcast",
    "torch.compile",
    "Liger",
    "TRL ChunkedLogProb",
    "CCE (filtered)",
    "QuACK, chunks of 8,192",
)


def sweep_shapes(max_tokens: int) -> tuple[Shape, ...]:
    """N = 1,024 and its doublings up to `max_tokens`."""
    return tuple(Shape(1024 * 2**k, SWEEP_H, SWEEP_V) for k in range(int(math.log2(max_tokens // 1024)) + 1))


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random bf16 leaves hidden (N, H) and weight (V, H), and targets (N,), like those of a trained model.

    Each row leans to its target and to a rival among 64 frequent tokens by random amounts, so that the loss
    is about 3 and half the rows give their target more than 0.5. On plain noise every probability is 1 / V,
    and a gradient that lacks its whole softmax term passes with an error of 8e-3 (at H = 4096); here it has
    one of 1.0.
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

    With p = softmax(z): loss = mean(logsumexp(z) - z_y) and d_z = (p - onehot(y)) / count over the supervised
    rows.
    """
    wide = weight.float()
    d_hidden = torch.zeros(hidden.shape, device=hidden.device)
    d_weight = torch.zeros(weight.shape, device=weight.device)
    total = torch.zeros((), device=hidden.device, dtype=torch.float64)
    supervised = (targets != IGNORE).nonzero().squeeze(1)
    with exact_products():
        for rows in supervised.split(chunk):
            x, y = hidden[rows].float(), targets[rows, None]
            z = x @ wide.t()
            lse = z.logsumexp(1, keepdim=True)
            total += (lse - z.gather(1, y)).double().sum()
            d_z = z.sub_(lse).exp_()
            d_z.scatter_add_(1, y, torch.full_like(lse, -1.0)).div_(len(supervised))
            d_hidden[rows] = d_z @ wide
            d_weight.addmm_(d_z.t(), x)
    return Truth(total.item() / len(supervised), {"hidden": d_hidden, "weight": d_weight})


def problem(shape: Shape, device: torch.device, seed: int) -> Problem:
    hidden, weight, targets = inputs(shape, device, seed)
    leaves = {"hidden": hidden, "weight": weight}
    return Problem(
        (hidden, weight, targets), leaves, truth(hidden, weight, targets), yardstick(hidden, weight)
    )


def goals(shape: Shape) -> dict[str, Goal]:
    """The ratios of design.md, and memory of d_hidden and of d_weight where it is summed in fp32."""
    fp32, bf16 = TARGETS.get(shape, (None, None))
    d_hidden, fp32_d_weight = 2 * shape.N * shape.H, 4 * shape.V * shape.H
    return {
        "logitless": Goal(fp32, d_hidden + fp32_d_weight),
        "logitless, bf16 d_weight": Goal(bf16, d_hidden),
    }


def portable_goals(shape: Shape) -> dict[str, Goal]:
    """The memory of `goals`, for each dtype of the logits; no ratio."""
    memory = replace(goals(shape)["logitless"], ratio=None)
    return dict.fromkeys(("logitless", FP32_LOGITS), memory)


CE = Objective(MEASURED, QUICK_SHAPES, Shape.parse, PEERS, problem, goals)
CE_PORTABLE = Objective(SHAPES[:2], QUICK_SHAPES[:1], Shape.parse, PORTABLE, problem, portable_goals)


def by_table(document: dict) -> dict[str, dict]:
    """The document's shapes by the table that shows them: large batches, few tokens, ignored labels."""
    sections: dict[str, list[dict]] = {"ce": [], "ce-few": [], "ce-ignored": []}
    for section in document["sections"]:
        shape = section["shape"]
        name = "ce-ignored" if shape["ignored"] else "ce" if shape["N"] >= LARGE else "ce-few"
        sections[name].append(section)
    return {name: document | {"sections": found} for name, found in sections.items() if found}
