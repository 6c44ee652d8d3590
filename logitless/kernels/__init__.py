"""The operators of the losses, and the choice of their implementation on a device.

`head` contains the operators on a chunk of logits, and `ids` the operators for several ids per token. Each
operator has a launcher, a PyTorch implementation (the "twin"), and portable Triton kernels in `*_triton.py`.
`fused_projection` is the interface to products with an epilogue, whose kernels are specific to a GPU
generation, such as `hopper`. `launch`, `operands`, `layout` and `matmul` are shared. `parallel`, the engine,
the losses, `layers` and `tools` import this package.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Major number of the compute capability -> subpackage with the kernels of this GPU generation. The Hopper
# kernels were not tested on newer GPUs. Their tiles take 144 KiB of shared memory per program: compute
# capability 10 has 227 KiB, and compute capability 12 has 99 KiB.
GENERATIONS = {9: "hopper"}
# The generation that `planned_for` has set; None outside of its context.
_planned: int | None = None


@contextmanager
def planned_for(generation: int) -> Iterator[None]:
    """Context for planning a call on a GPU that is not in this machine.

    In this context, `uses_triton`, `fused_products` and `matmul.piece_bytes` return the results for a GPU of
    this generation, for tensors on any device. No thread may launch a kernel in this context.
    """
    global _planned
    before, _planned = _planned, generation
    try:
        yield
    finally:
        _planned = before


def plans_elsewhere() -> bool:
    """Whether the context of `planned_for` is active."""
    return _planned is not None


# Looked up at import: Dynamo of torch 2.11 cannot trace `find_spec`.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


@functools.cache
def _triton_runs(device_type: str) -> bool:
    if not _HAS_TRITON:
        return False
    # Triton's switch for its interpreter, in which the kernels are tested without a GPU.
    return device_type in ("cuda", "xpu") or (
        device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )


def uses_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the portable Triton kernels run on this device; otherwise their PyTorch twins run."""
    if _planned is not None:
        return dtype in TRITON_DTYPES
    return dtype in TRITON_DTYPES and _triton_runs(device.type) and not _computes_shapes_alone()


def _computes_shapes_alone() -> bool:
    """Whether a FakeTensorMode is active, whose tensors have no memory that a kernel could read."""
    if torch.compiler.is_compiling():
        return False  # the FakeTensorMode of Dynamo, under which no kernel is called
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def fused_products(device: torch.device) -> ModuleType | None:
    """The package with the products with an epilogue for the GPU generation of `device`; None if there is
    none.

    The package has

    * `DTYPES`, the operand dtypes that it supports;
    * `read` and `write`, with the arguments and results that `fused_projection.py` documents;
    * `row_bytes(V, *, stored)`, the bytes per row: its partial sums and, if `stored`, its gradient.

    The first call imports the package; `read` and `write` import Triton.
    """
    return _products_of(_generation(device) if _planned is None else _planned)


@functools.cache
def _generation(device: torch.device) -> int | None:
    """Major number of the compute capability of an NVIDIA GPU with Triton; None for other devices."""
    if device.type != "cuda" or torch.version.hip or not _triton_runs(device.type):
        return None
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def _products_of(generation: int | None) -> ModuleType | None:
    if generation not in GENERATIONS:
        return None
    return importlib.import_module(f"logitless.kernels.{GENERATIONS[generation]}")
