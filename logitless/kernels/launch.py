"""`cached_launch`: cached launches of Triton kernels.

In every launch, Triton specializes the operands and calls its launch hooks, which nearly doubles the host
time of the launch. The time of a small call, or of a step of a small model, consists mostly of launches.
`cached_launch` looks up the compiled kernel by a key of all properties on which Triton specializes.
"""

import functools
from collections.abc import Sequence
from operator import attrgetter

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
            *("g_logp", "g_lse", "g_entropy", "g_sum", "upstream", "soft", "hard", "agreement"),
            *("acceptance", "teacher_rows", "teacher_lse", "teacher_residual"),
            *("ids", "z", "read_lse", "read_residual", "read_entropy", "rest"),
            *("g_logps", "g_rest", "entries", "values"),
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
        self._operands = [param for param in kernel.params if not param.is_constexpr]
        self._constants = [param.name for param in kernel.params[len(self._operands) :]]
        self._specializations: dict[tuple[type, ...], Specialization] = {}
        self._compiled: dict[tuple, tuple] = {}

    def __getitem__(self, grid: tuple[int, ...]):
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *operands, **constants) -> None:
        device = torch.cuda.current_device()
        key = self.key(device, operands, constants)
        cached = self._compiled.get(key)
        if cached is None:
            self._compiled[key] = self._compile(grid, operands, constants)
        else:
            launch(device, grid, cached, operands)

    def key(self, device: int, operands: Sequence, constants: dict) -> tuple:
        """All on which the compiled kernel depends."""
        types = (*map(type, operands),)
        specialization = self._specializations.get(types)
        if specialization is None:
            specialization = self._specializations[types] = Specialization(types, self._operands)
        return device, types, *specialization.key(operands), *constants, *constants.values()

    def compiled(self, device: int, operands: Sequence, constants: dict) -> tuple | None:
        """What an earlier launch compiled for operands of this specialization: see `_compile`."""
        return self._compiled.get(self.key(device, operands, constants))

    def _compile(self, grid: tuple[int, ...], operands: Sequence, constants: dict) -> tuple:
        """Compile and launch with the launcher of Triton.

        Returns:
            (the compiled kernel, the constexpr values to pass after the operands in every later launch).
        """
        compiled = self.kernel[grid](*operands, **constants)
        return compiled, [constants[name] for name in self._constants]


class BoundLaunch:
    """A kernel with its constants, for operands of one specialization: a launch looks nothing up.

    The caller has another one for operands that differ in anything on which Triton specializes the kernel
    (`Specialization`).
    """

    def __init__(self, kernel: "triton.JITFunction | CachedLaunch", **constants):
        self.kernel = kernel
        self.constants = constants
        self._compiled: dict[int, tuple] = {}

    def __call__(self, grid: tuple[int, ...], *operands) -> None:
        if not isinstance(self.kernel, CachedLaunch):
            self.kernel[grid](*operands, **self.constants)
            return
        device = torch.cuda.current_device()
        cached = self._compiled.get(device)
        if cached is None:
            self.kernel[grid](*operands, **self.constants)
            self.look_up(*operands)
        else:
            launch(device, grid, cached, operands)

    def look_up(self, *operands) -> None:
        """Find what an earlier launch of the kernel compiled, if there was one."""
        if isinstance(self.kernel, CachedLaunch):
            device = torch.cuda.current_device()
            cached = self.kernel.compiled(device, operands, self.constants)
            if cached is not None:
                self._compiled[device] = cached


def launch(device: int, grid: tuple[int, ...], cached: tuple, operands: Sequence) -> None:
    """Launch a compiled kernel: the same call as `compiled[grid]`, without launch metadata and hooks."""
    compiled, rest = cached
    x, y, z = (*grid, 1, 1)[:3]
    hooks = knobs.runtime
    if has_hooks(hooks.launch_enter_hook) or has_hooks(hooks.launch_exit_hook):
        compiled[x, y, z](*operands, *rest)
        return
    stream = driver.active.get_current_stream(device)
    loaded = compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, stream, *loaded, None, None, None, *operands, *rest)


def has_hooks(hook: object) -> bool:
    """Whether a launch hook has listeners, such as a profiler. A hook chain of Triton may be empty."""
    return bool(getattr(hook, "calls", hook))


class Specialization:
    """On which properties of its operands Triton specializes a kernel, for operands of given types.

    Tensors: dtype and, unless the kernel declares otherwise, 16-byte alignment. Tensor descriptors: dtype and
    block shape. Integers: whether 32 or 64 bits and, unless the kernel declares otherwise, whether equal to
    1, a multiple of 16, or neither.
    """

    def __init__(self, types: Sequence[type], params: Sequence):
        """`types` of the operands, and the parameters of the kernel that they are passed for."""
        if len(types) != len(params):
            got = f"expected {len(params)} operands, got {len(types)}"
            raise TypeError(f"{', '.join(param.name for param in params)}: {got}; pass constants by name.")
        tensors = [i for i, each in enumerate(types) if issubclass(each, Tensor)]
        aligned = [i for i in tensors if not _is_declared(params[i], "_on_alignment")]
        integers = [i for i, each in enumerate(types) if each is int]
        self._tensors = tensors
        self._aligned = [i for i in aligned if not _is_declared(params[i])]
        self._descriptors = [i for i, each in enumerate(types) if issubclass(each, TensorDescriptor)]
        self._sizes = [i for i in integers if not _is_declared(params[i])]
        self._numbers = [i for i in integers if _is_declared(params[i])]

    def key(self, operands: Sequence) -> list:
        """The properties. It runs in every launch, for up to thirty operands."""
        return [
            *map(_dtype, map(operands.__getitem__, self._tensors)),
            *[operands[i].data_ptr() & 15 == 0 for i in self._aligned],
            *map(_kind_of_size, map(operands.__getitem__, self._sizes)),
            *[-(2**31) <= operands[i] < 2**31 for i in self._numbers],
            *[(x.base.dtype, *x.block_shape) for x in map(operands.__getitem__, self._descriptors)],
        ]


_dtype = attrgetter("dtype")


@functools.lru_cache(maxsize=1024)
def _kind_of_size(x: int) -> tuple[bool, int]:
    """(whether `x` has 32 bits; 1 if it is 1, 16 if it is a multiple of 16, else 0)."""
    return -(2**31) <= x < 2**31, 1 if x == 1 else 0 if x & 15 else 16


def _is_declared(param: object, kind: str = "") -> bool:
    """Whether the kernel declares that Triton does not specialize on this parameter (`OF_CHUNKS`)."""
    return getattr(param, f"do_not_specialize{kind}")
