"""What the tests share: the one tolerance rule, a run of a loss with all its gradients, and the watchers of
memory and GEMMs."""

import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logitless.engine.base import FusedLinearBase
from logitless.tools.check import allowed_error, relative_error

# Where the tests of losses and kernels run; tests/conftest.py makes it the default device of the former.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sum_error(naive_terms: Tensor, truth_terms: Tensor) -> float:
    """Error to expect of a sum whose terms are naive: root sum of squares of their errors, relative to the
    true sum.

    The error of one naive number can be zero by luck, which would make the tolerance of a scalar loss a
    lottery.
    """
    return ((naive_terms.double() - truth_terms).norm() / truth_terms.sum().abs()).item()


def row_product_error(weight: Tensor) -> float:
    """The relative error of the product of one row with the weight (V, H), by the machine's BLAS.

    Some add all V products of a row one after the other, but not those of several rows: 5e-6 with V 50,257.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    row = torch.randn(1, weight.shape[0], generator=generator, dtype=weight.dtype, device=weight.device)
    return relative_error(row @ weight, row.double() @ weight.double())


def assert_close(
    actual: Tensor, truth: Tensor, naive: Tensor | float, *, name: str, allow_zero: bool = False
) -> None:
    """The 2x-naive rule: relative L2 error against the fp64 truth at most `2 * naive + 8 *
    eps(actual.dtype)`.

    Args:
        actual: what the library returned; must be finite and have the truth's shape.
        truth: the fp64 reference.
        naive: the reference in the operands' dtype, whose dtype `actual` must then have; or its relative
            error, as a number.
        name: what is compared, for the message.
        allow_zero: whether the truth may be all zeros (then `actual` must be zero too). Off by default, as a
            gradient that is zero on both sides shows nothing.
    """
    assert isinstance(actual, Tensor), f"{name}: no tensor, got {actual!r}"
    assert truth.dtype == torch.float64, f"{name}: the truth is in {truth.dtype}"
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    assert actual.isfinite().all(), f"{name}: not finite"
    if isinstance(naive, Tensor):
        assert actual.dtype == naive.dtype, f"{name}: dtype {actual.dtype}, expected {naive.dtype}"

    eps = torch.finfo(actual.dtype).eps
    if truth.norm() == 0:
        assert allow_zero, f"{name}: the truth is zero, so the comparison is vacuous"
        assert actual.abs().sum() <= eps, f"{name}: {actual.abs().max().item():.2e}, expected 0"
        return
    naive_error = relative_error(naive, truth) if isinstance(naive, Tensor) else naive
    assert math.isfinite(naive_error), f"{name}: the naive computation is not finite"
    error, allowed = relative_error(actual, truth), allowed_error(naive_error, actual.dtype)
    assert error <= allowed, (
        f"{name}: relative error {error:.2e} > {allowed:.2e} = 2 * {naive_error:.2e} (naive) + 8 eps"
    )


def assert_metrics_close(actual: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    """The same names, and numbers within `tolerance`, absolute below 1 and relative above."""
    assert set(actual) == set(truth)
    for name, value in truth.items():
        assert abs(actual[name].item() - value.item()) <= tolerance * max(1.0, abs(value.item())), name


@dataclass
class Outcome:
    """What a loss gave: its value, the gradients of the operands that asked for one, and its unprocessed
    return value."""

    value: Tensor
    grads: dict[str, Tensor | None]
    output: object


def run(
    loss_fn: Callable,  # (hidden, weight, targets, *, bias) -> Tensor or LossOutput
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    bias: Tensor | None = None,  # (V,)
    upstream: Tensor | float | None = None,  # gradient of the value, ones by default
    requires: Iterable[str] = ("hidden", "weight", "bias"),
) -> Outcome:
    """Calls a loss on fresh leaves and takes it back: the value and the gradients of the operands named in
    `requires`."""
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    leaves = {
        name: tensor.detach().clone().requires_grad_(name in requires)
        for name, tensor in given.items()
        if tensor is not None
    }
    output = loss_fn(leaves["hidden"], leaves["weight"], targets, bias=leaves.get("bias"))
    value = output if isinstance(output, Tensor) else output.loss
    trainable = [name for name, leaf in leaves.items() if leaf.requires_grad]
    assert value.requires_grad == bool(trainable), (
        f"requires_grad is {value.requires_grad} with {trainable} trainable"
    )
    if trainable:
        ones = torch.ones_like(value)
        value.backward(
            ones
            if upstream is None
            else ones * torch.as_tensor(upstream, dtype=value.dtype, device=value.device)
        )
    return Outcome(value.detach(), {name: leaves[name].grad for name in trainable}, output)


# Of torch itself: torch 2.11's compiler fails where 2.13's does not.
NEW_DYNAMO = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def uncompiled() -> AbstractContextManager:
    """A LogitsLoss evaluates its function as it is: compiling takes seconds, and the numbers are the same.

    Nothing else is compiled either. Tests of an outer `torch.compile` put it into `set_stance("default")`, or
    have the function alone left as it is by `EngineCalls(uncompiled=True)`.
    """
    return torch.compiler.set_stance("force_eager")


def run_uncompiled(rank: int, function: Callable, *args) -> None:
    """One rank's `function(rank, *args)`; for `tests.ranks.forked`."""
    with uncompiled():
        function(rank, *args)


class EngineCalls(TorchDispatchMode):
    """Notes the operators of namespace `logitless` that compiled graphs run: `operators`, by name, in order.

    A pass through the engine is one operator in a graph, whatever the number of chunks. In eager mode none is
    called: see `eager_calls`.

    Args:
        uncompiled: the function of a LogitsLoss is not compiled for itself inside of the operators.
    """

    def __init__(self, *, uncompiled: bool = False) -> None:
        super().__init__()
        self.operators: list[str] = []
        self._uncompiled = uncompiled

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or torch.compile would compile nothing while the mode is on."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ours = func.namespace == "logitless"
        if ours:
            self.operators.append(func.overloadpacket.__name__)
        with uncompiled() if ours and self._uncompiled else nullcontext():
            return func(*args, **(kwargs or {}))


@contextmanager
def eager_calls() -> Iterator[SimpleNamespace]:
    """Counts, as `number`, how often the engine is called in eager mode with something to differentiate."""
    calls, apply = SimpleNamespace(number=0), FusedLinearBase.apply

    def counted(*args):
        calls.number += 1
        return apply(*args)

    with mock.patch.object(FusedLinearBase, "apply", counted):
        yield calls


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Notes where the host reads a tensor's numbers: the stack of each read."""
    places: list[str] = []

    def noted(method):
        def read(x: Tensor):
            places.append("".join(traceback.format_stack(limit=6)))
            # Or the mode of a default device would come back here.
            with torch._C.DisableTorchFunction():
                return method(x)

        return read

    names = ("tolist", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__")
    with mock.patch.multiple(torch.Tensor, **{name: noted(getattr(torch.Tensor, name)) for name in names}):
        yield places


class BodyMode(TorchDispatchMode):
    """A dispatch mode that also sees what happens inside custom operators.

    PyTorch switches a mode off while an operator runs under it, so a plain mode sees a custom operator as one
    call. Here its CPU kernel runs with the mode back on, and so do the decompositions of composite operators
    such as matmul.
    """

    def __init__(self) -> None:
        super().__init__()
        self._primitive = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self._primitive:
            return self.observe(func, args, kwargs)
        if func.namespace not in ("aten", "prim", "prims"):
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self._primitive.add(func)
        return self.observe(func, args, kwargs)

    def observe(self, func, args: tuple, kwargs: dict):
        """Runs one primitive operator and takes note of it."""
        raise NotImplementedError


class AllocationWatcher:
    """Counts the bytes that allocators give while it is on, inside of operators too.

    `peak` is the most that was alive at once, `largest` the biggest single allocation. What existed before
    does not count.
    """

    def __init__(self) -> None:
        self.peak = self.largest = 0

    def __enter__(self) -> "AllocationWatcher":
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        sizes = [each.nbytes() for each in events if each.name() == "[memory]"]
        self.largest = max([self.largest, *sizes])
        self.peak = max([self.peak, *itertools.accumulate(sizes)])


class GemmCounter(BodyMode):
    """Counts the flops of every matrix product, in GEMM-equivalents: one is `2 * N * V * H`, the cost of
    `hidden @ weight.T`."""

    # Position of the left factor among the arguments; the right one follows it.
    LEFT_FACTOR = {
        "mm": 0,
        "bmm": 0,
        "mv": 0,
        "addmm": 1,
        "addmm_": 1,
        "addmv": 1,
        "addmv_": 1,
        "baddbmm": 1,
        "baddbmm_": 1,
    }

    def __init__(self, tokens: int, vocab: int, hidden: int) -> None:
        super().__init__()
        self.flops = 0
        self._unit = 2 * tokens * vocab * hidden

    @property
    def gemms(self) -> float:
        """GEMM-equivalents seen so far."""
        return self.flops / self._unit

    def observe(self, func, args, kwargs):
        position = self.LEFT_FACTOR.get(func.overloadpacket.__name__)
        if position is not None:
            left, right = args[position], args[position + 1]
            columns = right.shape[-1] if right.dim() > 1 else 1
            self.flops += 2 * left.numel() * columns
        return func(*args, **kwargs)


def captured_step(step: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """Capture a step as a CUDA graph, after three steps on a side stream: (the graph, the step's results)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
