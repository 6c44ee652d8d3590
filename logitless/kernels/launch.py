"""`cached_launch`: cached launches of Triton kernels.

In every launch, Triton specializes the operands and calls its launch hooks, which nearly doubles the host
time of the launch. The time of a small call, or of a step of a small model, consists mostly of launches.
`cached_launch` looks up the compiled kernel by a key of all properties on which Triton specializes.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

# Options of `triton.jit`: do not specialize kernels on properties that change between chunks or calls, which
# are the number of rows and the alignment of per-row vectors.
OF_CHUNKS = {
    "do_not_specialize": ["C", "rows", "partial_stride", "count", "piece"],
    "do_not_specialize_on_alignment": [
        f"{name}_ptr"
        for name in (
            *("targets", "labels", "columns", "factor", "factors", "result", "row_scale"),
            *("supervised", "y_supervised"),
            *("logps", "lse", "lse_residual", "entropy", "is_top1", "sum_logits", "log_sum_sq"),
            *("g_logp", "g_lse", "g_entropy", "g_sum", "soft", "hard", "agreement"),
            *("acceptance", "teacher_rows", "teacher_lse", "teacher_residual"),
            *("ids", "z", "read_lse", "read_residual", "read_entropy", "rest"),
            *("g_logps", "g_rest", "entries", "values"),
            *("x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "sums"),
        )
    ],
}


def cached_launch(kernel: triton.JITFunction) -> "triton.JITFunction | CachedLaunch":
    """Wrap a kernel so that a launch reuses the kernel compiled for operands with the same specialization.

    The launch syntax is still `kernel[grid](...)`. On GPUs of other vendors than NVIDIA, the kernel is
    returned unchanged, because Triton specializes on more properties there, such as the size of a tensor's
    storage on AMD GPUs.
    """
    compiles = isinstance(kernel, triton.JITFunction)  # False in Triton's interpreter
    return CachedLaunch(kernel) if compiles and torch.version.cuda is not None else kernel


class CachedLaunch:
    """A kernel with cached launches.

    Operands are positional arguments, constexprs and options are keywords.
    """

    def __init__(self, kernel: triton.JITFunction):
        self.kernel = kernel
        self._operands = len([param for param in kernel.params if not param.is_constexpr])
        self._constants = [param.name for param in kernel.params[self._operands :]]
        self._compiled: dict[tuple, tuple] = {}

    def __getitem__(self, grid: tuple[int, ...]):
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *operands, **constants) -> None:
        device = torch.cuda.current_device()
        key = (device, *specialization_key(operands), *constants, *constants.values())
        cached = self._compiled.get(key)
        if cached is None:
            self._compiled[key] = self._compile(grid, operands, constants)
            return
        compiled, rest = cached
        hooks = knobs.runtime
        if has_hooks(hooks.launch_enter_hook) or has_hooks(hooks.launch_exit_hook):
            compiled[(*grid, 1, 1)[:3]](*operands, *rest)
            return
        # The same call as `compiled[grid]`, without launch metadata and hooks.
        stream = driver.active.get_current_stream(device)
        unheard = (None, None, None)
        launch = compiled.run
        loaded = (compiled.function, compiled.packed_metadata)
        launch(*(*grid, 1, 1)[:3], stream, *loaded, *unheard, *operands, *rest)

    def _compile(self, grid: tuple[int, ...], operands: Sequence, constants: dict) -> tuple:
        """Compile and launch with the launcher of Triton.

        Returns:
            (the compiled kernel, the constexpr values to pass after the operands in every later launch).
        """
        if len(operands) != self._operands:
            got = f"expected {self._operands} operands, got {len(operands)}"
            raise TypeError(f"{self.kernel.fn.__name__}: {got}; pass constants by name.")
        compiled = self.kernel[grid](*operands, **constants)
        return compiled, [constants[name] for name in self._constants]


def has_hooks(hook: object) -> bool:
    """Whether a launch hook has listeners, such as a profiler. A hook chain of Triton may be empty."""
    return bool(getattr(hook, "calls", hook))


def specialization_key(operands: Sequence) -> list:
    """Specialization key of the operands, with the properties on which Triton specializes.

    Integers: whether equal to 1, multiple of 16 or neither, and whether 32 or 64 bits. Tensors: dtype and
    16-byte alignment. Tensor descriptors: dtype and block shape. Other operands: type.

    This is a single expression, because it runs in every launch for up to thirty operands.
    """
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
