"""Distillation through two linear heads, by the Jensen-Shannon divergence: the problem (shapes, inputs, fp32
truth)."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from benchmarks.harness.measure import Truth, exact_products
from benchmarks.harness.objective import Goal, Objective, Problem
from benchmarks.harness.yardstick import yardstick
from benchmarks.peers.distillation import PEERS


@dataclass(frozen=True)
class Shape:
    N: int
    H: int
    teacher_H: int
    V: int
    frozen_head: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `NxHxTxV` with T the teacher's hidden size, or `NxHxTxV@frozen`."""
        sizes, at, word = text.partition("@")
        try:
            N, H, teacher_H, V = (int(size) for size in sizes.split("x"))
            shape = cls(N, H, teacher_H, V, frozen_head=bool(at))
        except ValueError:
            shape = None
        if shape is None or min(shape.N, shape.H, shape.teacher_H, shape.V) < 1 or (at and word != "frozen"):
            raise ValueError(f"--shapes: expected NxHxTxV or NxHxTxV@frozen; got {text!r}.")
        return shape

    def __str__(self) -> str:
        return f"{self.N}x{self.H}x{self.teacher_H}x{self.V}" + ("@frozen" if self.frozen_head else "")


# The shape of design.md with its target, and the same with a frozen head, for which it names none.
TARGETS = {Shape(8192, 2048, 4096, 151936): 1.22, Shape(8192, 2048, 4096, 151936, frozen_head=True): None}
SHAPES = tuple(TARGETS)
QUICK_SHAPES = (Shape(96, 32, 48, 517), Shape(96, 32, 48, 517, frozen_head=True))


def length_shapes(max_tokens: int) -> tuple[Shape, ...]:
    """The design's shape with N growing fourfold from 8,192."""
    sizes = itertools.takewhile(lambda N: N <= max_tokens, (SHAPES[0].N << 2 * k for k in itertools.count()))
    return tuple(replace(SHAPES[0], N=N) for N in sizes)


# Of what makes a token's distribution peaked, the student shares this much with its teacher.
AGREEMENT = 0.7


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random bf16 hidden states and heads, (N, H), (V, H) of the student and (N, T), (V, T) of the teacher,
    as if both were trained.

    As in cross-entropy's inputs, each row leans to one token and to a rival among 64 frequent ones by random
    amounts. The amounts of both models mostly agree: two thirds of the rows give one token a probability
    above 0.5, and the divergence is about 0.1. Inputs of plain noise would give two nearly uniform
    distributions, whose log ratio is small everywhere, so that its mean, the one term of the gradient that
    needs the whole row, would hardly matter.
    """
    random = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    N, V = shape.N, shape.V
    targets = torch.randint(V, (N,), **random)
    frequent = min(64, V)
    rivals = torch.randint(frequent, (N,), **random) * (V // frequent)
    leanings = [
        (tokens, most, torch.rand(N, 1, **random)) for tokens, most in ((targets, 24.0), (rivals, 16.0))
    ]

    models = []
    for H in (shape.H, shape.teacher_H):
        weight = torch.randn(V, H, **random, dtype=torch.bfloat16).mul_(H**-0.5)
        hidden = 0.5 * torch.randn(N, H, **random)
        for tokens, most, shared in leanings:
            hidden += most * torch.lerp(torch.rand(N, 1, **random), shared, AGREEMENT) * weight[tokens]
        models += [hidden.bfloat16(), weight]
    return models[0].requires_grad_(), models[1].requires_grad_(not shape.frozen_head), *models[2:]


@torch.no_grad()
def truth(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, chunk: int = 512
) -> Truth:
    """Loss, d_hidden and, with a trainable head, d_weight from fp32 operands, a chunk of logits at a time,
    without TF32.

    With s and t the two distributions, m their mean and d = log s - log m:
    loss = mean(KL(t||m) + KL(s||m)) / 2 and d_z = s (d - KL(s||m)) / 2N.
    """
    N = len(hidden)
    wide, teacher_wide = weight.float(), teacher_weight.float()
    d_hidden = torch.zeros(hidden.shape, device=hidden.device)
    d_weight = torch.zeros(weight.shape, device=weight.device) if weight.requires_grad else None
    total = torch.zeros((), device=hidden.device, dtype=torch.float64)
    with exact_products():
        for start in range(0, N, chunk):
            span = slice(start, start + chunk)
            x = hidden[span].float()
            log_s = (x @ wide.t()).log_softmax(1)
            log_t = (teacher_hidden[span].float() @ teacher_wide.t()).log_softmax(1)
            log_m = torch.logaddexp(log_s, log_t).sub_(math.log(2))
            s, d = log_s.exp(), log_s.sub_(log_m)
            kl = (s * d).sum(1, keepdim=True)
            total += (kl.squeeze(1) + (log_t.exp() * log_t.sub(log_m)).sum(1)).double().sum()
            d_z = s.mul_(d.sub_(kl)).div_(2 * N)
            d_hidden[span] = d_z @ wide
            if d_weight is not None:
                d_weight.addmm_(d_z.t(), x)
    gradients = {"hidden": d_hidden} | ({} if d_weight is None else {"weight": d_weight})
    return Truth(total.item() / (2 * N), gradients)


def problem(shape: Shape, device: torch.device, seed: int) -> Problem:
    hidden, weight, *teacher = arguments = inputs(shape, device, seed)
    leaves = {"hidden": hidden} | ({} if shape.frozen_head else {"weight": weight})
    return Problem(
        arguments,
        leaves,
        truth(*arguments),
        yardstick(hidden, weight, constant=(tuple(teacher),), frozen=shape.frozen_head),
    )


def goals(shape: Shape) -> dict[str, Goal]:
    """The ratio of design.md, and memory of d_hidden and of the fp32 sum of d_weight."""
    fp32_d_weight = 0 if shape.frozen_head else 4 * shape.V * shape.H
    return {"logitless": Goal(TARGETS.get(shape), 2 * shape.N * shape.H + fp32_d_weight)}


DISTILLATION = Objective(SHAPES, QUICK_SHAPES, Shape.parse, PEERS, problem, goals)
