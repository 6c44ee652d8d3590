"""The layer operators beside their peers and beside a copy of as many bytes: time, bandwidth, host time, peak
memory, error.

An operator whose result or gradients are wrong gets no time. GPU times come from a CUDA graph of several
calls, each on operands of its own and together larger than the L2 cache: they hold no launches and no cached
reads. GB/s counts what must be read and written once, not what a kernel happens to move.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.measure import GRADIENT_LIMIT
from benchmarks.harness.registry import one_line
from benchmarks.harness.timing import peak_bytes, release
from benchmarks.layers.operators import Maker, Operator, operators
from benchmarks.peers.layers import LAYERS, Computes

# More than the largest L2 cache, 126 MB of a B200, several times over.
ROTATED_BYTES = 600 * 2**20
REPLAYS = 7
OURS = "logitless"
DIRECTIONS = ("forward", "backward")


def run(
    document: dict,
    device: torch.device,
    computes: dict[str, Computes],
    *,
    kinds: tuple[str, ...] = (),
    minutes: float,
    out: Path | None,
    say: Callable[[str], None],
) -> None:
    """Fills `document`, a section for each operator (those whose name contains one of `kinds`), and writes it
    after each."""
    start, make = time.perf_counter(), Maker(device, document["quick"])
    document |= {"sections": [], "complete": False}
    for operator in operators(make):
        if kinds and not any(word in operator.name for word in kinds):
            continue
        if time.perf_counter() - start > 60 * minutes:
            say(f"stopped before {operator.name}: {minutes:g} minutes are over")
            report.write_json(out, document)
            return
        document["sections"].append(section(operator, computes, device))
        report.write_json(out, document)
        say(lines(document["sections"][-1]))
        release(device)
    document["complete"] = True
    report.write_json(out, document)


def section(operator: Operator, computes: dict[str, Computes], device: torch.device) -> dict:
    """One operator, whoever has it."""
    moved = {"forward": operator.forward_bytes, "backward": operator.backward_bytes}
    copies = {direction: copy_us(count, device) for direction, count in moved.items()}
    found = {"operator": operator.name, "kind": operator.kind, "width": operator.width, "bytes": moved}
    found |= {"copy_us": copies, "rows": []}
    for name, find in computes.items():
        try:
            function = find(operator)
            row = None if function is None else measured(name, operator, function, device, copies)
        # A foreign kernel may fail in any way; the others must still be measured.
        except Exception as error:
            row = {"verdict": "failed", "reason": one_line(error)}
        if row is not None:
            found["rows"].append({"name": name} | row)
        torch.compiler.reset()
    return found


def measured(
    name: str, operator: Operator, function: Callable, device: torch.device, copies: dict[str, float]
) -> dict:
    """Errors first; times only where they are right."""
    found = errors(operator, function)
    # Ours is held to the error of what the stock model computes.
    limits = {key: 2 * stock + 1e-6 if name == OURS else GRADIENT_LIMIT for key, (_, stock) in found.items()}
    row = {"errors": {key: error for key, (error, _) in found.items()}}
    if not all(error <= limits[key] for key, (error, _) in found.items()):
        return row | {"verdict": "wrong"}
    row["verdict"] = "ok"
    for direction, time_us in (("forward", forward_us), ("backward", backward_us)):
        us, moved = time_us(operator, function, device), getattr(operator, f"{direction}_bytes")
        row[direction] = {"us": us, "gb_per_s": moved / us / 1e3, "of_copy": copies[direction] / us}
    row["host_us"] = host_us(operator, function, device)
    row["peak_bytes"] = peak_bytes(lambda: both_ways(operator, function), device)
    return row


def both_ways(operator: Operator, function: Callable) -> None:
    results, leaves, upstream = differentiated(function, operator.inputs(0))
    torch.autograd.grad(results, leaves, upstream)


def differentiated(
    function: Callable, leaves: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Results, leaves and upstream gradients, ready for `torch.autograd.grad`."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    results = tuple(function(**leaves))
    upstream = [torch.ones_like(y).mul_(0.5).add_(y.detach(), alpha=0.1) for y in results]
    return results, list(leaves.values()), upstream


def errors(operator: Operator, function: Callable) -> dict[str, tuple[float, float]]:
    """Relative L2 errors against fp64 of results and gradients, and those of the stock computation."""
    wide = {name: x.double() for name, x in operator.inputs(0).items()}
    truth, wide_leaves, upstream = differentiated(operator.stock, wide)
    found = []
    for each in (function, operator.stock):
        # Fresh ones: a peer may write into what it is given.
        results, tensors, _ = differentiated(each, operator.inputs(0))
        kept = [y.detach().clone() for y in results]
        given = [g.to(y.dtype) for g, y in zip(upstream, results, strict=True)]
        rounded = [g.double() for g in given]
        found.append([*kept, *torch.autograd.grad(results, tensors, given)])
    wanted = [*truth, *torch.autograd.grad(truth, wide_leaves, rounded)]
    names = [*(f"result {i}" for i in range(len(truth))), *(f"d_{name}" for name in wide)]
    return {
        name: tuple(((who[i].double() - w).norm() / w.norm()).item() for who in found)
        for i, (name, w) in enumerate(zip(names, wanted, strict=True))
    }


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """Where everything is timed: a graph captures a backward pass on the stream of its forward pass."""
    return torch.cuda.Stream()


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    side_stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream()):
        yield
    torch.cuda.synchronize()


def gpu_us(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Microseconds of a call: the median of replays of one graph that holds them all. A CPU's wall clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - start) / len(calls)
    with on_side_stream(device):
        for call in calls[:2]:
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream()):
        # Results stay alive: memory that is handed out again would still be in the cache.
        kept = [call() for call in calls]
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(calls))
    del kept, graph
    return statistics.median(times[2:])


def turns(bytes_moved: int, device: torch.device) -> int:
    """How many calls, each with operands of its own, a graph holds."""
    return 1 if device.type != "cuda" else max(3, -(-ROTATED_BYTES // bytes_moved))


def forward_us(operator: Operator, function: Callable, device: torch.device) -> float:
    given = [operator.inputs(seed) for seed in range(turns(operator.forward_bytes, device))]

    @torch.no_grad()
    def call(leaves: dict[str, Tensor]) -> object:
        return function(**leaves)

    return gpu_us([lambda leaves=leaves: call(leaves) for leaves in given], device)


def backward_us(operator: Operator, function: Callable, device: torch.device) -> float:
    with on_side_stream(device):
        count = turns(operator.backward_bytes, device)
        given = [differentiated(function, operator.inputs(seed)) for seed in range(count)]

    def call(results: tuple, leaves: list, upstream: list) -> object:
        return torch.autograd.grad(results, leaves, upstream, retain_graph=True)

    return gpu_us([lambda each=each: call(*each) for each in given], device)


def copy_us(bytes_moved: int, device: torch.device) -> float:
    """Microseconds of a copy that reads half the bytes and writes the other half."""
    sources = [
        torch.randint(0, 256, (bytes_moved // 2,), dtype=torch.uint8, device=device)
        for _ in range(turns(bytes_moved, device))
    ]
    return gpu_us([lambda x=x: torch.empty_like(x).copy_(x) for x in sources], device)


def host_us(operator: Operator, function: Callable, device: torch.device, count: int = 200) -> float:
    """Microseconds that the host takes to queue forward and backward."""
    if device.type == "cpu":
        count = 2
    leaves = operator.inputs(0)
    _, _, upstream = differentiated(function, leaves)
    tensors = {name: x.requires_grad_() for name, x in leaves.items()}
    times = []
    for _ in range(count + 20):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(tuple(function(**tensors)), list(tensors.values()), upstream)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[20:])


def lines(found: dict) -> str:
    """A section for the terminal."""
    body = []
    for row in found["rows"]:
        if row["verdict"] != "ok":
            body.append([row["name"], row["verdict"], row.get("reason")])
            continue
        each = [row[direction] for direction in DIRECTIONS]
        cells = [f"{x['us']:.1f} us, {x['gb_per_s']:,.0f} GB/s, {x['of_copy']:.0%}" for x in each]
        memory = report.text(report.gib(row["peak_bytes"]), "{:.2f} GiB")
        error = f"{max(row['errors'].values()):.1e}"
        body.append([row["name"], *cells, f"host {row['host_us']:.0f} us", memory, error])
    return f"{found['operator']}\n{tabulate(body, tablefmt='plain', disable_numparse=True)}"


def together(documents: list[dict]) -> dict:
    """Runs of some operators or peers as one, with the days of all: of what was measured twice, the later."""
    days = sorted({document["date"][:10] for document in documents})
    whole = documents[-1] | {"sections": [], "date": " and ".join(days)}
    for document in documents:
        for each in document["sections"]:
            key = each["operator"], each["width"]
            known = next((x for x in whole["sections"] if (x["operator"], x["width"]) == key), None)
            if known is None:
                known = each | {"rows": []}
                whole["sections"].append(known)
            newer = {row["name"] for row in each["rows"]}
            known["rows"] = [row for row in known["rows"] if row["name"] not in newer] + each["rows"]
    present = {row["name"] for each in whole["sections"] for row in each["rows"]}
    whole["absent"] = {name: why for name, why in whole["absent"].items() if name not in present}
    whole["versions"] = {
        name: number for document in documents for name, number in document["versions"].items() if number
    }
    return whole


def by_operator(document: dict, source: str) -> str:
    """Forward and backward in microseconds, in Markdown: the shapes of models."""
    sections = [each for each in document["sections"] if each["width"] is None]
    names = [
        peer.name
        for peer in LAYERS.peers
        if any(peer.name == row["name"] for x in sections for row in x["rows"])
    ]
    body = []
    for each in sections:
        rows = {row["name"]: row for row in each["rows"]}
        ours = rows.get(OURS, {"verdict": None})
        shares = [f"{ours[d]['of_copy']:.0%}" for d in DIRECTIONS] if ours["verdict"] == "ok" else []
        body.append([each["operator"], " / ".join(shares), *(cell(rows.get(name)) for name in names)])
    headers = ["", "of a copy's speed", *names]
    table = tabulate(body, headers, tablefmt="github", disable_numparse=True)
    return (
        f"{table}\n\nMicroseconds forward / backward and GiB at the peak, one {document['device']}, "
        f"{document['date']}, bf16. The errors of logitless against fp64 are at most twice eager PyTorch's."
        f"\n\n{source}"
    )


def cell(row: dict | None) -> str:
    if row is None or row["verdict"] != "ok":
        return "" if row is None else row["verdict"]
    times = " / ".join(f"{row[direction]['us']:.0f}" for direction in DIRECTIONS)
    return times + (report.text(report.gib(row["peak_bytes"]), ", {:.2f}") or "")


def failed(document: dict) -> list[str]:
    """Operators of ours that are wrong or broke down."""
    return [
        f"{each['operator']}: {row['verdict']} {row.get('reason', '')}".strip()
        for each in document["sections"]
        for row in each["rows"]
        if row["name"] == OURS and row["verdict"] != "ok"
    ]
