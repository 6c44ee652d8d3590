"""`held`: launches of a Triton kernel without a search for what has been compiled.

Triton's own path derives the compiled kernel from the operands in every launch, which costs the host as much
as the launch itself, and a small call is little else than launches. Here it is found by a key of all that
Triton compiles another kernel for.
"""

from functools import partial

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# For `triton.jit`: what changes from chunk to chunk, or from call to call, and compiles no kernel of its own.
# It is how many rows there are, and where in memory their numbers start.
OF_CHUNKS = {
    "do_not_specialize": ["C", "rows", "partial_stride", "count", "piece"],
    "do_not_specialize_on_alignment": [
        f"{name}_ptr"
        for name in (
            *("targets", "labels", "columns", "factor", "factors", "result", "row_scale"),
            *("logps", "lse", "lse_residual", "entropy", "sum_logits", "log_sum_sq", "is_top1"),
            *("g_logp", "g_lse", "g_entropy", "g_sum", "soft", "hard", "agreement"),
        )
    ],
}


def held(kernel: triton.JITFunction) -> "triton.JITFunction | Held":
    """The kernel, launched as before; on NVIDIA's GPUs through what was compiled for operands of the same
    kind. Elsewhere Triton looks at more: on AMD's at the size of a tensor's memory."""
    compiles = isinstance(kernel, triton.JITFunction)  # and is not interpreted
    return Held(kernel) if compiles and torch.version.cuda is not None else kernel


class Held:
    """A kernel whose operands are positional and whose constants and launch options are keywords."""

    def __init__(self, kernel: triton.JITFunction):
        self.kernel = kernel
        self._operands = len([param for param in kernel.params if not param.is_constexpr])
        self._constants = [param.name for param in kernel.params[self._operands :]]
        self._compiled: dict[tuple, tuple] = {}

    def __getitem__(self, grid: tuple[int, ...]):
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *operands, **constants) -> None:
        key = (torch.cuda.current_device(), *map(kind, operands), *constants.items())
        if key in self._compiled:
            compiled, rest = self._compiled[key]
            compiled[(*grid, 1, 1)[:3]](*operands, *rest)
            return
        if len(operands) != self._operands:
            got = f"expected {self._operands} operands, got {len(operands)}"
            raise TypeError(f"{self.kernel.fn.__name__}: {got}; pass constants by name.")
        compiled = self.kernel[grid](*operands, **constants)
        self._compiled[key] = compiled, [constants[name] for name in self._constants]


def kind(x: object) -> object:
    """What Triton tells operands apart by: of integers if they are 1 or multiples of 16, and their width."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, tuple(x.block_shape)
    return type(x)
