"""The path of a call on a Hopper GPU on a machine without one: what the host does, and what it launches.

Tensors are on the CPU, where PyTorch's operators run. Triton kernels are neither compiled nor run, except
those whose results the host reads: the loss and its gradients are meaningless. Streams, events and the memory
of a GPU are not simulated.
"""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from logitless import kernels
from logitless.engine import captured, early_projection, projection
from logitless.kernels.head.targets import runs_kernels

# The name of a launch in a profile is this and the kernel's name.
LAUNCH = "launch "
# The name of the launch of a CUDA graph.
REPLAY = "CUDA graph"
_PRODUCTS = torch.library.Library("aten", "IMPL")


def simulate() -> None:
    """Change torch and the library in this process, in which the library must not have launched anything."""
    replace(torch.version, "cuda", "12.8")  # launches are cached on NVIDIA's GPUs alone
    replace(torch.cuda, "current_device", lambda: 0)
    replace(kernels, "_triton_runs", lambda device_type: True)
    replace(kernels, "_generation", lambda device: 9)
    replace(early_projection, "_runs_on_gpu", runs_kernels)
    # Products of half precision, which the CPU lacks or sums in half precision.
    for name in ("mm.dtype_out", "addmm.dtype_out"):
        _PRODUCTS.impl(name, lambda *operands, out: out, "CPU")
    replace(projection, "hidden_gradient", _hidden_gradient)
    from logitless.kernels import launch

    replace(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 0)))
    replace(launch.CachedLaunch, "_compile", _compile)


def simulate_cuda_graphs() -> None:
    """Replay calls, after `simulate`; a replay runs nothing."""
    replace(captured, "CAPTURES_ON", ("cpu",))
    replace(captured, "is_switched_off", lambda: False)
    replace(captured, "capture", lambda run, device: (_replay, run()))


def _replay() -> None:
    with record_function(LAUNCH + REPLAY):
        pass


def _hidden_gradient(d_logits: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    if out.dtype == d_logits.dtype:
        return torch.mm(d_logits, weight, out=out)
    return torch.mm(d_logits, weight, out_dtype=out.dtype, out=out)


def replace(owner: object, name: str, value: object) -> None:
    """For good; raises where the library has moved it."""
    mock.patch.object(owner, name, value).start()


def _compile(cached, grid: tuple[int, ...], operands: tuple, constants: dict) -> tuple:
    """In the place of `CachedLaunch._compile`: compiles nothing."""
    kernel = CompiledKernel(cached.kernel.fn.__name__)
    kernel.compute(*operands)
    return kernel, [constants[name] for name in cached._constants]


class CompiledKernel:
    """In the place of Triton's class: a launch is an event in a profile."""

    function = packed_metadata = None

    def __init__(self, name: str):
        self.name = name
        self.compute = COMPUTED.get(name, _ones)

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *operands) -> None:
        if not torch.autograd._profiler_enabled():
            self.compute(*operands)
            return
        with record_function(LAUNCH + self.name):
            self.compute(*operands)


# The kernels of `targets_triton.py` whose results the host reads, in NumPy, which torch does not see.


def _mark(targets: Tensor, others: Tensor, marks: Tensor, rows: int, V: int, ignore_index: int, *_) -> None:
    y, marks = targets.numpy(), marks.numpy()
    marks[0] = y != ignore_index
    marks[1] = marks[0] & ((y < 0) | (y >= V))
    if len(marks) > 2:
        marks[2:] = others.numpy() & marks[0]


def _count(marks: Tensor, bounds: Tensor, counts: Tensor, rows: int, length: int, *_) -> None:
    counts.numpy()[:] = 0
    counts.numpy()[:rows] = marks.numpy().reshape(rows, length).sum(1)


def _count_targets(
    targets: Tensor, counts: Tensor, inverse: Tensor, rows: int, V: int, ignore_index: int, *_
) -> None:
    y = targets.numpy()
    supervised = y != ignore_index
    counts.numpy()[:] = supervised.sum(), (supervised & ((y < 0) | (y >= V))).sum()
    inverse.numpy()[:] = 1 / max(supervised.sum(), 1)


def _clamp(
    targets: Tensor,
    num_items: Tensor,
    supervised: Tensor,
    ids: Tensor,
    wrong: Tensor,
    rows: int,
    V: int,
    ignore_index: int,
    *_,
) -> None:
    y = targets.numpy()
    kept = supervised.numpy() != 0 if supervised.dtype == torch.int8 else np.full(rows, True)
    ids.numpy()[:] = np.where(kept, y.clip(0, V - 1), ignore_index)
    wrong.numpy()[:] = 0
    wrong.numpy()[0] = np.where(kept, (y < 0) | (y >= V), y != ignore_index).sum()


def _clean(
    targets: Tensor,
    num_items: Tensor,
    ids: Tensor,
    supervised: Tensor,
    counts: Tensor,
    rows: int,
    V: int,
    ignore_index: int,
    *_,
) -> None:
    y = targets.numpy()
    kept = y != ignore_index
    ids.numpy()[:] = np.where(kept, y.clip(0, V - 1), ignore_index)
    supervised.numpy()[:] = kept
    counts.numpy()[:] = 0
    counts.numpy()[:, 0] = kept.sum(), (kept & ((y < 0) | (y >= V))).sum()


def _ones(*operands: object) -> None:
    """What a trainer does with a statistic may depend on its value, which is 1 instead of uninitialized."""
    for x in operands:
        if isinstance(x, Tensor) and x.dtype == torch.float32 and x.dim() == 1:
            x.detach().numpy()[:] = 1.0


COMPUTED = {
    "mark_kernel": _mark,
    "count_kernel": _count,
    "count_targets_kernel": _count_targets,
    "clamp_kernel": _clamp,
    "clean_kernel": _clean,
}
