"""Vocabulary-parallel heads beside the whole head on one GPU, and peers' cross-entropies of a sharded head:
the same problem on every rank, each with its rows of the head."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.harness.measure import Truth, check, clear, memory
from benchmarks.harness.objective import Objective, Problem
from benchmarks.harness.report import gib, sizes, text
from benchmarks.harness.timing import REST, release, spread, time_ms
from benchmarks.losses import ce, distillation, policy, preference
from benchmarks.losses.ce import CE
from benchmarks.losses.distillation import DISTILLATION
from benchmarks.losses.policy import POLICY
from benchmarks.losses.preference import PREFERENCE
from benchmarks.peers.policy import EPSILON, OPTIONS
from benchmarks.peers.tensor_parallel import PEERS
from logitless import CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss

ROUNDS = 14
# Two roundings of bf16 gradients more than one GPU, whose own error counts twice.
ROUNDINGS = 8 * torch.finfo(torch.bfloat16).eps


@cache
def made(kind: type, **options):
    """A loss, made once as in a training loop."""
    return kind(**options)


def cross_entropy(group, hidden: Tensor, weight: Tensor, targets: Tensor):
    return made(CrossEntropyLoss, tp_group=group)(hidden, weight, targets)


def dpo(group, hidden: Tensor, weight: Tensor, targets: Tensor, ref_hidden: Tensor, ref_weight: Tensor):
    reference = {"ref_hidden": ref_hidden, "ref_weight": ref_weight}
    return made(DPOLoss, tp_group=group)(hidden, weight, targets, **reference)


def grpo(group, hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, old_logps: Tensor):
    loss = made(GRPOLoss, **OPTIONS, epsilon=EPSILON, tp_group=group)
    return loss(hidden, weight, targets, advantages=advantages, old_logps=old_logps)


def jsd(group, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor):
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    return made(JSDLoss, tp_group=group)(hidden, weight, **teacher)


# Name -> the objective, the loss, its shape, the quick one, and which arguments are heads. Peers divide the
# V of cross-entropy evenly.
LOSSES: dict[str, tuple[Objective, Callable, object, object, tuple[int, ...]]] = {
    "cross-entropy": (CE, cross_entropy, ce.SHAPES[0], ce.Shape(96, 32, 518), (1,)),
    "DPO": (PREFERENCE, dpo, preference.SHAPES[2], preference.QUICK_SHAPES[2], (1, 4)),
    "GRPO": (POLICY, grpo, policy.SHAPES[0], policy.QUICK_SHAPES[0], (1,)),
    "JSD": (DISTILLATION, jsd, distillation.SHAPES[0], distillation.QUICK_SHAPES[0], (1, 3)),
}


def run(document: dict, ranks: int, *, quick: bool, device: str, say: Callable[[str], None]) -> None:
    """Fills `document["sections"]`: for each loss one row of the whole head and one of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            worker, args=(ranks, folder, quick, device, document["seed"]), nprocs=ranks
        )
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
    absent = PEERS.load(torch.device(device))[1]
    document |= {"ranks": ranks, "absent": absent, "sections": []}
    for name, (_, _, shape, quick_shape, _) in LOSSES.items():
        rows = [found[0][name]["whole"]] + [
            found[rank][name]["shard"] | {"name": f"rank {rank}"} for rank in range(ranks)
        ]
        for row in rows[1:]:
            row["right"] = row["verdict"] == "ok" and all(
                row[key] <= 2 * rows[0][key] + ROUNDINGS
                for key in row
                if key.startswith("d_") and key.endswith("_error")
            )
        peers = [
            row | {"name": f"{peer}, rank {rank}"}
            for peer in found[0][name]["peers"]
            for rank, row in enumerate(of_rank[name]["peers"][peer] for of_rank in found)
        ]
        document["sections"].append(
            {"loss": name, "shape": asdict(quick_shape if quick else shape), "rows": rows, "peers": peers}
        )
    document["complete"] = True
    say("\n" + table(document))


def worker(rank: int, ranks: int, folder: str, quick: bool, device_type: str, seed: int) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=ranks,
        init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=120),
        device_id=device if device.type == "cuda" else None,
    )
    found = {}
    for name, (objective, loss, shape, quick_shape, heads) in LOSSES.items():
        problem = objective.problem(quick_shape if quick else shape, device, seed)
        whole = measured(partial(loss, None, *problem.arguments), problem.leaves, problem.truth, device)
        rows = shard_rows(problem.arguments[1].shape[0], rank, ranks)
        found[name] = {
            "whole": whole,
            "shard": measured_shard(loss, problem, heads, rows, device),
            "peers": {},
        }
        if objective is not CE:
            continue
        rows = equal_rows(problem.arguments[1].shape[0], rank, ranks)
        for peer, compute in PEERS.load(device)[0].items():
            with loss_parallel():  # for the backward pass of PyTorch's, no other reads it
                found[name]["peers"][peer] = measured_shard(compute, problem, heads, rows, device)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def shard_rows(V: int, rank: int, ranks: int) -> slice:
    """A rank's rows of the head. Uneven, as a vocabulary is that no number of ranks divides."""
    ends = [round(V * share) for share in torch.linspace(0, 1, ranks + 1).tolist()]
    ends[1] += min(64, V // 8)
    return slice(ends[rank], ends[rank + 1])


def equal_rows(V: int, rank: int, ranks: int) -> slice:
    """A rank's rows of a head whose shards have equal sizes, as the peers expect."""
    return slice(rank * V // ranks, (rank + 1) * V // ranks)


def sharded(arguments: Sequence, heads: tuple[int, ...], rows: slice) -> list:
    """The arguments with these rows of the `heads` among them; the first is the one that trains."""
    arguments = list(arguments)
    for at in heads:
        arguments[at] = arguments[at].detach()[rows].clone()
    arguments[1].requires_grad_()
    return arguments


def measured_shard(
    loss: Callable, problem: Problem, heads: tuple[int, ...], rows: slice, device: torch.device
) -> dict:
    """The row of a rank that holds these rows of the heads."""
    arguments = sharded(problem.arguments, heads, rows)
    of_rows = {"weight": problem.truth.gradients["weight"][rows].clone()}
    row = measured(
        partial(loss, dist.group.WORLD, *arguments),
        problem.leaves | {"weight": arguments[1]},
        Truth(problem.truth.loss, problem.truth.gradients | of_rows),
        device,
    )
    del arguments
    release(device)
    return row


def measured(call: Callable, leaves: dict[str, Tensor], truth: Truth, device: torch.device) -> dict:
    """A row: agreement with the truth, time, memory. The same calls on every rank, so that nobody waits in
    vain."""
    row = check("one GPU", call, leaves, truth)
    if row["verdict"] in ("failed", "out of memory"):
        return row

    def step() -> None:
        output = call()
        getattr(output, "loss", output).backward()

    times = []
    for _ in range(ROUNDS):
        clear(leaves)
        time.sleep(REST)
        dist.barrier()  # after the rest: the ranks begin together, as inside a training step
        times.append(time_ms(step, device, rest=0.0))
    return row | spread(times[2:]) | memory(call, leaves, row)


def table(document: dict) -> str:
    body = [
        [
            section["loss"] if row is section["rows"][0] else "",
            row["name"],
            text(row.get("ms"), "{:.1f}"),
            text(gib(row.get("beyond_gradients_bytes")), "{:.2f}"),
            text(row.get("d_hidden_error"), "{:.1e}"),
            text(row.get("d_weight_error"), "{:.1e}"),
            {True: "yes", False: "NO", None: row["verdict"]}[row.get("right")],
        ]
        for section in document["sections"]
        for row in section["rows"] + section["peers"]
    ]
    headers = ["", "", "ms", "GiB beyond grads", "d_hidden err", "d_weight err", "right"]
    return tabulate(body, headers, disable_numparse=True, colalign=("left", "left", *["right"] * 5))


def slowest(rows: Sequence[dict]) -> tuple[float, float]:
    """Milliseconds of the slowest rank, and the most GiB beyond the gradients that one takes."""
    return max(row["ms"] for row in rows), max(gib(row["beyond_gradients_bytes"]) for row in rows)


def by_loss(document: dict, source: str) -> str:
    """Time and memory of one GPU and of the ranks, in Markdown."""
    body = []
    for section in document["sections"]:
        whole, *ranks = section["rows"]
        ms, memory = slowest(ranks)
        where = sizes({k: v for k, v in section["shape"].items() if k != "loss"})
        body.append(
            [
                f"{section['loss']}, {where}",
                f"{whole['ms']:.1f} ms, {gib(whole['beyond_gradients_bytes']):.1f} GiB",
                f"{ms:.1f} ms, {memory:.1f} GiB",
                f"{whole['ms'] / ms:.2f}x",
            ]
        )
        for peer, rows in groupby(section.get("peers", ()), lambda row: row["name"].rpartition(", rank")[0]):
            rows = list(rows)
            right = all(row["verdict"] == "ok" for row in rows)
            cell = "{:.1f} ms, {:.1f} GiB".format(*slowest(rows)) if right else rows[0]["verdict"]
            body.append([f"{section['loss']}, {peer}", "", cell, ""])
    headers = ["", "one GPU", f"{document['ranks']} ranks", "faster"]
    return tabulate(
        body, headers, tablefmt="github", colalign=("left", *["right"] * 3), disable_numparse=True
    ) + (
        f"\n\n{document['ranks']} x {document['device']}, {document['date'][:10]}, bf16, forward and "
        f"backward, uneven shards (peers: equal ones); "
        f"memory of a rank beyond the inputs and the returned gradients.\n\n{source}"
    )
