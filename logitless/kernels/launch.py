"""`held`: launches of a Triton kernel without a search for what has been compiled.

Triton's own path derives the compiled kernel from the operands in every launch and calls its hooks, which
costs the host nearly as much again as the launch itself; a small call, or a step of a small model, is little
else than launches. Here the kernel is found by a key of all that Triton compiles another one for.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
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
            *("ids", "z", "read_lse", "read_residual", "read_entropy", "rest"),
            *("g_logps", "g_rest", "entries", "values"),
            *("x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "sums"),
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
        device = torch.cuda.current_device()
        key = (device, *kinds(operands), *constants, *constants.values())
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = self._compile(grid, operands, constants)
            return
        compiled, rest = found
        hooks = knobs.runtime
        if heard(hooks.launch_enter_hook) or heard(hooks.launch_exit_hook):
            compiled[(*grid, 1, 1)[:3]](*operands, *rest)
            return
        # What `compiled[grid]` does where nobody listens: no metadata and no hooks.
        stream, unheard = driver.active.get_current_stream(device), (None, None, None)
        launch, loaded = compiled.run, (compiled.function, compiled.packed_metadata)
        launch(*(*grid, 1, 1)[:3], stream, *loaded, *unheard, *operands, *rest)

    def _compile(self, grid: tuple[int, ...], operands: Sequence, constants: dict) -> tuple:
        """Launch by Triton's own path, and what the next launches take."""
        if len(operands) != self._operands:
            got = f"expected {self._operands} operands, got {len(operands)}"
            raise TypeError(f"{self.kernel.fn.__name__}: {got}; pass constants by name.")
        compiled = self.kernel[grid](*operands, **constants)
        return compiled, [constants[name] for name in self._constants]


def heard(hook: object) -> bool:
    """Whether a profiler listens: Triton's own hooks are lists that may be empty."""
    return bool(getattr(hook, "calls", hook))


def kinds(operands: Sequence) -> list:
    """What Triton tells operands apart by: of integers if they are 1 or multiples of 16, and their width. In
    one expression, as a launch has up to thirty."""
    return [
        ((1 if x == 1 else 0 if x & 15 else 16) if -(2**31) <= x < 2**31 else 3 if x & 15 else 4)
        if type(x) is int
        else (x.dtype, x.data_ptr() & 15 == 0)
        if isinstance(x, Tensor)
        else (x.base.dtype, *x.block_shape)
        if isinstance(x, TensorDescriptor)
        else type(x)
        for x in operands
    ]
