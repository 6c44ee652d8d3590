"""The passes as opaque operators for `torch.compile`.

Without operators, Dynamo would unroll the chunk loop into a new graph for every number of tokens.

An operator takes the tensors of a packed call, the number of sequences, and a string key for the constants of
the graph (see `Signature`). It returns a fixed number of tensors, whose dtypes do not depend on the number of
tokens. An empty tensor represents None.
"""

import copy
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.engine import passes
from logitless.engine.call import HeadCall, Part, Signature, TrainedIndices, d_hidden_dtype, unpack
from logitless.engine.gradients import Gradients, finish, finished_sums
from logitless.engine.spec import LossSpec
from logitless.errors import value_error

# -- Names of the constants of a graph

# A compiled graph contains the key of its call as a string. A backward pass, an exported program and a graph
# that constructs its loss run without a live loss object, and there is no event when a graph is freed.
# Therefore entries are never removed. There is one entry for each different call that was compiled; eager
# calls add no entries.
_SIGNATURES: dict[str, "Registered"] = {}
_LOSSES: dict[str, LossSpec] = {}
_GROUPS: dict[str, dict[str, weakref.ref]] = {}
_MODULES: dict[str, nn.Module] = {}
_LOCK = threading.Lock()
_NUMBERS = itertools.count()


class Registered(NamedTuple):
    """A signature whose loss has no process groups, and weak references to the groups.

    A strong reference would keep a process group alive.
    """

    signature: Signature
    groups: Mapping[str, weakref.ref]  # by field name of the loss

    def complete(self) -> Signature:
        """Return the signature with its process groups. Raises ValueError if a group was destroyed."""
        if not self.groups:
            return self.signature
        groups = {name: reference() for name, reference in self.groups.items()}
        for name, group in groups.items():
            if group is None:
                raise value_error(
                    name,
                    "the group that a graph was compiled with",
                    "none",
                    "call torch._dynamo.reset() after a process group was destroyed",
                )
        loss = self.signature.loss
        values = [groups.get(field.name, getattr(loss, field.name)) for field in fields(loss)]
        return self.signature._replace(loss=_restored(type(loss), values, loss.identity))


def signature_of(key: str) -> Signature:
    return _SIGNATURES[key].complete()


def constant_in_graphs(function):
    """Decorator: Dynamo calls the function while tracing, and treats its result as a constant.

    `torch.compiler.assume_constant_result` sets the same attribute, but imports Dynamo.
    """
    function._dynamo_marked_constant = True
    return function


@constant_in_graphs
def _registered(
    loss: str,
    dtype: torch.dtype,
    needs: tuple,
    parts: tuple,
    autocast: bool,
    module: str,
    add_targets: bool,
) -> str:
    """Register a signature, and return its key. `loss` and `module` are names in graphs."""
    key = f"{loss} of {dtype}, {needs}, {parts}, {autocast}, {module}, {add_targets}"
    with _LOCK:
        if key not in _SIGNATURES:
            heads = tuple(map(_part, parts))
            signature = Signature(
                _LOSSES[loss], dtype, needs, heads, autocast, _MODULES.get(module), add_targets
            )
            _SIGNATURES[key] = Registered(signature, _GROUPS[loss])
        return key


def register_loss(loss: LossSpec) -> str:
    """Register a loss that was constructed outside of graphs, and return its name in graphs: its identity."""
    values = [getattr(loss, field.name) for field in fields(loss)]
    return _register(type(loss), values, loss.identity)


@constant_in_graphs
def _register_values(loss: type, values: tuple) -> str:
    """Register a loss that a graph constructs from these field values, and return its name in graphs."""
    return _register(loss, values, f"{loss.__module__}.{loss.__qualname__}{values} made in a graph")


def _register(loss: type, values: Sequence, name: str) -> str:
    with _LOCK:
        if name not in _LOSSES:
            named = dict(zip([field.name for field in fields(loss)], values, strict=True))
            groups = {name: named[name] for name in ("tp_group", "cp_group")}
            groups = {name: x for name, x in groups.items() if x is not None and not isinstance(x, str)}
            _GROUPS[name] = {name: weakref.ref(x) for name, x in groups.items()}
            _LOSSES[name] = _restored(loss, [None if x in groups else named[x] for x in named], name)
        return name


def _restored(loss: type, values: Sequence, identity: str):
    """Construct a loss from the values of its fields, without checks."""
    made = object.__new__(loss)
    object.__setattr__(made, "identity", identity)
    for field, value in zip(fields(loss), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def _part(plain: tuple) -> Part:
    coefficient, (hidden, weight, bias, layers), head, names = plain
    return Part(coefficient, TrainedIndices(hidden, weight, bias, layers), head, names)


def register_module(module: nn.Module) -> str:
    """Register a module with layers, and return its name in graphs.

    A copy on the meta device is kept, because the graph passes the tensors of the module.
    """
    memo = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in module.parameters()}
    memo |= {id(x): x.to("meta") for x in module.buffers()}
    name = f"{type(module).__qualname__}#{next(_NUMBERS)}"
    _MODULES[name] = copy.deepcopy(module, memo)
    return name


def graph_key(signature: Signature) -> str:
    """Return the key of a signature. Dynamo traces this function, and guards on the loss and the module."""
    loss, dtype, needs, parts, autocast, module, add_targets = signature
    if loss.identity:
        name = loss.name_in_graphs()
    else:
        name = _register_values(type(loss), tuple([getattr(loss, field.name) for field in fields(loss)]))
    plain = tuple([(part.coefficient, tuple(part.indices), part.head, part.names) for part in parts])
    layers = ""
    if module is not None:
        id(module)  # makes Dynamo guard on the identity of the module: another instance may differ
        layers = module.name_in_graphs()
    return _registered(name, dtype, needs, plain, autocast, layers, add_targets)


# -- The operators


def _calls(tensors: Sequence[Tensor | None], sequences: int, key: str) -> list[HeadCall]:
    return unpack(signature_of(key), tensors, sequences)


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _sums(gradients: Gradients, calls: Sequence[HeadCall], key: str, like: Tensor) -> list[Tensor]:
    return [_present(gradients.sums.get(index), like) for index in range(len(signature_of(key).needs))]


def _fake_sums(calls: Sequence[HeadCall], count: int) -> list[Tensor]:
    """The sums of gradients by index of `count` trained tensors; an empty tensor if no gradient is needed."""
    like = calls[0].hidden
    sums = finished_sums(calls)
    nothing = torch.Size((0,)), calls[0].stat_dtype
    return [
        like.new_empty(shape, dtype=dtype) for shape, dtype in (sums.get(i, nothing) for i in range(count))
    ]


@torch.library.custom_op("logitless::solve", mutates_args=())
def solve_op(tensors: Sequence[Tensor | None], sequences: int, key: str) -> list[Tensor]:
    """Run `passes.solve`. Returns [loss, metrics, *tokens, deferred, *sums of gradients]."""
    with plain_dispatch():
        calls = _calls(tensors, sequences, key)
        solved = passes.solve(calls, fixed_dtypes=True)
        sums = _sums(solved.gradients, calls, key, solved.loss)
        return [solved.loss, solved.metrics, *solved.tokens, solved.deferred_on_device, *sums]


@solve_op.register_fake
def _(tensors, sequences, key):
    signature = signature_of(key)
    calls = _calls(tensors, sequences, key)
    loss = signature.loss
    stat = calls[0].stat_dtype
    N = calls[0].targets.shape
    metrics = (len(calls), 1 + len(loss.metric_names))
    kinds = [torch.int64 if name == "predictions" else stat for name in passes.solved_names(loss)]
    shapes = ((), stat), (metrics, stat), *((N, kind) for kind in kinds), ((), stat)
    outputs = [tensors[0].new_empty(shape, dtype=kind) for shape, kind in shapes]
    return outputs + _fake_sums(calls, len(signature.needs))


@torch.library.custom_op("logitless::statistics", mutates_args=())
def statistics_op(tensors: Sequence[Tensor | None], sequences: int, key: str) -> list[Tensor]:
    """Run `passes.token_statistics`. Returns [d logp / d hidden, *statistics]."""
    with plain_dispatch():
        (call,) = _calls(tensors, sequences, key)
        statistics = passes.token_statistics(call)
        names = call.loss.objective.statistic_names(call.loss)
        return [_present(statistics.dlogp_dhidden, call.hidden), *(statistics.named[name] for name in names)]


@statistics_op.register_fake
def _(tensors, sequences, key):
    (call,) = _calls(tensors, sequences, key)
    loss = call.loss
    hidden = call.hidden
    cached_grad = passes.keeps_dlogp_dhidden(call)
    shapes = loss.objective.statistic_shapes(loss, call.targets.shape[0], call.inputs).values()
    kind = d_hidden_dtype(call.dtype) if cached_grad else hidden.dtype
    dlogp_dhidden = hidden.new_empty(hidden.shape if cached_grad else 0, dtype=kind)
    return [
        dlogp_dhidden,
        *(hidden.new_empty(shape, dtype=dtype or call.stat_dtype) for shape, dtype in shapes),
    ]


@torch.library.custom_op("logitless::gradients", mutates_args=())
def gradients_op(
    tensors: Sequence[Tensor | None],
    dlogp_dhidden: Tensor,
    statistics: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    sequences: int,
    key: str,
) -> list[Tensor]:
    """Run `passes.token_gradients`. Returns [deferred, *sums of gradients]."""
    with plain_dispatch():
        calls = _calls(tensors, sequences, key)
        cached_grad = dlogp_dhidden if passes.keeps_dlogp_dhidden(calls[0]) else None
        deferred, gradients = token_gradients(
            calls[0], statistics, upstream, cached_grad, None, fixed_dtypes=True
        )
        return [deferred, *_sums(gradients, calls, key, deferred)]


@gradients_op.register_fake
def _(tensors, dlogp_dhidden, statistics, upstream, sequences, key):
    calls = _calls(tensors, sequences, key)
    deferred = tensors[0].new_empty((), dtype=calls[0].stat_dtype)
    return [deferred, *_fake_sums(calls, len(signature_of(key).needs))]


def token_gradients(
    call: HeadCall, statistics, upstream, dlogp_dhidden, rows, *, fixed_dtypes: bool
) -> tuple[Tensor, Gradients]:
    """Run `passes.token_gradients`. `statistics` and `upstream` are in the order of `statistic_names`."""
    loss = call.loss
    objective = loss.objective
    named = list(zip(objective.statistic_names(loss), statistics, upstream, strict=True))
    named_statistics = {name: x for name, x, _ in named if x.dim()}
    differentiable = objective.differentiable_names(loss)
    named_grads = {name: grad for name, _, grad in named if grad is not None and name in differentiable}
    return passes.token_gradients(
        call, named_statistics, named_grads, dlogp_dhidden, rows, fixed_dtypes=fixed_dtypes
    )


@torch.library.custom_op("logitless::accumulate", mutates_args=("main",))
def accumulate_op(
    main: Tensor, grad_scale: float, tensors: Sequence[Tensor | None], sequences: int, key: str
) -> tuple[Tensor, Tensor]:
    """Add d_weight to `main`. Returns (d_hidden, d_bias), complete: no factor is missing."""
    with plain_dispatch():
        (call,) = _calls(tensors, sequences, key)
        _, d_hidden, d_bias = accumulate(call, main, grad_scale, fixed_dtypes=True)
        return _present(d_hidden, main), _present(d_bias, main)


@accumulate_op.register_fake
def _(main, grad_scale, tensors, sequences, key):
    (call,) = _calls(tensors, sequences, key)
    d_hidden = (
        main.new_empty(call.hidden.shape, dtype=call.hidden.dtype) if call.needs.hidden else main.new_empty(0)
    )
    d_bias = main.new_empty(call.bias.shape, dtype=call.bias.dtype) if call.needs.bias else main.new_empty(0)
    return d_hidden, d_bias


def accumulate(
    call: HeadCall, main: Tensor, grad_scale: float, *, fixed_dtypes: bool
) -> tuple[passes.Solved, Tensor | None, Tensor | None]:
    """Solve a call and add d_weight to `main`. Returns (solved, complete d_hidden, complete d_bias)."""
    solved = passes.solve([replace(call, coefficient=grad_scale)], fixed_dtypes=fixed_dtypes, main=main)
    gradients = solved.gradients
    hidden, _, bias, _ = call.indices
    d_bias = None if bias is None or not call.needs.bias else gradients.sums[bias]
    dtypes = call.hidden.dtype, None if d_bias is None else call.bias.dtype
    sums = gradients.sums.get(hidden), d_bias
    d_hidden, d_bias = finish(sums, solved.deferred_on_device, dtypes, owned=True)
    return solved, d_hidden, None if d_bias is None else d_bias.view(-1)


# Dispatch state of eager code, recorded at import.
_PLAIN_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def plain_dispatch():
    """Context in which autograd and `torch.func` work inside the body of an operator.

    The dispatcher calls the body with the autograd and functorch keys masked out, and in the first run of a
    compiled graph also inside a dispatch mode. Differentiation then fails with "Cannot access data pointer of
    Tensor that doesn't have storage". The guard restores the dispatch state of eager code. (The alternative,
    tracing the gradient with make_fx, would cost a trace per loss and class of shapes.)
    """
    return torch._C._ForceDispatchKeyGuard(*_PLAIN_DISPATCH)
