"""The evaluation of losses of per-token statistics: uncompiled, and as one compiled graph.

Whole calls, forward and backward pass, with the evaluation of one kind or the other and everything else
equal. The three products of a call are measured beside them. Host ms is the time until a call and its
backward pass have returned.
"""

import resource
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor

import logitless
from benchmarks.report import write_json
from benchmarks.timing import interleave, release, spread
from logitless.engine import compiled

H, V = 2048, 151_936
SIZES = ((2, 128), (2, 256), (4, 256), (4, 512), (8, 512))
QUICK = ((4, 4), (4, 8))
# Of results and gradients; the latter are in bf16 on a GPU.
TOLERANCE = 1e-2


def calls(
    B: int, T: int, device: torch.device, *, quick: bool
) -> Iterator[tuple[str, list[Tensor], Callable]]:
    """(name, the tensors that get a gradient, the call) of each loss."""
    width, ids = (16, 64) if quick else (H, V)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=random, device=device).mul_(std)

    hidden = normal(B, T, width).to(dtype).requires_grad_()
    weight = normal(ids, width, std=width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(ids, (B, T), generator=random, device=device)
    logps = logitless.linear_logprobs(hidden.detach(), weight.detach(), targets).logps
    old, ref = logps + 0.05 * normal(B, T), logps + 0.1 * normal(B, T)
    advantages = normal(B)
    reference = {
        "ref_hidden": hidden.detach() + 0.1 * normal(B, T, width).to(dtype),
        "ref_weight": weight.detach(),
    }
    losses = {
        "CE": (logitless.CrossEntropyLoss(), {}),
        "DPO": (logitless.DPOLoss(), reference),
        "GRPO, KL": (
            logitless.GRPOLoss(beta=0.04),
            {"advantages": advantages, "old_logps": old, "ref_logps": ref},
        ),
        "ORPO": (logitless.ORPOLoss(), {}),
    }
    for name, (loss, inputs) in losses.items():

        def call(loss=loss, inputs=inputs):
            return loss(hidden, weight, targets, **inputs)

        yield name, [hidden, weight], call


def run(document: dict, device: torch.device, *, quick: bool, seconds: float, out, say: Callable) -> None:
    document["rows"] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for B, T in QUICK if quick else SIZES:
        for name, leaves, call in calls(B, T, device, quick=quick):
            row = {"loss": name, "tokens": B * T} | measured(leaves, call, device, seconds)
            document["rows"].append(row)
            say(f"{name} {B} x {T}: {row}")
            write_json(out, document)
            release(device)
    document["host"] = {
        "MiB more than before the first graph": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        // 1024,
        "worker processes": len(active_children()),
    }
    document["complete"] = True


def measured(leaves: list[Tensor], call: Callable, device: torch.device, seconds: float) -> dict:
    kinds = {"uncompiled": (), "compiled": (device.type,)}
    results, hosts = {}, {kind: [] for kind in kinds}
    first = {}

    def step(kind: str) -> Tensor:
        compiled.COMPILES_ON = kinds[kind]
        for leaf in leaves:
            leaf.grad = None
        start = time.perf_counter()
        out = call()
        out.loss.backward()
        hosts[kind].append(1e3 * (time.perf_counter() - start))
        return out

    for kind in kinds:
        compiled._GRAPHS.clear()
        start = time.perf_counter()
        step(kind)
        first[kind] = time.perf_counter() - start
        for _ in range(5):
            out = step(kind)
        results[kind] = [out.loss.detach(), *out.metrics.values(), *[leaf.grad for leaf in leaves]]
        hosts[kind].clear()
    graphs = [graph is not None for graph in compiled._GRAPHS.values()]
    hidden, weight = (leaf.detach().reshape(-1, leaf.shape[-1]) for leaf in leaves)

    def products() -> None:
        logits = hidden @ weight.T
        logits @ weight
        logits.T @ hidden

    cases = {kind: (lambda kind=kind: lambda: step(kind)) for kind in kinds} | {"products": lambda: products}
    times = interleave(cases, device, seconds=seconds)
    differences = [
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in zip(results["compiled"], results["uncompiled"], strict=True)
    ]
    return {
        "verdict": "ok" if max(differences) < TOLERANCE else "wrong",
        "graph": bool(graphs) and all(graphs),
        "first call s": first,
        "times": {name: spread(each) for name, each in times.items() if each},
        "host ms": {kind: median(each) for kind, each in hosts.items()},
        "largest relative difference": max(differences),
    }


def table(document: dict) -> str:
    rows = []
    for row in document["rows"]:
        times = row["times"]
        bare = times["products"]["ms"]
        ratios = [f"{times[kind]['ms'] / bare:.2f}" for kind in ("uncompiled", "compiled")]
        hosts = [f"{row['host ms'][kind]:.2f}" for kind in ("uncompiled", "compiled")]
        first = f"{row['first call s']['compiled']:.1f}"
        difference = f"{row['largest relative difference']:.0e}"
        graph = row["graph"] if row["verdict"] == "ok" else "wrong"
        rows.append([row["loss"], row["tokens"], graph, *ratios, *hosts, first, difference])
    headers = [
        "loss",
        "tokens",
        "graph",
        "x products",
        "compiled",
        "host ms",
        "compiled",
        "first s",
        "differs by",
    ]
    return tabulate(rows, headers) + f"\n{document['host']}"
