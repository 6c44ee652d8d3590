"""Preference losses, ORPO and DPO with a reference: the problem (shapes, inputs, fp32 truth).

What any loss of token log-probabilities needs is here as well: its truth (`token_numbers`, `truth`) and its
yardstick (`one_gemm`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.measure import Truth, exact_products
from benchmarks.harness.objective import Goal, Objective, Problem
from benchmarks.harness.timing import Case
from benchmarks.harness.yardstick import Yardstick, yardstick
from benchmarks.peers.preference import PEERS, dpo, orpo


@dataclass(frozen=True)
class Shape:
    loss: str
    pairs: int
    T: int
    H: int
    V: int
    frozen_head: bool = False

    GROWS: ClassVar = ("pairs", "T")

    @property
    def N(self) -> int:
        return 2 * self.pairs * self.T

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `orpo:PAIRSxTxHxV` or `dpo:PAIRSxTxHxV`, T tokens in each sequence, and either with
        `@frozen`."""
        name, _, rest = text.partition(":")
        sizes, at, word = rest.partition("@")
        try:
            pairs, T, H, V = (int(size) for size in sizes.split("x"))
            shape = cls(name.upper(), pairs, T, H, V, frozen_head=bool(at))
        except ValueError:
            shape = None
        known = (
            shape is not None
            and shape.loss in ("ORPO", "DPO")
            and min(shape.pairs, shape.T, shape.H, shape.V) > 0
        )
        if not known or (at and word != "frozen"):
            raise ValueError(
                f"--shapes: expected orpo:PAIRSxTxHxV or dpo:PAIRSxTxHxV, or either with @frozen; got "
                f"{text!r}."
            )
        return shape

    def __str__(self) -> str:
        return f"{self.loss.lower()}:{self.pairs}x{self.T}x{self.H}x{self.V}" + (
            "@frozen" if self.frozen_head else ""
        )


# The shapes of design.md with their targets in GEMM-equivalents, and ORPO with a frozen head, for which it
# names none.
TARGETS = {
    Shape("ORPO", 32, 1024, 768, 128256): 3.6,
    Shape("ORPO", 32, 1024, 768, 128256, frozen_head=True): None,
    Shape("DPO", 4, 2048, 4096, 128256): 4.3,
    Shape("DPO", 4, 2048, 4096, 128256, frozen_head=True): 3.2,
}
SHAPES = tuple(TARGETS)
QUICK_SHAPES = tuple(
    Shape(loss, 3, 32, 128, 517, frozen_head=frozen) for loss in ("ORPO", "DPO") for frozen in (False, True)
)

# ORPO against the batch, as in Liger's paper.
BATCH_SHAPES = tuple(Shape("ORPO", pairs, 1024, 768, 128256) for pairs in (32, 64, 128))
QUICK_BATCH_SHAPES = tuple(Shape("ORPO", pairs, 32, 128, 517) for pairs in (2, 4))
# DPO of one pair against its length, and who runs it: full logits are out of memory early.
QUICK_LENGTH_SHAPES = tuple(Shape("DPO", 1, T, 128, 517) for T in (64, 128))
LENGTH_NAMES = ("logitless", "Liger", "TRL ChunkedLogProb")


def length_shapes(max_length: int) -> tuple[Shape, ...]:
    """One pair of T = 1,024 tokens each, and its doublings up to `max_length`."""
    return tuple(Shape("DPO", 1, 1024 << k, 4096, 128256) for k in range((max_length // 1024).bit_length()))


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Random bf16 leaves hidden (2B, T, H) and weight (V, H), targets (2B, T), and for DPO ref_hidden,
    ref_weight of the same shapes.

    As in cross-entropy's inputs, each row leans to its target and to a rival among 64 frequent tokens by
    random amounts. The policy leans more to the tokens of rejected sequences, so that an error in their share
    of ORPO's gradient, otherwise a twentieth, is too large to miss.

    The reference model has different noise and the same leanings. Of every second pair, beginning with the
    first, it prefers the chosen sequence by far: the sigmoid of these pairs is saturated. Rounding the logits
    to bf16 changes a log-probability by 0.01, and so the sigmoid of a pair of 2,048 tokens by 0.08. The
    saturated pairs make the loss large: without them, correct results would exceed the limit of its error.
    """
    random = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    B, T, H, V = shape.pairs, shape.T, shape.H, shape.V
    targets = torch.randint(V, (2 * B, T), **random)
    frequent = min(64, V)
    rivals = torch.randint(frequent, (2 * B, T), **random) * (V // frequent)
    lean, rival_lean = (most * torch.rand(2 * B, T, 1, **random) for most in (24.0, 16.0))
    lean[B:] = 12.0 + lean[B:] / 2
    preferred = lean.clone()
    preferred[:B:2] += 6.0

    def model(lean: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.randn(V, H, **random, dtype=torch.bfloat16).mul_(H**-0.5)
        hidden = 0.5 * torch.randn(2 * B, T, H, **random)
        for tokens, amounts in ((targets, lean), (rivals, rival_lean)):
            hidden += amounts * weight[tokens]
        return hidden.bfloat16(), weight

    hidden, weight = model(lean)
    reference = model(preferred) if shape.loss == "DPO" else ()
    return hidden.requires_grad_(), weight.requires_grad_(not shape.frozen_head), targets, *reference


@torch.no_grad()
def token_numbers(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and log-sum-exps of the targets, in their shape, from fp32 operands a chunk at a
    time, without TF32."""
    wide, lse, picked = weight.float(), [], []
    with exact_products():
        for x, y in zip(hidden.flatten(0, -2).split(chunk), targets.flatten().split(chunk), strict=True):
            z = x.float() @ wide.t()
            lse.append(z.logsumexp(1))
            picked.append(z.gather(1, y[:, None]).squeeze(1))
    lse = torch.cat(lse)
    return (torch.cat(picked) - lse).view(targets.shape), lse.view(targets.shape)


def truth(
    loss: Callable[[Tensor], Tensor],  # of fp64 log-probabilities in the targets' shape
    logps: Tensor,
    lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = 1024,
) -> Truth:
    """Loss and gradients from `token_numbers` and a second projection: with g = d loss / d log p, d_z = g
    (onehot(y) - softmax(z))."""
    known = logps.double().requires_grad_()
    value = loss(known)
    g = torch.autograd.grad(value, known)[0].float()
    wide = weight.detach().float()
    d_hidden = []
    d_weight = torch.zeros(weight.shape, device=weight.device) if weight.requires_grad else None
    rows = (hidden.detach().flatten(0, -2), *(x.flatten()[:, None] for x in (targets, lse, g)))
    with torch.no_grad(), exact_products():
        for x, y, top, slope in zip(*(numbers.split(chunk) for numbers in rows), strict=True):
            x = x.float()
            d_z = (x @ wide.t()).sub_(top).exp_().mul_(-slope).scatter_add_(1, y, slope)
            d_hidden.append(d_z @ wide)
            if d_weight is not None:
                d_weight.addmm_(d_z.t(), x)
    gradients = {"hidden": torch.cat(d_hidden).view(hidden.shape)} | (
        {} if d_weight is None else {"weight": d_weight}
    )
    return Truth(value.item(), gradients)


def one_gemm(hidden: Tensor, weight: Tensor) -> Yardstick:
    """`hidden @ weight.T` alone, in the chunks of the other yardsticks: what these losses are counted in,
    however many they need."""
    hidden, weight = hidden.detach().flatten(0, -2), weight.detach()

    def product(chunk: int) -> Case:
        def prepare():
            logits = hidden.new_empty(chunk, len(weight))

            def run() -> None:
                for rows in hidden.split(chunk):
                    torch.mm(rows, weight.t(), out=logits[: len(rows)])

            return run

        return prepare

    chunks = yardstick(hidden, weight).cases
    return Yardstick(
        "one bare GEMM", {chunk: product(chunk) for chunk in chunks}, 2 * len(hidden) * weight.numel()
    )


def problem(shape: Shape, device: torch.device, seed: int) -> Problem:
    arguments = hidden, weight, targets, *reference = inputs(shape, device, seed)
    logps, lse = token_numbers(hidden, weight, targets)
    # `token_numbers` of (ref_hidden, ref_weight); DPO is the one that has them.
    ref_logps = [token_numbers(*reference, targets)[0].double()] if reference else []
    found = truth(
        lambda logps: (dpo if reference else orpo)(logps, *ref_logps), logps, lse, hidden, weight, targets
    )
    leaves = {"hidden": hidden} | ({} if shape.frozen_head else {"weight": weight})
    return Problem(arguments, leaves, found, one_gemm(hidden, weight))


def goals(shape: Shape) -> dict[str, Goal]:
    """The count of design.md, and memory of d_hidden and of the fp32 sum of d_weight."""
    fp32_d_weight = 0 if shape.frozen_head else 4 * shape.V * shape.H
    return {"logitless": Goal(TARGETS.get(shape), 2 * shape.N * shape.H + fp32_d_weight)}


PREFERENCE = Objective(SHAPES, QUICK_SHAPES, Shape.parse, PEERS, problem, goals)


def by_token(document: dict) -> str:
    """All shapes in one table: time per token, throughput, memory, and how our own plan changed on the
    way."""
    body = []
    for section in document["sections"]:
        shape = Shape(**section["shape"])
        for row in section["rows"]:
            beyond, limit = (
                report.gib(row.get(name)) for name in ("beyond_gradients_bytes", "memory_limit_bytes")
            )
            within = {True: "yes", False: "NO", None: None}[row.get("meets_memory_limit")]
            measured = row["verdict"] == "ok"
            body.append(
                [
                    f"{shape.pairs} x {shape.T:,}",
                    row["name"],
                    f"{1e3 * row['ms'] / shape.N:.2f}" if measured else row["verdict"],
                    f"{1e3 * shape.N / row['ms']:,.0f}" if measured else None,
                    *(
                        report.text(number, "{:.2f}")
                        for number in (report.gib(row.get("peak_bytes")), beyond, limit)
                    ),
                    within,
                    row.get("plan"),
                ]
            )
    headers = ["pairs x T", "", "us/token", "tokens/s", "peak GiB", "beyond grads", "limit", "within", "plan"]
    return tabulate(body, headers, disable_numparse=True, colalign=("right", "left", *["right"] * 6, "left"))
