"""The layer operators beside a copy of as many bytes and beside eager PyTorch: time, TB/s, host time, error.

    python -m benchmarks.layer_kernels                           every operator, forward and backward
    python -m benchmarks.layer_kernels --sweep --only add_rms    tile sizes, to choose those of the launchers
    python -m benchmarks.layer_kernels --tiny                    any device: shows that everything runs

An operator whose result or gradients are wrong gets no time. GPU times come from a CUDA graph of
several calls, each on operands of its own and together larger than the L2 cache: they hold no
launches and no cached reads. TB/s counts what must be read and written once, not what a kernel
happens to move.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from benchmarks.layer_operators import Maker, Operator, operators
from benchmarks.layer_tiles import variants

# More than the largest L2 cache, 126 MB of a B200, several times over.
ROTATED_BYTES = 600 * 2**20
REPLAYS = 7


def differentiated(
    function, leaves: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Results, leaves and upstream gradients, ready for `torch.autograd.grad`."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    results = function(**leaves)
    upstream = [torch.ones_like(y).mul_(0.5).add_(y.detach(), alpha=0.1) for y in results]
    return results, list(leaves.values()), upstream


def errors(operator: Operator) -> dict[str, tuple[float, float]]:
    """Relative L2 errors against fp64 of our results and gradients, and those of the stock computation."""
    leaves = operator.inputs(0)
    wide = {name: x.double() for name, x in leaves.items()}
    truth, wide_leaves, upstream = differentiated(operator.stock, wide)
    found = {}
    for who, function in (("ours", operator.ours), ("stock", operator.stock)):
        results, tensors, _ = differentiated(function, leaves)
        gradients = torch.autograd.grad(results, tensors, [g.to(y.dtype) for g, y in zip(upstream, results)])
        found[who] = [*results, *gradients]
    rounded = [g.to(y.dtype).double() for g, y in zip(upstream, found["ours"])]
    wanted = [*truth, *torch.autograd.grad(truth, wide_leaves, rounded)]
    names = [*(f"result {i}" for i in range(len(truth))), *(f"d_{name}" for name in leaves)]
    return {
        name: tuple(((found[who][i].double() - w).norm() / w.norm()).item() for who in ("ours", "stock"))
        for i, (name, w) in enumerate(zip(names, wanted))
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


def forward_us(operator: Operator, function, device: torch.device) -> float:
    given = [operator.inputs(seed) for seed in range(turns(operator.forward_bytes, device))]

    @torch.no_grad()
    def call(leaves):
        return function(**leaves)

    return gpu_us([lambda leaves=leaves: call(leaves) for leaves in given], device)


def backward_us(operator: Operator, function, device: torch.device) -> float:
    with on_side_stream(device):
        count = turns(operator.backward_bytes, device)
        given = [differentiated(function, operator.inputs(seed)) for seed in range(count)]

    def call(results, leaves, upstream):
        return torch.autograd.grad(results, leaves, upstream, retain_graph=True)

    return gpu_us([lambda each=each: call(*each) for each in given], device)


TIMED = {"forward": forward_us, "backward": backward_us}


def copy_us(bytes_moved: int, device: torch.device) -> float:
    """Microseconds of a copy that reads half the bytes and writes the other half."""
    sources = [
        torch.zeros(bytes_moved // 2, dtype=torch.uint8, device=device)
        for _ in range(turns(bytes_moved, device))
    ]
    return gpu_us([lambda x=x: torch.empty_like(x).copy_(x) for x in sources], device)


def host_us(operator: Operator, function, device: torch.device, count: int = 200) -> float:
    """Microseconds that the host takes to queue forward and backward, with next to nothing to compute."""
    leaves = {name: x if x.dim() == 1 else x[:1].contiguous() for name, x in operator.inputs(0).items()}
    _, _, upstream = differentiated(function, leaves)
    tensors = {name: x.requires_grad_() for name, x in leaves.items()}
    for turn in range(count + 20):
        if turn == 20:
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
        torch.autograd.grad(function(**tensors), list(tensors.values()), upstream)
    return 1e6 * (time.perf_counter() - start) / count


def row(operator: Operator, device: torch.device, compiled: bool) -> dict:
    """Errors first; times only where they are right."""
    found = errors(operator)
    # What the tests ask for, on full shapes.
    wrong = [n for n, (ours, stock) in found.items() if not ours <= 2 * stock + 1e-6]
    record = {"operator": operator.name, "errors": found, "wrong": wrong}
    if wrong:
        return record
    functions = {"ours": operator.ours, "eager": operator.stock}
    if compiled:
        functions["inductor"] = torch.compile(operator.stock, fullgraph=True)
    for direction, time_us in TIMED.items():
        moved = operator.forward_bytes if direction == "forward" else operator.backward_bytes
        times = {name: time_us(operator, function, device) for name, function in functions.items()}
        times["copy"] = copy_us(moved, device)
        record[direction] = {"bytes": moved, "us": times, "of copy": times["copy"] / times["ours"]}
    record["host us"] = {name: host_us(operator, function, device) for name, function in functions.items()}
    return record


def describe(record: dict) -> str:
    if record["wrong"]:
        listed = ", ".join(
            f"{n} {record['errors'][n][0]:.1e} (stock {record['errors'][n][1]:.1e})" for n in record["wrong"]
        )
        return f"{record['operator']:44} WRONG: {listed}"
    parts = [f"{record['operator']:44}"]
    for direction in TIMED:
        us, moved = record[direction]["us"], record[direction]["bytes"]
        others = ", ".join(f"{name} {x:.0f}" for name, x in us.items() if name != "ours")
        rate = moved / us["ours"] / 1e6
        share = record[direction]["of copy"]
        parts.append(f"{direction} {us['ours']:7.1f} us {rate:5.2f} TB/s {share:4.0%} ({others})")
    host = record["host us"]
    parts.append("host " + ", ".join(f"{name} {x:.0f}" for name, x in host.items()))
    return " | ".join(parts)


def sweep(operator: Operator, device: torch.device, deadline: float, say: Callable[[str], None]) -> None:
    """Times our operator with every tile and prints the best."""
    for direction, time_us in TIMED.items():
        moved = operator.forward_bytes if direction == "forward" else operator.backward_bytes
        copy = copy_us(moved, device)
        found = {"as it is": time_us(operator, operator.ours, device)}
        for label, patches in variants(operator, direction):
            if time.monotonic() > deadline:
                break
            with ExitStack() as stack:
                for each in patches:
                    stack.enter_context(each)
                try:
                    found[label] = time_us(operator, operator.ours, device)
                except Exception as error:  # a tile that does not fit the device is no reason to stop
                    say(f"  {label}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        best = sorted(found, key=found.get)
        now = found["as it is"]
        say(f"{operator.name} {direction}, {len(found)} tiles: copy {copy:.1f} us, as it is {now:.1f} us")
        for label in best[:6]:
            say(f"    {found[label]:7.1f} us {copy / found[label]:4.0%}  {label}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="operators whose name contains one of these")
    parser.add_argument("--sweep", action="store_true", help="tile sizes instead of peers")
    parser.add_argument(
        "--compiled", action="store_true", help="beside Inductor too, which compiles for some seconds each"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a few rows: shows that everything runs, measures nothing"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="no operator begins later, and 60 s later all ends"
    )
    parser.add_argument("--out", help="a JSON file for the records")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    device, start = torch.device(options.device), time.monotonic()
    watchdog = threading.Timer(options.seconds + 60, lambda: os._exit(3))
    watchdog.daemon = True
    watchdog.start()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; {' '.join(sys.argv[1:])}", flush=True)
    make, records = Maker(device, options.tiny), []
    for operator in operators(make):
        if options.only and not any(part in operator.name for part in options.only):
            continue
        if time.monotonic() - start > options.seconds:
            print(f"{operator.name}: left out, {options.seconds:.0f} s are over", flush=True)
            continue
        if options.sweep:
            sweep(operator, device, start + options.seconds, functools.partial(print, flush=True))
        else:
            records.append(row(operator, device, options.compiled))
            print(describe(records[-1]), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if options.out:
            with open(options.out, "w") as file:
                json.dump({"device": name, "torch": torch.__version__, "rows": records}, file, indent=1)
    watchdog.cancel()


if __name__ == "__main__":
    main()
