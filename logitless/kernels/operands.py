"""Operands of the layer operators (norm, rope, gated, LoRA): checks, and views for their kernels."""

import contextlib
import functools
from collections.abc import Collection

import torch
from torch import Tensor

from logitless import errors
from logitless.kernels import TRITON_DTYPES, uses_triton

# These checks run several times per decoder layer. Therefore a message is only constructed when it is raised.


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        errors.check_choice(name, value, choices)


def check_floating(*, optional: bool = False, **operands: Tensor | None) -> None:
    for name, x in operands.items():
        if not (isinstance(x, Tensor) and x.is_floating_point()) and not (optional and x is None):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(errors.message(name, "a floating-point tensor", got, f"pass {name} as one"))


def check_device(device: torch.device, owner: str, **operands: Tensor | None) -> None:
    for name, x in operands.items():
        if x is not None and x.device != device:
            raise ValueError(
                errors.message(name, f"{owner}'s device {device}", x.device, f"move {name} there")
            )


def check_vector(size: int, **operands: Tensor | None) -> None:
    for name, x in operands.items():
        if x is not None and tuple(x.shape) != (size,):
            expected = f"shape ({size},), one entry per column"
            raise ValueError(errors.message(name, expected, tuple(x.shape), f"pass the {name} of this norm"))


def widest_dtype(x: Tensor, *others: Tensor | None) -> torch.dtype:
    """The dtype to which torch promotes these operands."""
    dtype = x.dtype
    for other in others:
        if other is not None and other.dtype != dtype:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. In a launcher, that of Triton takes 2 microseconds."""
    return -(-a // b)


def all_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the Triton kernels run for these operands, which are on one device.

    False for empty operands.
    """
    if not uses_triton(x.device, x.dtype) or x.numel() == 0:
        return False
    return all(t is None or t.dtype in TRITON_DTYPES for t in others)


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return `x` (..., H), copied if necessary, and the row stride of its (N, H) view."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    if x.stride(1) != 1:
        x = x.contiguous()
    return x, x.stride(0)


_HERE = contextlib.nullcontext()


def on_device(x: Tensor) -> contextlib.AbstractContextManager:
    """Context in which the GPU of x is the current device: Triton launches on the current device.

    The current device may be another GPU if the layers of a model are on several GPUs.
    """
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    if x.device.type == "xpu" and x.device.index != torch.xpu.current_device():
        return torch.xpu.device(x.device)
    return _HERE


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of the device. A kernel that sums over rows starts a few programs on each."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).gpu_subslice_count
    # Triton's interpreter runs the programs sequentially. Two programs are sufficient to test the sum over
    # programs.
    return 2
