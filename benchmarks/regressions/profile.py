"""The kernels of one call of ours, by kind: what it launches beside the products, and what it waits for."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median

import torch
from tabulate import tabulate

from benchmarks.harness.measure import loss_of
from benchmarks.harness.profiler import KINDS, SMALL, Kernel, busy, kernels_of
from benchmarks.regressions.own_rows import HOST_CALLS, Row, host_times, tensors_of

CALLS = 3  # before the one that is looked at


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
