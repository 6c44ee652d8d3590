"""The pass of a small call as a CUDA graph.

The kernels of a call with few tokens take less time than the host takes to launch them one by one. The pass
over static rows (`static_rows`), or over those of the last calls (`early_projection`), has no host sync until
all its kernels are queued. If calls with equal keys come again and again, their kernels are captured once and
replayed afterwards: the same kernels, with the same results.

A call is looked up by its arguments (`Replayable`), before the loss checks them. The graph begins with what
the loss computes from the arguments: a mask, a shift, the inputs of its terms. It clamps the targets, counts
what contradicts the assumption of the pass, copies the counts to the host, and has the pass except for
product 3. Outside of the graph, the call copies its tensors to the addresses that the graph reads,
and computes product 3, so that d_weight is a new tensor, or copies its operands for a compiled graph, whose
backward pass computes it. The head is read at its own address, which is a part of the key.

With static rows and with compact=False, the graph projects all rows and masks the ignored ones, which may be
others in every call. With compact=False, it asserts faults on the device.

All graphs of a stream share one memory pool. A lock is held from a replay until the kernels that read its
results are queued, so no result has to survive in the pool until another replay.
"""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from logitless.engine.budget import plan_for
from logitless.engine.call import HeadCall, Named, Replayable
from logitless.engine.compiled import is_capturing, is_observed, is_of_library, is_switched_off
from logitless.engine.early_projection import Assume, Streak
from logitless.engine.gradients import Gradients, Solved
from logitless.engine.host_copy import HostCopy
from logitless.engine.operands import is_same
from logitless.engine.plan import Pass
from logitless.engine.projection import Chunk, Projection
from logitless.engine.remembered import Remembered
from logitless.engine.rows import Rows
from logitless.engine.spec import LossSpec, Role
from logitless.engine.static_rows import SHARE, holds, total_memory
from logitless.kernels.matmul import add_product
from logitless.parallel.groups import PLAIN

logger = logging.getLogger(__name__)

# Device types on which passes are captured. ROCm has no external events, which `HostCopy` needs in a graph.
CAPTURES_ON = ("cuda",) if not torch.version.hip and os.environ.get("LOGITLESS_CUDA_GRAPHS") != "0" else ()
# A pass is captured in this many-th call with its key; over the rows of the last calls, of those that are
# projected early. A capture takes as long as some calls.
SIGHTINGS = 3
# The most passes that are kept. The least recently used one gives its place to a new one, if it was not used
# in the last STALE calls.
MAX_PASSES, STALE = 16, 256
# Key -> number of calls so far; None: the pass was captured, or its capture failed.
_SEEN = Remembered()
_PASSES: dict[Hashable, "CapturedPass"] = {}
_LOCK = threading.Lock()

# The pass: (call, its rows, the sums of its gradients) -> `Solved`.
Solve = Callable[[HeadCall, Rows, Gradients], Solved]


def is_eligible(loss: LossSpec, hidden: object, weight: object, targets: object) -> bool:
    """Whether the pass of a call may be captured: it is small, and runs the code of this library alone."""
    if not (type(hidden) in PLAIN and type(weight) in PLAIN and type(targets) in PLAIN):
        return False
    device = weight.device
    if device.type not in CAPTURES_ON or not loss.identity or not is_of_library(loss):
        return False
    if weight.dim() != 2 or not hidden.is_floating_point():
        return False
    return (
        targets.numel() * weight.shape[0] * 2 <= most_bytes(device)  # two bytes are the least of a logit
        and not is_switched_off()
        and not is_observed()
        and not torch.is_inference_mode_enabled()
        and not is_capturing(device)
    )


def replayable(
    loss: LossSpec, given: Named, heads: Named, options: Hashable, bind: Callable[[Named], HeadCall]
) -> Replayable | None:
    """Return an eligible call as a `Replayable`; None if its tensors do not allow a capture.

    Args:
        loss, given, heads, bind: as in `Replayable`.
        options: what else the kernels depend on.
    """
    targets = given["targets"]
    device = heads["weight"].device
    matmul = torch.backends.cuda.matmul
    key: list[Hashable] = [
        type(loss),
        loss.identity,
        options,
        torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None,
        torch.is_grad_enabled(),
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
        torch.get_default_dtype(),
        matmul.fp32_precision,  # `allow_tf32` raises an error where this one was set
        matmul.allow_bf16_reduced_precision_reduction,
        device,
    ]
    for tensors in (given, heads):
        for name, x in tensors.items():
            key.append(name)
            if x is None:
                continue
            if type(x) not in PLAIN or x.device != device or x.layout is not torch.strided:
                return None
            key += (x.shape, x.stride(), x.dtype, x.requires_grad)
            if tensors is heads:
                key.append(x.data_ptr())
                continue
            # The graph reads contiguous rows, and so does the uncaptured pass of these tensors. Labels and
            # masks become contiguous where the uncaptured pass flattens them.
            in_rows = x.is_floating_point() or x.shape != targets.shape
            if in_rows and x.dim() > 1 and not x.is_contiguous():
                if x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:
                    return None
            key.append(is_same(x, targets))
    return Replayable(loss, tuple(key), given, heads, bind)


def replayed(call: Replayable) -> Solved | None:
    """The result of the captured pass of a call; None if there is none, or if other rows are supervised."""
    if not _LOCK.acquire(blocking=False):
        return None  # another thread captures or replays a pass
    try:
        CapturedPass.calls += 1
        captured = _PASSES.get(call.key)
        if captured is None or not captured.is_expected():
            return None
        solved = captured.result(call)
        if solved is None and captured.streak is not None:
            captured.streak.end()
        return solved
    finally:
        _LOCK.release()


def captured_solve(
    call: HeadCall,
    assume: Assume,
    streak: Streak | None,
    solve: Solve,
    options: Mapping[str, bool | int],
) -> tuple[bool, Solved | None]:
    """Run a call by its captured pass, which is captured if its key has come often enough.

    Args:
        call: a call of one head.
        assume: its rows, before the host has read which are supervised.
        streak: the streak that expects them; None if the rows do not depend on earlier calls.
        solve: the pass.
        options: `fixed_dtypes` and `kept_rows` of its `Gradients`.

    Returns:
        (False, None): there is no captured pass. (True, None): it ran, but the assumption is wrong.
        (True, result): what `solve` returns.
    """
    if not (call.loss.compact or _on_default_stream(call.weight.device)):
        # Before a whole step is captured, by hand or by torch.compile, some steps run on another stream.
        return False, None
    raw = call.replayable or _of_head_call(call, options)
    if raw is None or not _LOCK.acquire(blocking=False):
        return False, None
    try:
        CapturedPass.calls += call.replayable is None  # `replayed` has counted the others
        make = partial(CapturedPass, raw, call, assume, streak, solve, options)
        captured = _PASSES.get(raw.key) or _new_pass(raw, make)
        if captured is None:
            return False, None
        if call.replayable is not None and captured.last_wrong == CapturedPass.calls:
            return True, None  # `replayed` has run it
        if streak is not None:
            captured.expected = streak.last.rows
        return True, captured.result(raw)
    finally:
        _LOCK.release()


def _on_default_stream(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def _of_head_call(call: HeadCall, options: Mapping[str, bool | int]) -> Replayable | None:
    """The checked call: in a compiled graph, and if the arguments do not allow a capture."""
    if not is_eligible(call.loss, call.hidden, call.weight, call.targets):
        return None
    given = {"hidden": call.hidden, "targets": call.targets, "num_items": call.num_items}
    heads = {"weight": call.weight, "bias": call.bias}
    for name, x in call.inputs.items():
        (heads if call.loss.roles[name] is Role.HEAD else given)[name] = x

    def bind(static: Named) -> HeadCall:
        inputs = {name: static.get(name, x) for name, x in call.inputs.items()}
        moved = call.with_targets(static["targets"], inputs)
        moved.__dict__.update(hidden=static["hidden"], num_items=static["num_items"])
        return moved

    parts = call.dtype, call.needs, call.indices, call.coefficient, call.sequence_count
    return replayable(call.loss, given, heads, (*options.values(), *parts), bind)


def forget() -> None:
    """Drop all captured passes, which frees their memory."""
    with _LOCK:
        _PASSES.clear()
        _SEEN.clear()
        _POOLS.clear()


def _drop(key: Hashable) -> None:
    """Drop the pass of a key, which may be captured again."""
    _PASSES.pop(key, None)
    _SEEN[key] = 0


def _new_pass(raw: Replayable, make: "Callable[[], CapturedPass]") -> "CapturedPass | None":
    """Capture the pass of a call, if its key has come often enough."""
    seen = _SEEN.get(raw.key, 0)
    if seen is None:
        return None
    _SEEN[raw.key] = seen + 1
    if seen + 1 < SIGHTINGS:
        return None
    if len(_PASSES) >= MAX_PASSES:
        oldest = min(_PASSES, key=lambda other: _PASSES[other].last_use)
        if CapturedPass.calls - _PASSES[oldest].last_use < STALE:
            return None
        _drop(oldest)
    _SEEN[raw.key] = None
    name = type(raw.loss).__name__
    try:
        captured = make()
    except Exception as error:
        # Not a warning: the results are the same, and the caller can do nothing about it.
        logger.info("%s is not captured: %s: %s", name, type(error).__name__, error)
        return None
    logger.debug("%s with %s tokens is captured as a CUDA graph", name, raw.given["targets"].numel())
    _PASSES[raw.key] = captured
    return captured


def most_bytes(device: torch.device) -> int:
    """The most bytes of a chunk that is captured, which keeps them between calls.

    On a GPU with 80 GB, these are 1,024 rows of 151,936 fp32 logits, or 2,048 in bf16.
    """
    return int(SHARE * total_memory(device))


class _Recorder(Gradients):
    """The sums of the gradients without product 3, whose operands are kept.

    Attributes:
        operands: the gradient of the logits (rows, V) and the features (rows, H).
        dtype: of d_weight.
    """

    operands: tuple[Tensor, Tensor] | None = None
    dtype: torch.dtype | None = None

    def _sum_of_weight(self, call: HeadCall, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def add(self, chunk: Chunk, projection: Projection) -> None:
        if self.dtype is not None:
            self.operands = chunk.gradient, chunk.trained
        super().add(chunk, projection)

    def close(self, call: HeadCall, projection: Projection, deferred: float | Tensor) -> None:
        if type(projection) is not Projection:
            raise RuntimeError("its products are gathered")
        super().close(call, projection, deferred)


class CapturedPass:
    """The captured pass of one key.

    It keeps the rows, which are in the memory of the graph unless a streak expects them, but no tensor of the
    call.

    Attributes:
        calls: number of calls so far that may be captured.
        streak, expected: the streak whose rows are those of this pass, and these rows; None if its rows do
            not depend on earlier calls.
        last_use, last_wrong: `calls` when this pass was last replayed, and when its assumption was wrong.
    """

    calls: ClassVar[int] = 0

    def __init__(
        self,
        raw: Replayable,
        call: HeadCall,
        assume: Assume,
        streak: Streak | None,
        solve: Solve,
        options: Mapping[str, bool | int],
    ):
        device = call.weight.device
        assumed = assume(call)
        chosen = assumed.rows
        gradients = Gradients([call], **options)
        plan = plan_for(assumed.call, chosen, Pass.SOLVE, wide_d_weight=gradients.sums_wide(call))
        if plan.d_weight_parts > 1:
            raise RuntimeError("it has several chunks")
        # With `kept_rows`, each replay copies the gradient of the logits, which takes longer than launches.
        if plan.chunk_bytes > most_bytes(device) // (2 if options["kept_rows"] else 1):
            raise RuntimeError(f"its chunk takes {plan.chunk_bytes:,} bytes")
        if call.frozen is not None or call.dtype == torch.float16:
            raise RuntimeError("it has a frozen part of the head, or products in fp16")
        if call.trainable and call.indices.hidden == call.indices.weight:
            raise RuntimeError("the hidden states are the head, whose gradient has terms of both")
        if not all([x is None or x.dtype == call.dtype for x in raw.heads.values()]):
            raise RuntimeError("the graph would hold a copy of a head")
        self.last_use = CapturedPass.calls
        self.last_wrong = -1
        self.streak = streak
        self.expected = None if streak is None else chosen
        self._tokens_assumed = assumed.tokens
        self._every = chosen.count == call.targets.shape[0]
        self._fixed_dtypes, self._kept_rows = options["fixed_dtypes"], options["kept_rows"]
        self._trainable, self._index = call.trainable, call.indices.weight
        self._static = {
            name: None if x is None else torch.empty_like(x, requires_grad=False)
            for name, x in raw.given.items()
        }
        for name, x in raw.given.items():  # an input may be the targets themselves
            if is_same(x, raw.given["targets"]):
                self._static[name] = self._static["targets"]
        with torch.no_grad():
            self._load(raw.given)
        # These follow from which tensors require a gradient, and the static ones do not.
        known = {name: getattr(call, name) for name in ("needs", "indices", "trainable")}
        bind = raw.bind

        def bound() -> HeadCall:
            static = bind(self._static)
            static.__dict__.update(known)
            return static

        self._unread = None if assumed.unread is None else HostCopy(assumed.unread, repeats=True)

        def run() -> tuple[Solved, tuple[Tensor, Tensor] | None, torch.dtype | None]:
            assumed = assume(bound())
            recorder = _Recorder([assumed.call], fixed_dtypes=self._fixed_dtypes)
            unread = assumed.unread
            with contextlib.nullcontext() if unread is None else _copied_beside(self._unread, unread):
                return solve(assumed.call, assumed.rows, recorder), recorder.operands, recorder.dtype

        self._replay, (solved, product, self._dtype) = capture(run, device)
        self._plan = solved.plan
        # Rows that do not depend on earlier calls are computed by the graph.
        in_graph = streak is None
        self._rows = Rows(*map(_unowned, solved.rows)) if in_graph else chosen
        self._loss, self._metrics, self._deferred = map(
            _unowned, (solved.loss, solved.metrics, solved.deferred)
        )
        self._tokens = list(map(_unowned, solved.tokens))
        self._sums = {index: _unowned(x) for index, x in solved.sums.items()}
        # What the backward pass reads of the rows. A compiled graph reads the targets instead
        # (`base._supervised_in_graph`).
        supervised = {} if self._fixed_dtypes else solved.supervised
        guards = {id(x): x for x in supervised.values()}
        self._guards = [_unowned(x) if in_graph else x for x in guards.values()]
        self._supervised = {index: list(guards).index(id(x)) for index, x in supervised.items()}
        self._product = None
        if product is not None:
            gradient, features = map(_unowned, product)
            self._product = gradient.t(), features

    def is_expected(self) -> bool:
        """Whether the last calls had the supervised rows of this pass."""
        if self.streak is None:
            return True
        if not self.streak.is_long():
            return False
        last = self.streak.last
        return last.every if self._every else last.rows is self.expected

    def _load(self, given: Named) -> None:
        for x, static in zip(given.values(), self._static.values(), strict=True):
            if x is not None:
                static.copy_(x)

    def result(self, raw: Replayable) -> Solved | None:
        """Run the pass on the tensors of a call with the same key; None if the assumption is wrong."""
        solved = self.run(raw)
        if solved is None and self.streak is not None:
            _drop(raw.key)  # the rows of the last calls are others now
        return solved

    def run(self, raw: Replayable) -> Solved | None:
        self.last_use = CapturedPass.calls
        with torch.no_grad():
            self._load(raw.given)
            self._replay()
            solved = self._copied_results(raw.heads)
        if self._unread is not None and not holds(self._unread.tolist(), self._tokens_assumed):
            self.last_wrong = CapturedPass.calls
            return None
        return solved

    def _copied_results(self, heads: Named) -> Solved:
        """The results as new tensors, and product 3 or copies of its operands."""
        rows = self._rows
        guards = self._guards
        if self.streak is None:  # a later replay overwrites all tensors of the graph
            guards = list(map(_new, guards))
            # A pass into a main gradient, which has computed no gradient yet, asks whether there are tokens.
            if not (self._trainable or self._fixed_dtypes):
                rows = rows._replace(tokens=_new(rows.tokens))
        sums = {index: x.clone() for index, x in self._sums.items()}
        d_logits = None
        if self._product is not None and self._kept_rows:
            transposed, features = self._product
            d_logits, sums[self._index] = self._kept(transposed.t()), self._kept(features)
        elif self._product is not None:
            weight = heads["weight"]
            total = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
            add_product(total, *self._product, first=True)
            sums[self._index] = total.to(weight.dtype) if self._fixed_dtypes else total
        return Solved(
            self._loss.clone(),
            self._metrics.clone(),
            [x.clone() for x in self._tokens],
            _new(self._deferred),
            sums,
            {index: guards[at] for index, at in self._supervised.items()},
            d_logits,
            self._plan,
            rows,
        )

    def _kept(self, x: Tensor) -> Tensor:
        """A copy of an operand of product 3."""
        kept = x.new_empty(self._kept_rows, x.shape[1])
        kept[: x.shape[0]] = x
        return kept


def _new(x: object) -> object:
    return x.clone() if isinstance(x, Tensor) else x


# -- CUDA graphs

# Device and stream -> the first graph of its memory pool, and the stream on which all graphs of the pool are
# captured: the allocator reuses memory on one stream.
_POOLS: dict[tuple[torch.device, int], tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]] = {}


def capture(run: Callable[[], object], device: torch.device) -> tuple[Callable[[], None], object]:
    """Capture the kernels that `run` launches.

    Returns:
        (a function that launches them again; what `run` returned, tensors that the kernels write).
    """
    place = device, torch.cuda.current_stream(device).cuda_stream
    if place not in _POOLS:
        stream = torch.cuda.Stream(device)
        # The allocator frees a pool without graphs, and its handle is then invalid: this graph stays.
        _POOLS[place] = (
            _capture_on(stream, lambda: torch.zeros(1, dtype=torch.int32, device=device))[0],
            stream,
        )
    first, stream = _POOLS[place]
    try:
        graph, results = _capture_on(stream, run, first.pool())
    except Exception:
        del _POOLS[place]  # PyTorch may take no other capture into the pool
        raise
    return graph.replay, results


def _capture_on(
    stream: torch.cuda.Stream, run: Callable[[], object], pool: object = None
) -> tuple[torch.cuda.CUDAGraph, object]:
    current = torch.cuda.current_stream(stream.device)
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            # Other threads, such as those that pin memory, may do what a capture forbids.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                results = run()
            finally:
                graph.capture_end()
    except Exception:
        _leave_capture_mode(stream.device, pool)
        raise
    current.wait_stream(stream)
    return graph, results


@functools.cache
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _copied_beside(numbers: HostCopy, x: Tensor) -> Iterator[None]:
    """Copy `x` to the host at once, on a side stream: the host does not wait for the kernels of the body, and
    these do not wait for the copy."""
    if x.device.type != "cuda":
        numbers.copy(x)
        yield
        return
    main = torch.cuda.current_stream(x.device)
    side = _side_stream(x.device, main.cuda_stream)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            numbers.copy(x)
        yield
    finally:
        main.wait_stream(side)  # before the capture ends


def _leave_capture_mode(device: torch.device, pool: object) -> None:
    """Restore the state of PyTorch after a capture that failed.

    If the begin or the end of a capture raises an error, PyTorch leaves the allocator and the random
    generator of the device in the mode of a capture, in which random operations outside of a capture raise
    errors.
    """
    if pool is not None:
        # An error where the capture ended as usual.
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, dtype=torch.int32, device=device)
        graph.capture_end()


class _Memory:
    """Memory of the pool, for `torch.as_tensor`."""

    def __init__(self, pointer: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _unowned(x: object) -> object:
    """A tensor at the same address, which does not keep the memory from other graphs of the pool."""
    if not isinstance(x, Tensor) or not x.is_cuda:
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_like(x)
    block = _Memory(storage.data_ptr(), storage.nbytes())
    memory = torch.as_tensor(block, dtype=torch.uint8, device=x.device)
    return memory.view(x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())
