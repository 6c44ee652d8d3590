"""The loss of a speculative-decoding draft of several steps, by the forward KL divergence from its verifier:
the problem (shapes, inputs, fp32 truth)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from benchmarks.harness.measure import Truth, exact_products
from benchmarks.harness.objective import Goal, Objective, Problem
from benchmarks.harness.timing import Case
from benchmarks.harness.yardstick import Yardstick, yardstick
from benchmarks.peers.speculators import PEERS, pairs


@dataclass(frozen=True)
class Shape:
    steps: int
    N: int  # tokens
    H: int  # hidden size of the draft and of its verifier
    D: int  # ids of the draft, to which the verifier's head is cut
    frozen_head: bool = False

    GROWS: ClassVar = ("steps", "N")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `STEPSxNxHxD` or `STEPSxNxHxD@frozen`."""
        sizes, at, word = text.partition("@")
        try:
            steps, N, H, D = (int(size) for size in sizes.split("x"))
            shape = cls(steps, N, H, D, frozen_head=bool(at))
        except ValueError:
            shape = None
        # The last step looks steps + 1 tokens ahead.
        if shape is None or min(steps, H, D) < 1 or N < steps + 2 or (at and word != "frozen"):
            raise ValueError(
                f"--shapes: expected STEPSxNxHxD or STEPSxNxHxD@frozen with N >= STEPS + 2; got {text!r}."
            )
        return shape

    def __str__(self) -> str:
        return f"{self.steps}x{self.N}x{self.H}x{self.D}" + ("@frozen" if self.frozen_head else "")


# Drafts with ids of their own and with all ids, and the head that the speculators package freezes.
SHAPES = (
    *(Shape(steps, 8192, 4096, D) for D in (32000, 151936) for steps in (3, 7)),
    *(Shape(steps, 8192, 4096, 32000, frozen_head=True) for steps in (3, 7)),
)
QUICK_SHAPES = (Shape(3, 96, 32, 517), Shape(7, 96, 32, 517, frozen_head=True))
# Of what makes a token's distribution peaked, a step of the draft shares this much with its verifier.
AGREEMENT = 0.7


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Random bf16 hidden states and heads, as if both models were trained: of the draft (N, H) per step and
    (D, H), and of the verifier (N, H) and (D, H).

    As in distillation's inputs, each row of the verifier leans to one token and to a rival among 64 frequent
    ones by random amounts. The row of the draft that is compared with it leans to the same tokens, by amounts
    that mostly agree.
    """
    random = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    N, H, D = shape.N, shape.H, shape.D
    frequent = min(64, D)
    tokens = torch.randint(D, (N,), **random)
    rivals = torch.randint(frequent, (N,), **random) * (D // frequent)
    leanings = [(ids, most, torch.rand(N, 1, **random)) for ids, most in ((tokens, 24.0), (rivals, 16.0))]

    def head() -> Tensor:
        return torch.randn(D, H, **random, dtype=torch.bfloat16).mul_(H**-0.5)

    def states(weight: Tensor, ahead: int) -> Tensor:
        """Row i leans as row i + ahead of the verifier."""
        hidden = 0.5 * torch.randn(N, H, **random)
        for ids, most, shared in leanings:
            amounts = torch.lerp(torch.rand(N, 1, **random), shared.roll(-ahead, 0), AGREEMENT)
            hidden += most * amounts * weight[ids.roll(-ahead)]
        return hidden.bfloat16()

    weight, verifier_weight = head(), head()
    hiddens = [states(weight, 1 + k).requires_grad_() for k in range(shape.steps)]
    verifier_hidden = states(verifier_weight, 0)
    return hiddens, weight.requires_grad_(not shape.frozen_head), verifier_hidden, verifier_weight


@torch.no_grad()
def truth(
    hiddens: list[Tensor],
    weight: Tensor,
    verifier_hidden: Tensor,
    verifier_weight: Tensor,
    chunk: int = 512,
) -> Truth:
    """Loss and gradients from fp32 operands, a chunk of logits at a time, without TF32.

    With q and p the distributions of draft and verifier, loss = sum over steps of mean KL(p||q), and in a
    step of n pairs d_z = (q - p) / n.
    """
    wide, verifier_wide = weight.float(), verifier_weight.float()
    d_weight = torch.zeros_like(wide) if weight.requires_grad else None
    gradients = {}
    total = torch.zeros((), device=weight.device, dtype=torch.float64)
    with exact_products():
        for k, hidden in enumerate(hiddens):
            x, taught = pairs(k, hidden, verifier_hidden)
            d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
            for start in range(0, len(x), chunk):
                span = slice(start, start + chunk)
                rows = x[span].float()
                log_q = (rows @ wide.t()).log_softmax(1)
                log_p = (taught[span].float() @ verifier_wide.t()).log_softmax(1)
                total += (log_p.exp() * (log_p - log_q)).sum(1).double().sum() / len(x)
                d_z = log_q.exp_().sub_(log_p.exp_()).div_(len(x))
                d_hidden[start : start + len(rows)] = d_z @ wide
                if d_weight is not None:
                    d_weight.addmm_(d_z.t(), rows)
            gradients[f"hidden_{k}"] = d_hidden
    if d_weight is not None:
        gradients["weight"] = d_weight
    return Truth(total.item(), gradients)


def products(
    hiddens: list[Tensor], weight: Tensor, verifier_hidden: Tensor, verifier_weight: Tensor, *, frozen: bool
) -> Yardstick:
    """Three products of every step, two with a frozen head, and one of the verifier for all steps."""
    stacked = torch.cat([hidden.detach() for hidden in hiddens])
    bare = yardstick(stacked, weight, frozen=frozen)

    def with_verifier(case: Case, chunk: int) -> Case:
        def prepare():
            of_draft = case()
            logits = verifier_hidden.new_empty(min(chunk, len(verifier_hidden)), len(verifier_weight))

            def run() -> None:
                of_draft()
                for rows in verifier_hidden.split(len(logits)):
                    torch.mm(rows, verifier_weight.t(), out=logits[: len(rows)])

            return run

        return prepare

    cases = {chunk: with_verifier(case, chunk) for chunk, case in bare.cases.items()}
    count = (2 if frozen else 3) * len(hiddens) + 1
    flops = bare.flops + 2 * len(verifier_hidden) * verifier_weight.numel()
    return replace(bare, name=f"{count} bare GEMMs", cases=cases, flops=flops)


def leaves_of(hiddens: list[Tensor], weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    for k, hidden in enumerate(hiddens):
        yield f"hidden_{k}", hidden
    if weight.requires_grad:
        yield "weight", weight


def problem(shape: Shape, device: torch.device, seed: int) -> Problem:
    arguments = hiddens, weight, *_ = inputs(shape, device, seed)
    bare = products(*arguments, frozen=shape.frozen_head)
    return Problem(arguments, dict(leaves_of(hiddens, weight)), truth(*arguments), bare)


def goals(shape: Shape) -> dict[str, Goal]:
    """Memory of the steps' hidden states as one tensor, of its gradient, and of the fp32 sum of d_weight."""
    stacked = 2 * shape.steps * shape.N * shape.H
    fp32_d_weight = 0 if shape.frozen_head else 4 * shape.D * shape.H
    return {"logitless": Goal(None, 2 * stacked + fp32_d_weight)}


SPECULATORS = Objective(SHAPES, QUICK_SHAPES, Shape.parse, PEERS, problem, goals)
