"""The evaluation of a loss on a slice of rows, compiled.

* A loss of per-token statistics, of this library: `evaluate` traces its terms, their gradient by
  `torch.func.grad_and_value`, the reduction and the metrics into one graph, and compiles the graph by
  Inductor. A call of the graph checks no guards, which would take the host longer than the graph itself.
* A user's loss of per-token statistics: the same function under `torch.compile`, with its guards.
* A `LogitsLoss`: `compiled_chunk_function` is `evaluation.chunk_function` under `torch.compile`.

If compiling fails, a loss runs uncompiled: a user's loss with a warning, the library's with a line in the
log.

A graph without guards is only right if nothing that the trace read can change. Therefore it is made for
losses of this library alone, whose `terms` are pure functions of tensors and of the fields of a frozen loss;
every tensor's dtype and shape is in its key, except for the numbers of rows and of sequences, or the length
of equal sequences, which are symbols of their own; and a trace that needed any guard on a symbol is not used.
The first call of a key compares the graph with the uncompiled evaluation.
"""

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.engine import evaluation
from logitless.engine.batch import Batch
from logitless.engine.evaluation import ChunkFunction, chunk_function
from logitless.engine.hooks import no_hooks
from logitless.engine.reduction import Factors, Report, Units, fused_report, reduced
from logitless.engine.remembered import Remembered
from logitless.engine.segments import EqualSegments, Segments
from logitless.engine.spec import LossSpec, Role
from logitless.engine.terms import declared, evaluate_terms
from logitless.errors import warn
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, WholeVocabulary

logger = logging.getLogger(__name__)

# What switches compiled evaluation off, and the value that does.
SWITCHES = {"LOGITLESS_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1"}


def compiles_on(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Types of devices on which losses of per-token statistics are compiled."""
    off = any([environment.get(name) == value for name, value in SWITCHES.items()])
    return () if off or find_spec("triton") is None else ("cuda",)


COMPILES_ON = compiles_on(os.environ)
LIBRARY = __name__.partition(".")[0]
# Class -> identities of its losses that may be compiled: at most `MOST_IDENTITIES`.
_IDENTITIES: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
MOST_IDENTITIES = 16
# Key -> `Graph`; None: the evaluation of this key is not compiled.
_GRAPHS = Remembered()
_LOCK = threading.Lock()
# Sizes for which a graph is traced. They stand for all sizes from 2 to `MOST_ROWS`, which is the most that
# torch.nanquantile takes; for equal sequences, for all lengths and numbers of groups up to `MOST_EQUAL`.
TRACED_ROWS, TRACED_LENGTH, TRACED_GROUPS, MOST_ROWS, MOST_EQUAL = 352, 32, 6, 2**24, 2**11
# The error of a graph may be this many times that of the uncompiled evaluation, plus this many times the
# rounding of the largest value.
TIMES, ROUNDING = 2.0, 4.0


def evaluate(
    loss: LossSpec,
    statistics: Mapping[str, Tensor],
    batch: Batch,
    factors: Factors,
    sequences: WholeSequences = WHOLE_SEQUENCES,
    *,
    differentiate: bool,
) -> tuple[dict[str, Tensor], Report]:
    """Evaluate a loss as `evaluation.evaluate` does, by a compiled graph if the arguments allow it.

    The first call of a key makes the graph, and already returns its results, so that equal calls have equal
    results.
    """
    results = None
    if _is_eligible(loss, batch):
        run = _by_graph if is_of_library(loss) else _by_torch_compile
        results = run(loss, statistics, batch, factors, differentiate)
    if results is None:
        return evaluation.evaluate(loss, statistics, batch, factors, sequences, differentiate=differentiate)
    *gradients, table = results
    return dict(zip(loss.differentiates, gradients)), Report(table)


def _by_graph(
    loss: LossSpec, statistics: Mapping[str, Tensor], batch: Batch, factors: Factors, differentiate: bool
) -> Sequence[Tensor] | None:
    """(*gradients, table) of a loss of this library, by a graph; None if there is none."""
    key = _key(loss, statistics, batch, factors, differentiate)
    if key not in _GRAPHS and not is_capturing(batch.given_targets.device):
        with _LOCK, _syncs_allowed(batch.given_targets.device):
            if key not in _GRAPHS:
                try:
                    _GRAPHS[key] = _made(loss, statistics, batch, factors, differentiate)
                except torch.OutOfMemoryError:
                    # To make a graph takes memory that the call does not need. A later call tries again.
                    logger.info("%s is evaluated uncompiled: out of memory", type(loss).__name__)
                    return None
    graph = _GRAPHS.get(key)
    return None if graph is None else graph(statistics, batch, factors)


def _by_torch_compile(
    loss: LossSpec, statistics: Mapping[str, Tensor], batch: Batch, factors: Factors, differentiate: bool
) -> Sequence[Tensor] | None:
    """(*gradients, table) of a user's loss, under torch.compile; None if compiling it failed."""
    run = _compiled_slice(loss, tuple(loss.differentiates) if differentiate else ())
    inputs = {name: getattr(batch, name) for name in batch.names}
    vector = factors.vector(_first(statistics))
    with no_hooks():
        return run(
            dict(statistics), batch.given_targets, inputs, _lengths(batch), vector, factors.units, batch.V
        )


def _is_eligible(loss: LossSpec, batch: Batch) -> bool:
    """Whether the evaluation of these arguments may run in a graph.

    Not with several ranks, whose collectives a graph does not contain and which must all do the same.
    """
    targets = batch.given_targets
    return (
        targets.device.type in COMPILES_ON
        and loss.tp_group is None
        and loss.cp_group is None
        and 1 < targets.shape[0] <= MOST_ROWS
        and (batch.segments is None or batch.segments.count > 0)
        and not is_observed()
        and not is_switched_off()
        and _is_one_of_few(loss)
    )


def is_observed() -> bool:
    """Whether each operator must run by itself: with deterministic algorithms, in anomaly mode, and inside of
    a dispatch mode or a transform of torch.func.
    """
    return (
        torch.are_deterministic_algorithms_enabled()
        or torch.is_anomaly_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def is_of_library(loss: LossSpec) -> bool:
    """Whether the class of the loss is defined in this library."""
    return type(loss).__module__.partition(".")[0] == LIBRARY


def is_switched_off() -> bool:
    """Whether the user has switched off the compiler by a stance, or has restricted what it compiles."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    return dynamo._stance.stance != "default" or getattr(dynamo.config, "disable", False)


def _is_one_of_few(loss: LossSpec) -> bool:
    """Whether this loss is one of the first `MOST_IDENTITIES` of its class in this process.

    A coefficient with a schedule makes another loss in each step, which takes longer to compile than a graph
    saves. A loss that a user's graph has constructed has no identity, so its fields cannot be in a key.
    """
    if not loss.identity:
        return False
    seen = _IDENTITIES.setdefault(type(loss), set())
    if loss.identity in seen:
        return True
    if len(seen) == MOST_IDENTITIES:
        name = type(loss).__name__
        logger.debug("%s is evaluated uncompiled: %s others of its class are compiled", name, len(seen))
        return False
    seen.add(loss.identity)
    return True


@contextmanager
def _syncs_allowed(device: torch.device) -> Iterator[None]:
    """The first call of a key reads results, also where `torch.cuda.set_sync_debug_mode` forbids it."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _key(
    loss: LossSpec, statistics: Mapping[str, Tensor], batch: Batch, factors: Factors, differentiate: bool
) -> Hashable:
    """All that a graph is compiled for: everything but the values of its tensors, and two of their sizes."""
    inputs = [(name, getattr(batch, name)) for name in _given(loss, batch)]
    roles = loss.roles
    return (
        type(loss),
        loss.identity,
        differentiate,
        batch.V,
        _grouping(loss, batch),
        factors.units,
        batch.given_targets.device,
        _autocast_dtype(batch.given_targets.device.type),
        *[(name, x.dtype, x.shape[1:]) for name, x in statistics.items()],
        *[(name, x.dtype, x.shape if roles.get(name) in FIXED else x.shape[1:]) for name, x in inputs],
    )


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _given(loss: LossSpec, batch: Batch) -> list[str]:
    """Names of the inputs that a graph reads: not the heads, which have been projected."""
    roles = loss.roles
    return [
        name for name in batch.names if roles.get(name) is not Role.HEAD and getattr(batch, name) is not None
    ]


class _Grouping(NamedTuple):
    """What a graph assumes of the sequences."""

    together: bool = False  # several groups of the loss are evaluated as one
    is_one: bool = False  # there is just one group, whose number is a constant of the graph
    are_equal: bool = False  # all sequences have the same number of rows


def _grouping(loss: LossSpec, batch: Batch) -> _Grouping:
    segments = batch.segments
    if segments is None:
        return _Grouping()
    size = loss.sequences_per_group
    are_equal = isinstance(segments, EqualSegments) and max(segments.length, segments.count) <= MOST_EQUAL
    return _Grouping(segments.roles != size, segments.count == size, are_equal)


# Roles of inputs whose shape depends neither on the rows nor on the sequences of a slice.
FIXED = (Role.VOCABULARY, Role.WHOLE)


def _made(
    loss: LossSpec, statistics: Mapping[str, Tensor], batch: Batch, factors: Factors, differentiate: bool
) -> "Graph | None":
    """Make a graph, and compare it with the uncompiled evaluation; None if it cannot be used."""
    name = type(loss).__name__
    arguments = statistics, batch, factors
    expected = evaluation.evaluate(loss, *arguments, differentiate=differentiate)  # raises errors of the call
    try:
        with no_hooks():
            graph = Graph(loss, *arguments, differentiate)
        found = graph(*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Not a warning: the results are the same, and the caller can do nothing about it.
        message = str(error).strip().partition("\n")[0]
        logger.info("%s is evaluated uncompiled: %s: %s", name, type(error).__name__, message)
        return None
    exact = evaluation.evaluate(loss, *_in_double(statistics, batch, factors), differentiate=differentiate)
    flat = [[*gradients.values(), report.table] for gradients, report in (expected, exact)]
    if all(map(_is_as_exact, found, *flat)):
        return graph
    warn(f"{name} is evaluated uncompiled, slower: its compiled graph has other results", UserWarning)
    return None


def _in_double(
    statistics: Mapping[str, Tensor], batch: Batch, factors: Factors
) -> tuple[dict[str, Tensor], Batch, Factors]:
    def wide(x: object) -> object:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    inputs = {name: wide(getattr(batch, name)) for name in batch.names}
    ignore_index = None if batch.ignored is None else batch.ignore_index
    double = Batch(batch.given_targets, batch.V, inputs, batch.segments, ignore_index=ignore_index)
    return {name: wide(x) for name, x in statistics.items()}, double, factors


def _is_as_exact(found: Tensor, expected: Tensor, exact: Tensor) -> bool:
    """Whether the error of `found` is about as small as that of `expected`.

    Infinities and NaN must be in the same elements of both.
    """
    finite = expected.isfinite()
    if not torch.equal(torch.where(finite, 0.0, found), torch.where(finite, 0.0, expected)):
        same = torch.isclose(found, expected, equal_nan=True)
        if not (same | finite).all():
            return False
    if not found.numel():
        return True
    found = torch.where(finite, found.double(), 0.0)
    expected = torch.where(finite, expected.double(), 0.0)
    exact = torch.where(finite, exact.double(), 0.0)
    eps = torch.finfo(torch.float32).eps
    allowed = TIMES * (expected - exact).abs().max() + ROUNDING * eps * expected.abs().max()
    return bool((found - exact).abs().max() <= allowed)


class Graph:
    """A compiled graph of `evaluation.evaluate` for one key.

    It keeps no tensors and no loss: the fields of the loss are constants of the graph.

    Raises:
        Exception: the terms cannot be traced, or the trace needs a guard on the number of rows or of
            sequences, or on a length.
    """

    def __init__(
        self,
        loss: LossSpec,
        statistics: Mapping[str, Tensor],
        batch: Batch,
        factors: Factors,
        differentiate: bool,
    ):
        self._inputs = tuple(_given(loss, batch))
        self._variables = tuple(loss.differentiates) if differentiate else ()
        self._grouping = _grouping(loss, batch)
        self._run = compile_graph(*self._traced(loss, statistics, batch, factors))

    def __call__(self, statistics: Mapping[str, Tensor], batch: Batch, factors: Factors) -> Sequence[Tensor]:
        """(*gradients, table)."""
        return self._run(*self._tensors(statistics, batch, factors))

    def _tensors(self, statistics: Mapping[str, Tensor], batch: Batch, factors: Factors) -> list[Tensor]:
        """The arguments of the graph, which reads all of them as contiguous."""
        inputs = [getattr(batch, name) for name in self._inputs]
        targets = batch.given_targets
        lengths = None
        if self._grouping.are_equal:  # the shape of the targets tells the graph the length
            segments = batch.segments
            targets = targets.view(segments.groups, segments.roles, segments.length)
        else:
            lengths = _lengths(batch)
        xs = [
            *statistics.values(),
            targets,
            *inputs,
            lengths,
            *factors.tensors(self._factors, _first(statistics)),
        ]
        return [x.contiguous() for x in xs if x is not None]

    def _traced(
        self, loss: LossSpec, statistics: Mapping[str, Tensor], batch: Batch, factors: Factors
    ) -> tuple[torch.fx.GraphModule, list[Tensor]]:
        """Return (the graph, the fake tensors for which it was traced)."""
        from torch._dynamo.source import ConstantSource
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, constrain_range

        # Without duck sizing, two sizes that happen to be equal are two symbols.
        environment = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=environment)

        def symbol(name: str, size: int, most: int) -> torch.SymInt:
            made = environment.create_symbol(
                size, ConstantSource(name), DimDynamic.DYNAMIC, constraint_dim=None
            )
            number = environment.create_symintnode(made, hint=size)
            constrain_range(number, min=2, max=most)
            return number

        together, is_one, are_equal = self._grouping
        most = MOST_EQUAL if are_equal else MOST_ROWS
        groups = 1 if is_one else symbol("groups", TRACED_GROUPS, most)
        size = loss.sequences_per_group
        sequences = size * groups
        length = symbol("length", TRACED_LENGTH, most) if are_equal else None
        rows = sequences * length if are_equal else symbol("rows", TRACED_ROWS, most)

        def fake(x: Tensor, *leading: torch.SymInt) -> Tensor:
            with mode:
                return torch.empty((*leading, *x.shape[len(leading) :]), dtype=x.dtype, device=x.device)

        axes = {Role.VOCABULARY: (), Role.WHOLE: (), Role.SEQUENCE: (sequences,)}
        shape = (1, sequences) if together else (groups, size)
        fakes = [fake(x, rows) for x in statistics.values()]
        fakes.append(fake(batch.given_targets, *((*shape, length) if are_equal else (rows,))))
        for name in self._inputs:
            leading = axes.get(loss.roles.get(name), (rows,))
            fakes.append(fake(getattr(batch, name), *leading))
        has_lengths = batch.segments is not None and not are_equal
        if has_lengths:
            fakes.append(fake(batch.segments.lengths, *shape))
        units = factors.units
        fakes += [fake(x) for x in factors.tensors(units.named, _first(statistics))]
        evaluate_slice = slice_function(loss, self._variables)
        names = tuple(statistics)
        absent = batch.absent
        V = batch.V

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            tensors = list(tensors)
            named = {name: tensors.pop(0) for name in names}
            targets = tensors.pop(0)
            inputs = dict.fromkeys(absent) | {name: tensors.pop(0) for name in self._inputs}
            segments = None
            if are_equal:
                groups, roles, length = targets.shape
                segments = EqualSegments(length, groups, roles, targets.device)
                targets = targets.reshape(-1)
            elif has_lengths:
                lengths = tensors.pop(0)
                segments = Segments(lengths.reshape(-1), targets.shape[0], *lengths.shape)
            return evaluate_slice(named, targets, inputs, segments, tensors, units, V)

        graph = make_fx(function, tracing_mode="fake")(*fakes)
        if environment.guards:
            raise ValueError(f"its terms depend on a size: {environment.guards[0].expr}")
        graph.graph.eliminate_dead_code()
        # The terms use the factors of a few units. The others are no arguments of the graph.
        placeholders = graph.graph.find_nodes(op="placeholder")
        given = list(zip(placeholders, fakes, strict=True))
        numbers = given[len(given) - len(units.named) :]
        self._factors = [name for name, (node, _) in zip(units.named, numbers, strict=True) if node.users]
        unused = [node for node, _ in numbers if not node.users]
        for node in unused:
            graph.graph.erase_node(node)
        graph.recompile()
        return graph, [x for node, x in given if node not in unused]


def slice_function(loss: LossSpec, variables: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The evaluation of a loss as a function of tensors. It returns (*gradients of `variables`, table)."""

    def evaluate_slice(
        statistics: Mapping[str, Tensor],
        targets: Tensor,
        inputs: Mapping[str, Tensor | None],
        segments: Segments | None,
        factors: Tensor | Sequence[Tensor],
        units: Units,
        V: int,
    ) -> tuple[Tensor, ...]:
        ignore_index = None if loss.compact else loss.ignore_index
        batch = Batch(targets, V, inputs, segments, ignore_index=ignore_index)
        named = units.of(factors)

        def total(leaves: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor]]:
            known = {**statistics, **leaves}
            if torch.compiler.is_compiling():
                terms = evaluate_terms(loss, known, batch)
            else:  # in a trace without guards, which must not compare sizes
                terms = tuple([batch.masked(each) for each in loss.terms(declared(loss, known), batch)])
            return reduced(terms[0], named), (fused_report(loss, terms, named).table,)

        if not variables:
            return total({})[1]
        differentiated = torch.func.grad_and_value(total, has_aux=True)
        gradients, (_, found) = differentiated({name: statistics[name] for name in variables})
        return *[gradients[name] for name in variables], *found

    return evaluate_slice


def _lengths(batch: Batch) -> Tensor | None:
    """(groups, sequences of a group) the lengths of the sequences; None for a loss of single tokens."""
    segments = batch.segments
    return None if segments is None else segments.lengths.view(-1, segments.roles)


def _first(statistics: Mapping[str, Tensor]) -> Tensor:
    """The first floating-point statistic: ids of a support are no such one, and come first."""
    return next(x for x in statistics.values() if x.is_floating_point())


@functools.lru_cache(maxsize=128)
def _compiled_slice(loss: LossSpec, variables: tuple[str, ...]) -> Callable:
    """`slice_function` under torch.compile; it returns None if compiling the loss failed."""
    evaluate_slice = slice_function(loss, variables)

    def compiled_alone(
        statistics: Mapping[str, Tensor],
        targets: Tensor,
        inputs: Mapping[str, Tensor | None],
        lengths: Tensor | None,  # (groups, sequences of a group)
        *others: object,
    ) -> tuple[Tensor, ...] | None:
        segments = None
        if lengths is not None:
            segments = Segments(lengths.reshape(-1), targets.shape[0], *lengths.shape)
        # Where Dynamo runs a function uncompiled, such as while a CUDA graph is captured. The terms would run
        # under torch.func, which does not take every autograd Function.
        compiling = torch.compiler.is_compiling()
        return evaluate_slice(statistics, targets, inputs, segments, *others) if compiling else None

    # Dynamo limits the number of graphs per code object, so each loss gets a copy of the code object.
    compiled_alone.__code__ = compiled_alone.__code__.replace()
    run = torch.compile(compiled_alone, dynamic=True, fullgraph=True)
    return _attempt(run, lambda *tensors: None, f"{type(loss).__name__} is evaluated uncompiled, slower")


def compile_graph(graph: torch.fx.GraphModule, fakes: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph by Inductor. The result checks nothing of its arguments."""
    import torch._inductor

    # The output of a CUDA graph would be overwritten by the next call. A few kernels need no processes.
    options = {"config_patches": {"triton.cudagraphs": False, "compile_threads": 1}}
    return torch._inductor.standalone_compile(
        graph, list(fakes), dynamic_shapes="from_graph", options=options
    )


# -- A `LogitsLoss` on one chunk


def compiled_chunk_function(
    loss: LossSpec, differentiate: bool, vocabulary: WholeVocabulary = WHOLE_VOCABULARY
) -> ChunkFunction:
    """Return `chunk_function` under torch.compile. If compiling the loss fails, it warns and runs uncompiled.

    A loss with `tp_group` runs uncompiled because of its collectives. It is not cached, because the cache
    would keep its process group alive.
    """
    if vocabulary.sharded or loss.tp_group is not None:
        return chunk_function(loss, differentiate, vocabulary)
    return _compiled(loss, differentiate)


@functools.lru_cache(maxsize=128)
def _compiled(loss: LossSpec, differentiate: bool) -> ChunkFunction:
    """The compiled function of a loss.

    The last 128 are cached; an evicted function frees its compiled code.
    """
    plain = chunk_function(loss, differentiate)
    # Dynamo limits the number of graphs per code object, so each loss gets a copy of the code object.
    plain.__code__ = plain.__code__.replace()
    run = torch.compile(plain, dynamic=True)
    return _attempt(run, plain, f"{type(loss).__name__} runs uncompiled, slower and in more memory")


def _attempt(run: Callable, otherwise: Callable, warning: str) -> Callable:
    """Return `run`, a compiled function of tensors, until the compiler fails: from then on `otherwise`."""

    def attempt(first: Tensor | Mapping[str, Tensor], *others: object) -> Any:
        nonlocal run
        try:
            with _stance((first if isinstance(first, Tensor) else _first(first)).device):
                return run(first, *others)
        except Exception as error:
            if run is otherwise or not _is_of_the_compiler(error):
                raise
            run = otherwise
            message = str(error).strip().partition("\n")[0]
            warn(f"{warning}: {type(error).__name__}: {message}", UserWarning)
            return otherwise(first, *others)

    return attempt


def _is_of_the_compiler(error: Exception) -> bool:
    """Whether the compiler raised the error. Other errors, such as out of memory, are errors of the call."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError

    if isinstance(getattr(error, "inner_exception", None), torch.OutOfMemoryError):
        return False
    kinds = (TorchDynamoException, FailOnRecompileLimitHit, CppCompileError)
    if (triton_errors := sys.modules.get("triton.errors")) is not None:
        kinds += (triton_errors.TritonError,)
    return isinstance(error, kinds)


def _stance(device: torch.device) -> AbstractContextManager:
    """Context in which functions run uncompiled while a CUDA graph is captured, instead of being compiled."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return torch.compiler.set_stance("eager_on_recompile") if capturing else nullcontext()
