"""GRPO of one batch of completions: the problem (shapes, inputs, fp32 truth)."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from benchmarks.harness.objective import Goal, Objective, Problem
from benchmarks.losses import ce
from benchmarks.losses.preference import one_gemm, token_numbers, truth
from benchmarks.peers.policy import PEERS, grpo


@dataclass(frozen=True)
class Shape:
    sequences: int
    T: int
    H: int
    V: int
    frozen_head: bool = False

    GROWS: ClassVar = ("sequences", "T")

    @property
    def N(self) -> int:
        return self.sequences * self.T

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `BxTxHxV`, B sequences of T tokens, or `BxTxHxV@frozen`."""
        sizes, at, word = text.partition("@")
        try:
            B, T, H, V = (int(size) for size in sizes.split("x"))
            shape = cls(B, T, H, V, frozen_head=bool(at))
        except ValueError:
            shape = None
        if shape is None or min(shape.sequences, shape.T, shape.H, shape.V) < 1 or (at and word != "frozen"):
            raise ValueError(f"--shapes: expected BxTxHxV or BxTxHxV@frozen; got {text!r}.")
        return shape

    def __str__(self) -> str:
        return f"{self.sequences}x{self.T}x{self.H}x{self.V}" + ("@frozen" if self.frozen_head else "")


# The shape of design.md with its targets in GEMM-equivalents.
TARGETS = {Shape(16, 1024, 2048, 151936): 3.25, Shape(16, 1024, 2048, 151936, frozen_head=True): 2.15}
SHAPES = tuple(TARGETS)
QUICK_SHAPES = (Shape(4, 96, 128, 517), Shape(4, 96, 128, 517, frozen_head=True))

# Log-ratios of the tokens that stay within the clip range, and of the fifth that leave it on either side.
# None lies within 0.1 of its ends, log 0.8 and log 1.2: bf16 logits put up to 0.06 on a log-probability, and
# a token that crosses an end loses its gradient.
NEAR, FAR, LEAVING = 0.05, 0.5, 0.2


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random bf16 leaves hidden (B, T, H) and weight (V, H), and targets (B, T), those of cross-entropy."""
    hidden, weight, targets = ce.inputs(ce.Shape(shape.N, shape.H, shape.V), device, seed)
    batch = shape.sequences, shape.T
    return (
        hidden.detach().view(*batch, -1).requires_grad_(),
        weight.requires_grad_(not shape.frozen_head),
        targets.view(batch),
    )


def sampled(logps: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Advantages (B,), and log-probabilities (B, T) of the policy that sampled the tokens, from their true
    ones."""
    random = {"generator": torch.Generator(logps.device).manual_seed(seed), "device": logps.device}
    log_ratios = NEAR * (2 * torch.rand(logps.shape, **random) - 1)
    leaving = torch.rand(logps.shape, **random) < LEAVING
    log_ratios += FAR * leaving * (2 * torch.randint(2, logps.shape, **random) - 1)
    # Of both signs, but not of mean 0: the loss would be close to 0, and its relative error would mean
    # nothing.
    advantages = torch.linspace(-0.9, 2.1, len(logps), device=logps.device)
    return advantages, logps - log_ratios


def problem(shape: Shape, device: torch.device, seed: int) -> Problem:
    hidden, weight, targets = inputs(shape, device, seed)
    logps, lse = token_numbers(hidden, weight, targets)
    advantages, old_logps = sampled(logps, seed)
    found = truth(lambda logps: grpo(logps, advantages, old_logps), logps, lse, hidden, weight, targets)
    leaves = {"hidden": hidden} | ({} if shape.frozen_head else {"weight": weight})
    return Problem((hidden, weight, targets, advantages, old_logps), leaves, found, one_gemm(hidden, weight))


def goals(shape: Shape) -> dict[str, Goal]:
    """The counts of design.md for the defaults, and memory of d_hidden and of the fp32 sum of d_weight."""
    extra = 2 * shape.N * shape.H + (0 if shape.frozen_head else 4 * shape.V * shape.H)
    return {"logitless": Goal(TARGETS.get(shape), extra), "logitless, fp32 logits": Goal(None, extra)}


POLICY = Objective(SHAPES, QUICK_SHAPES, Shape.parse, PEERS, problem, goals)
