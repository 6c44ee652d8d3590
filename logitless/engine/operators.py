"""The passes as opaque operators for `torch.compile`.

Without operators, Dynamo would unroll the chunk loop into a new graph for every number of tokens.

The operator of a pass takes the tensors of a packed call, the number of sequences, and a string key for the
constants of the graph (see `graph_names`). It returns a fixed number of tensors, whose dtypes do not depend
on the number of tokens. An empty tensor represents None. `FusedLinearBase` calls the operators as
`torch.ops.logitless`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from logitless.engine import base
from logitless.engine.call import HeadCall, d_hidden_dtype, unpack
from logitless.engine.gradients import defers_factor, finished_sums
from logitless.engine.graph_names import signature_of
from logitless.kernels.matmul import accumulate

# If this module is imported again, the operators of the first import must be removed. They are when their
# library has no reference.
torch.ops.logitless.library = None
torch.ops.logitless.library = torch.library.Library("logitless", "FRAGMENT")


def _operator(name: str) -> Callable[[Callable], Callable]:
    """Decorator: the function becomes an operator that mutates nothing.

    `torch.library.custom_op` does the same, and its wrappers take a tenth of the host time of a small call.
    """

    def register(function: Callable) -> Callable:
        library = torch.ops.logitless.library
        vars(torch.ops.logitless).pop(name, None)  # torch 2.11 keeps the operator of the first import
        schema = torch.library.infer_schema(function, mutates_args=())
        library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def _calls(tensors: Sequence[Tensor | None], sequences: int, key: str) -> list[HeadCall]:
    return unpack(signature_of(key), tensors, sequences)


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _sums(sums: Mapping[int, Tensor], key: str, like: Tensor) -> list[Tensor]:
    return [_present(sums.get(index), like) for index in range(len(signature_of(key).needs))]


def _fake_sums(calls: Sequence[HeadCall], count: int) -> list[Tensor]:
    """The sums of gradients by index of `count` trained tensors; an empty tensor if no gradient is needed."""
    like = calls[0].hidden
    sums = finished_sums(calls)
    nothing = torch.Size((0,)), calls[0].stat_dtype
    return [
        like.new_empty(shape, dtype=dtype) for shape, dtype in (sums.get(i, nothing) for i in range(count))
    ]


@_operator("solve")
def solve_op(tensors: Sequence[Tensor | None], sequences: int, key: str, later: bool) -> list[Tensor]:
    """Run `base.solve`. Returns [loss, metrics, *tokens, deferred, *sums of gradients, d_logits, rows].

    The deferred factor is empty if it is 1. With `later`, d_logits is (N, V), and the sum of d_weight is
    replaced by the features (N, H): see `Gradients`. The number of their rows that are written is `rows`, in
    the memory of the host; empty: all rows. Without `later`, both are empty.
    """
    with plain_dispatch():
        calls = _calls(tensors, sequences, key)
        solved = base.solve(calls, fixed_dtypes=True, later=later)
        sums = _sums(solved.sums, key, solved.loss)
        d_logits = _present(solved.d_logits, solved.loss)
        deferred = solved.deferred_on_device if defers_factor(calls) else solved.loss.new_empty(0)
        rows = solved.loss.new_empty(0)
        if _counts(calls, later):
            rows = torch.tensor(solved.rows.count, dtype=torch.int64, device="cpu")
        return [solved.loss, solved.metrics, *solved.tokens, deferred, *sums, d_logits, rows]


def _counts(calls: Sequence[HeadCall], later: bool) -> bool:
    """Whether the host counts the rows that a late product has: with compact=False, it has all rows."""
    return later and calls[0].loss.compact


@torch.library.register_fake("logitless::solve", lib=torch.ops.logitless.library)
def _(tensors, sequences, key, later):
    signature = signature_of(key)
    calls = _calls(tensors, sequences, key)
    loss = signature.loss
    stat = calls[0].stat_dtype
    N = calls[0].targets.shape
    metrics = (len(calls), 1 + len(loss.metric_names))
    kinds = [torch.int64 if name == "predictions" else stat for name in base.solved_names(loss)]
    deferred = () if defers_factor(calls) else (0,)
    shapes = ((), stat), (metrics, stat), *((N, kind) for kind in kinds), (deferred, stat)
    outputs = [tensors[0].new_empty(shape, dtype=kind) for shape, kind in shapes]
    sums = _fake_sums(calls, len(signature.needs))
    d_logits = outputs[0].new_empty(0)
    if later:
        (call,) = calls
        V, H = call.weight.shape
        sums[call.indices.weight] = call.hidden.new_empty((*N, H), dtype=call.dtype)
        d_logits = call.hidden.new_empty((*N, V), dtype=call.dtype)
    rows = outputs[0].new_empty(0)
    if _counts(calls, later):
        rows = torch.empty((), dtype=torch.int64, device="cpu")
    return [*outputs, *sums, d_logits, rows]


@_operator("weight_gradient")
def weight_gradient_op(d_logits: Tensor, features: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Product 3: d_weight (V, H) of the gradient of the logits (N, V) and the features (N, H)."""
    if rows.numel():
        count = int(rows)
        d_logits = d_logits[:count]
        features = features[:count]
    wide = torch.promote_types(features.dtype, dtype)
    d_weight = features.new_empty((d_logits.shape[1], features.shape[1]), dtype=wide)
    accumulate(d_weight, d_logits, features, first=True)
    return d_weight.to(dtype)


@torch.library.register_fake("logitless::weight_gradient", lib=torch.ops.logitless.library)
def _(d_logits, features, rows, dtype):
    return features.new_empty((d_logits.shape[1], features.shape[1]), dtype=dtype)


@_operator("statistics")
def statistics_op(tensors: Sequence[Tensor | None], sequences: int, key: str) -> list[Tensor]:
    """Run `base.token_statistics`. Returns [d logp / d hidden, *statistics]."""
    with plain_dispatch():
        (call,) = _calls(tensors, sequences, key)
        statistics = base.token_statistics(call)
        names = call.loss.reader.statistic_names(call.loss)
        return [_present(statistics.dlogp_dhidden, call.hidden), *(statistics.named[name] for name in names)]


@torch.library.register_fake("logitless::statistics", lib=torch.ops.logitless.library)
def _(tensors, sequences, key):
    (call,) = _calls(tensors, sequences, key)
    loss = call.loss
    hidden = call.hidden
    cached_grad = call.keeps_dlogp_dhidden
    shapes = loss.reader.statistic_shapes(loss, call.targets.shape[0], call.inputs).values()
    kind = d_hidden_dtype(call.dtype) if cached_grad else hidden.dtype
    dlogp_dhidden = hidden.new_empty(hidden.shape if cached_grad else 0, dtype=kind)
    return [
        dlogp_dhidden,
        *(hidden.new_empty(shape, dtype=dtype or call.stat_dtype) for shape, dtype in shapes),
    ]


@_operator("gradients")
def gradients_op(
    tensors: Sequence[Tensor | None],
    dlogp_dhidden: Tensor,
    statistics: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    sequences: int,
    key: str,
) -> list[Tensor]:
    """Run `base.token_gradients`. Returns [deferred, *sums of gradients]."""
    with plain_dispatch():
        calls = _calls(tensors, sequences, key)
        cached_grad = dlogp_dhidden if calls[0].keeps_dlogp_dhidden else None
        deferred, gradients = base.token_gradients(
            calls[0], statistics, upstream, cached_grad, None, fixed_dtypes=True
        )
        return [deferred, *_sums(gradients.sums, key, deferred)]


@torch.library.register_fake("logitless::gradients", lib=torch.ops.logitless.library)
def _(tensors, dlogp_dhidden, statistics, upstream, sequences, key):
    calls = _calls(tensors, sequences, key)
    deferred = tensors[0].new_empty((), dtype=calls[0].stat_dtype)
    return [deferred, *_fake_sums(calls, len(signature_of(key).needs))]


@torch.library.custom_op("logitless::accumulate", mutates_args=("main",))
def accumulate_op(
    main: Tensor, grad_scale: float, tensors: Sequence[Tensor | None], sequences: int, key: str
) -> tuple[Tensor, Tensor]:
    """Add d_weight to `main`. Returns (d_hidden, d_bias), the final gradients."""
    with plain_dispatch():
        (call,) = _calls(tensors, sequences, key)
        d_hidden, d_bias = base.solve_into_main(call, main, grad_scale, fixed_dtypes=True)
        return _present(d_hidden, main), _present(d_bias, main)


@torch.library.register_fake("logitless::accumulate")
def _(main, grad_scale, tensors, sequences, key):
    (call,) = _calls(tensors, sequences, key)
    d_hidden = (
        main.new_empty(call.hidden.shape, dtype=call.hidden.dtype) if call.needs.hidden else main.new_empty(0)
    )
    d_bias = main.new_empty(call.bias.shape, dtype=call.bias.dtype) if call.needs.bias else main.new_empty(0)
    return d_hidden, d_bias


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
