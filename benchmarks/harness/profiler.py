"""The kernels that one call launches, as PyTorch's profiler records them, by kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.measure import synchronize

# Of a kernel's name, the first that fits decides; what fits none is small.
KINDS = {
    "pass over logits": ("row_kernel", "logits_gradient", "divergence", "shard_", "select_", "tile_max"),
    "few columns of the head": ("gathered_logits", "weighted_rows", "piece_kernel", "run_kernel"),
    "product, with its logits read": ("read_kernel", "gradient_kernel"),
    "product": ("nvjet", "gemm", "cutlass", "xmma", "aten::mm", "aten::addmm"),
    "scaling": ("scale_kernel",),
}
SMALL = "small"


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
