"""The kernels of one call of ours, by kind: what it launches beside the products, and what it waits for."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import loss_of, synchronize
from benchmarks.own_rows import HOST_CALLS, Row, host_times, tensors_of

# Of a kernel's name, the first that fits decides; what fits none is small.
KINDS = {
    "pass over logits": ("row_kernel", "logits_gradient", "divergence", "shard_", "select_", "tile_max"),
    "few columns of the head": ("gathered_logits", "weighted_rows", "piece_kernel", "run_kernel"),
    "product, with its logits read": ("read_kernel", "gradient_kernel"),
    "product": ("nvjet", "gemm", "cutlass", "xmma", "aten::mm", "aten::addmm"),
    "scaling": ("scale_kernel",),
}
SMALL = "small"
CALLS = 3  # before the one that is looked at


@dataclass(frozen=True)
class Kernel:
    name: str
    kind: str
    start: float  # us
    stop: float


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), SMALL)


def kernels_of(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """What one call launched; on a CPU, the operators that it took, of which some call others."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as session:
        run()
        synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [event for event in session.events() if event.device_type == wanted]
    return [Kernel(e.name, kind_of(e.name), e.time_range.start, e.time_range.end) for e in events]


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds during which any of them ran."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.stop - max(kernel.start, reached))
        reached = max(reached, kernel.stop)
    return total


def summary(kernels: Sequence[Kernel], chunks: int) -> dict:
    """Time and launches by kind, and how the whole call hangs together."""
    kinds = []
    for kind in (*KINDS, SMALL):
        own = [kernel for kernel in kernels if kernel.kind == kind]
        if own:
            names = sorted({kernel.name for kernel in own})
            spent = sum(kernel.stop - kernel.start for kernel in own)
            kinds.append({"kind": kind, "launches": len(own), "us": spent, "names": names})
    small = sum(kind["launches"] for kind in kinds if kind["kind"] in (SMALL, "scaling"))
    span = max(k.stop for k in kernels) - min(k.start for k in kernels) if kernels else 0.0
    return {
        "kinds": kinds,
        "span_us": span,
        "busy_us": busy(kernels),
        "chunks": chunks,
        "small_launches_a_chunk": small / max(1, chunks),
    }


def measure(row: Row, device: torch.device, seed: int, *, quick: bool) -> dict:
    """One of our own rows: its kernels, and the host's time before the first product has been launched."""
    shape = row.inputs.quick if quick else row.inputs.shape
    arguments = row.inputs.build(shape, device, seed)
    tensors = tensors_of(arguments)

    def run() -> object:
        for x in tensors:
            x.grad = None
        output = row.call(*arguments)
        loss = loss_of(output)
        if loss.requires_grad:
            loss.backward()
        return output

    for _ in range(CALLS):
        output = run()
    plan = getattr(output, "plan", None)
    found = summary(kernels_of(run, device), plan.chunks if plan else 1)
    waited = host_times(row.call, arguments, device, 3 if quick else HOST_CALLS)
    found["host_us"] = median(waited) if waited else None
    return {"name": row.name, "shape": asdict(shape), "plan": plan.describe() if plan else None} | found


def with_shape(row: Row, text: str | None) -> Row:
    """The row with another shape, as `--shapes` of its benchmark reads it."""
    if text is None:
        return row
    return replace(row, inputs=replace(row.inputs, shape=type(row.inputs.shape).parse(text)))


def table(found: dict) -> str:
    body = [
        [kind["kind"], kind["launches"], f"{kind['us'] / 1e3:.3f}", f"{kind['us'] / found['busy_us']:.1%}"]
        for kind in found["kinds"]
    ]
    rest = (
        f"span {found['span_us'] / 1e3:.3f} ms, busy {found['busy_us'] / 1e3:.3f}; {found['chunks']} chunks, "
        f"{found['small_launches_a_chunk']:.1f} small launches each"
    )
    if found["host_us"] is not None:
        rest += f"; {found['host_us']:.0f} us on the host before the first product"
    return f"{found['name']}\n{tabulate(body, ['kind', 'launches', 'ms', 'of busy'])}\n{rest}"
