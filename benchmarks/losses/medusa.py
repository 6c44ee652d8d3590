"""Medusa heads over the tokens of one sequence: the problem (shapes, inputs, fp32 truth), and a way to
measure it in few calls.

Stage 1 trains the heads alone, stage 2 the hidden states and the base head too. The lengths are those of
figures 17 and 18 of Liger's paper. A call takes up to a second, and there are two dozen shapes: hence
`measure` here.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.measure import (
    Truth,
    backward_case,
    check,
    clear,
    describe_check,
    device_of,
    exact_products,
    loss_of,
    poison,
    sound,
)
from benchmarks.harness.objective import Goal, Objective, Problem
from benchmarks.harness.timing import Case, interleave, release, spread
from benchmarks.harness.yardstick import Yardstick
from benchmarks.losses.preference import one_gemm
from benchmarks.peers.medusa import PEERS, terms


@dataclass(frozen=True)
class Shape:
    heads: int
    stage: int
    T: int
    H: int
    V: int

    # Stage 2 needs more memory than stage 1.
    GROWS: ClassVar = ("heads", "stage", "T")

    @property
    def N(self) -> int:
        return self.T

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `HEADSxTxHxV@STAGE`."""
        sizes, _, stage = text.partition("@")
        try:
            heads, T, H, V = (int(size) for size in sizes.split("x"))
            shape = cls(heads, int(stage), T, H, V)
        except ValueError:
            shape = None
        # The last head looks heads + 1 tokens ahead.
        if shape is None or min(heads, H, V) < 1 or T < heads + 2 or shape.stage not in (1, 2):
            raise ValueError(
                f"--shapes: expected HEADSxTxHxV@STAGE with T >= HEADS + 2 and STAGE 1 or 2; got {text!r}."
            )
        return shape

    def __str__(self) -> str:
        return f"{self.heads}x{self.T}x{self.H}x{self.V}@{self.stage}"


SHAPES = tuple(
    Shape(heads, stage, 1024 << k, 4096, 128256) for heads in (3, 5) for stage in (1, 2) for k in range(6)
)
# Up to this length gradients are compared with fp32 ones, beyond it the loss alone: fp32 products take ten
# times as long as bf16's.
CHECKED_LENGTH = 2048
QUICK_SHAPES = (
    *(Shape(heads, stage, 96, 128, 517) for heads in (3, 5) for stage in (1, 2)),
    Shape(3, 2, CHECKED_LENGTH + 52, 32, 61),
)

# Timed rounds, and the share by which five heads may take more memory than three.
ROUNDS, GROWTH = 3, 0.05
# The largest chunk of tokens that logitless works in.
CHUNK = 4096


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple:
    """Random bf16 hidden (1, T, H), heads, targets (1, T), and in stage 2 the base head (V, H), else None.

    As in cross-entropy's inputs, each row leans to its target and to a rival among 64 frequent tokens, here
    of every head at once, and a block changes a row by as much as its noise.
    """
    from logitless import MedusaHeads

    random = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    T, H, V = shape.T, shape.H, shape.V
    heads = MedusaHeads(H, V, shape.heads, device=device, dtype=torch.bfloat16)
    for parameter in heads.parameters():
        parameter.data.normal_(0.0, H**-0.5, generator=random["generator"])
    base_weight = (
        torch.randn(V, H, **random, dtype=torch.bfloat16).mul_(H**-0.5).requires_grad_()
        if shape.stage == 2
        else None
    )
    targets = torch.randint(V, (T,), **random)
    frequent = min(64, V)
    hidden = 0.5 * torch.randn(T, H, **random)
    for term in terms(heads, base_weight):
        rivals = torch.randint(frequent, (T - term.offset,), **random) * (V // frequent)
        for tokens, most in ((targets[term.offset :], 24.0), (rivals, 16.0)):
            hidden[: -term.offset] += (
                most * torch.rand(len(tokens), 1, **random) * term.weight.detach()[tokens]
            )
    return hidden.bfloat16()[None].requires_grad_(shape.stage == 2), heads, targets[None], base_weight


def truth(
    hidden: Tensor, heads, targets: Tensor, base_weight: Tensor | None, *, gradients: bool, chunk: int = 2048
) -> Truth:
    """The loss from fp32 operands, a chunk of logits at a time; with `gradients` those of hidden, where it
    trains, and of head 0."""
    x, y = hidden[0].detach().float().requires_grad_(gradients and hidden.requires_grad), targets[0]
    total, leaves = 0.0, {"hidden": x} if x.requires_grad else {}
    with exact_products(), torch.set_grad_enabled(gradients):
        for coefficient, offset, block, weight in terms(heads, base_weight):
            layer = (
                []
                if block is None
                else [p.detach().float() for p in (block.linear.weight, block.linear.bias)]
            )
            weight = weight.detach().float() if gradients else weight.detach()
            if gradients and offset == 2:
                leaves |= {"weight_0": weight.requires_grad_(), "block_0": layer[0].requires_grad_()}
            count = len(y) - offset
            for start in range(0, count, chunk):
                stop = min(start + chunk, count)
                rows = x[start:stop]
                rows = rows + F.silu(F.linear(rows, *layer)) if layer else rows
                labels = y[start + offset : stop + offset]
                loss = coefficient / count * F.cross_entropy(logits(rows, weight), labels, reduction="sum")
                if loss.requires_grad:
                    loss.backward()
                total += loss.item()
    return Truth(
        total,
        {name: leaf.grad.view_as(hidden) if name == "hidden" else leaf.grad for name, leaf in leaves.items()},
    )


def logits(
    x: Tensor,  # (n, H) fp32
    weight: Tensor,  # (V, H)
) -> Tensor:
    """x @ weight.T in fp32. With a bf16 weight by two exact products of bf16 operands, x cut into 16 bits of
    mantissa, for speed."""
    if weight.dtype == torch.float32:
        return x @ weight.t()
    high = x.bfloat16()
    return product(high, weight).add_(product((x - high).bfloat16(), weight))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of bf16 operands, summed and returned in fp32 (`out_dtype` does not exist on a CPU)."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float().t()


def problem(shape: Shape, device: torch.device, seed: int) -> Problem:
    arguments = hidden, heads, _, base_weight = inputs(shape, device, seed)
    leaves = {} if base_weight is None else {"hidden": hidden, "base": base_weight}
    for k in range(len(heads)):
        layer = heads.blocks(k)[0].linear
        leaves |= {f"weight_{k}": heads.projection(k), f"block_{k}": layer.weight, f"bias_{k}": layer.bias}
    found = truth(*arguments, gradients=shape.T <= CHECKED_LENGTH)
    bare = one_gemm(hidden, heads.projection(0))
    chunk = max(chunk for chunk in bare.cases if chunk <= CHUNK)
    return Problem(arguments, leaves, found, replace(bare, cases={chunk: bare.cases[chunk]}))


def goals(shape: Shape) -> dict[str, Goal]:
    """Memory, whatever the number of heads:

    budget + d_hidden (an fp32 sum and one head's share in bf16, in stage 2) + one fp32 d_weight + two bf16
    [C, H] within a block
    """
    d_hidden = (4 + 2) * shape.T * shape.H if shape.stage == 2 else 0
    fp32_d_weight = 4 * shape.V * shape.H
    within_block = 2 * 2 * min(shape.T, CHUNK) * shape.H
    return {"logitless": Goal(None, d_hidden + fp32_d_weight + within_block)}


def measure(
    calls: dict[str, Callable[[], object]],
    leaves: dict[str, Tensor],
    truth: Truth,
    yardstick: Yardstick,
    *,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[dict, list[dict]]:
    """`measure.measure` in half the calls: a warm-up and three timed rounds, which also tell the loss and the
    peak memory.

    Where the truth has gradients they are checked first, as everywhere. Where it has not, the loss of the
    timed calls decides whether they count.
    """
    device = device_of(leaves)
    rows: dict[str, dict] = {}
    for name, call in calls.items():
        rows[name] = check(name, call, leaves, truth) if truth.gradients else {"name": name, "verdict": "ok"}
        if truth.gradients:
            say(f"  {name}: {describe_check(rows[name])}")
    seen: dict[str, dict] = {name: {} for name, row in rows.items() if row["verdict"] == "ok"}
    cases = {name: watched(calls[name], leaves, rows[name], seen[name]) for name in seen}
    poison(device)
    times = interleave(yardstick.cases | cases, device, seconds=seconds, least=ROUNDS)
    clear(leaves)
    bare = yardstick.summary(times)

    for name, found in seen.items():
        row = rows[name]
        if not times[name]:
            row["verdict"] = "failed" if "reason" in row else "out of memory"
        else:
            row["loss_error"] = abs(found.pop("loss").item() - truth.loss) / abs(truth.loss)
            row["verdict"] = "ok" if sound(row) else "wrong"
        if row["verdict"] == "ok":
            row |= found | spread(times[name])
            row["ratio"] = row["ms"] / bare["ms"]
        else:
            say(f"  {name}: {row['verdict']} {row.get('reason', '')}")
    release(device)
    return bare, list(rows.values())


def watched(call: Callable[[], object], leaves: dict[str, Tensor], row: dict, seen: dict) -> Case:
    """The case of a call that leaves in `seen` its loss, its plan, and the bytes it took."""
    device = device_of(leaves)

    def noted() -> object:
        output = call()
        # Detached: after a backward pass that ran out of memory the graph must go.
        seen["loss"] = loss_of(output).detach()
        if plan := getattr(output, "plan", None):
            seen.update(plan=plan.describe(), budget_bytes=plan.budget)
        return output

    def prepare() -> Callable[[], None]:
        run = backward_case(noted, leaves, row)()
        before = allocated(device, restart=True)

        def watch() -> None:
            run()
            # The allocator counts on the host: nothing has to be waited for.
            peak = None if before is None else allocated(device) - before
            returned = sum(leaf.grad.nbytes for leaf in leaves.values() if leaf.grad is not None)
            seen.update(peak_bytes=peak, beyond_gradients_bytes=None if peak is None else peak - returned)

        return watch

    return prepare


def allocated(device: torch.device, *, restart: bool = False) -> int | None:
    """Most bytes allocated at once since the last `restart`; None on a CPU, which keeps no such count."""
    if device.type != "cuda":
        return None
    if restart:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


MEDUSA = Objective(SHAPES, QUICK_SHAPES, Shape.parse, PEERS, problem, goals, measure)


def grown(document: dict) -> list[str]:
    """Where our memory beyond the gradients grows with the number of heads."""
    held: dict[Shape, dict[int, int]] = defaultdict(dict)
    for section in document["sections"]:
        shape = Shape(**section["shape"])
        for row in section["rows"]:
            if (
                row["name"] in goals(shape)
                and row["verdict"] == "ok"
                and row["beyond_gradients_bytes"] is not None
            ):
                held[replace(shape, heads=0)][shape.heads] = row["beyond_gradients_bytes"]
    found = []
    for shape, by_heads in held.items():
        fewest, most = min(by_heads), max(by_heads)
        if by_heads[most] > (1 + GROWTH) * by_heads[fewest]:
            sizes = (f"{report.gib(by_heads[heads]):.2f} GiB with {heads} heads" for heads in (fewest, most))
            found.append(f"stage {shape.stage}, T {shape.T:,}: {', '.join(sizes)}")
    return found


def table(document: dict) -> str:
    """All shapes in one table: time, and memory against the limit."""
    body = []
    for section in document["sections"]:
        shape = Shape(**section["shape"])
        for row in section["rows"]:
            measured = row["verdict"] == "ok"
            memory = (
                report.gib(row.get(name))
                for name in ("peak_bytes", "beyond_gradients_bytes", "memory_limit_bytes")
            )
            body.append(
                [
                    shape.heads,
                    shape.stage,
                    f"{shape.T:,}",
                    row["name"],
                    f"{row['ms']:.1f}" if measured else row["verdict"],
                    f"{1e3 * row['ms'] / shape.N:.2f}" if measured else None,
                    report.text(row.get("ratio"), "{:.2f}"),
                    *(report.text(number, "{:.2f}") for number in memory),
                    {True: "yes", False: "NO", None: None}[row.get("meets_memory_limit")],
                ]
            )
    headers = [
        "K",
        "stage",
        "T",
        "",
        "ms",
        "us/token",
        "x GEMMs",
        "peak GiB",
        "beyond grads",
        "limit",
        "within",
    ]
    return tabulate(body, headers, disable_numparse=True, colalign=(*["right"] * 3, "left", *["right"] * 7))


def by_length(document: dict, source: str) -> str:
    """Time and memory beyond the gradients against the length, in Markdown."""
    cells: dict[tuple, dict[int, str]] = defaultdict(dict)
    for section in document["sections"]:
        shape = Shape(**section["shape"])
        for row in section["rows"]:
            beyond = report.text(report.gib(row.get("beyond_gradients_bytes")), ", {:.1f} GiB") or ""
            measured = row["verdict"] == "ok"
            cells[shape.heads, shape.stage, row["name"]][shape.T] = (
                f"{row['ms']:.0f} ms{beyond}" if measured else row["verdict"]
            )
    lengths = sorted({T for found in cells.values() for T in found})
    body = [[*key, *(found.get(T, "") for T in lengths)] for key, found in cells.items()]
    body = [[cell and f"**{cell}**" for cell in line] if line[2] == "logitless" else line for line in body]
    align = ("right", "right", "left", *["right"] * len(lengths))
    headers = ["heads", "stage", "", *(f"T {T:,}" for T in lengths)]
    sizes = report.sizes({name: document["sections"][0]["shape"][name] for name in "HV"})
    return tabulate(body, headers, tablefmt="github", colalign=align, disable_numparse=True) + (
        f"\n\nOne {document['device']}, {document['date'][:10]}, {sizes}, bf16, forward and backward; "
        f"memory beyond the inputs and the "
        "returned gradients. logitless holds one d_weight in fp32 until it is cast; Liger sums in bf16."
        f"\n\n{source}"
    )
