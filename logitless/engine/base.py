"""`FusedLinearBase`: a loss of `hidden @ weight.T`, chunk by chunk. The engine in six lines:

    for span in plan.spans:                          # the rows that one evaluation of the loss needs
        for chunk in span.chunks:
            statistics = read(chunk)                 # logits = hidden @ weight.T (product 1); cross-entropy
        loss, d_statistics = evaluate(terms)         # the loss class: value, gradient, metrics
        for chunk in span.chunks:
            d_logits = write(chunk, d_statistics)    # then both products of the gradients

If the gradient of every row is a multiple of d logp / d logits, `read` also writes the gradient of the
logits, up to a factor per row, and product 2 (d_hidden) is queued before the loss is evaluated. This is so in
two cases, both not in fp16: for a loss that is differentiated through log p(target) alone, in a span of one
chunk; and if d logp / d hidden is kept (strategy cached_grad).

`run_spans` is this loop, and `run_head` prepares it for one LM head. `solve`, `token_statistics` and
`token_gradients` are the three passes over a call. `FusedLinearBase` calls them under autograd:

* `Mode.SOLVED`: the forward pass computes the loss, and its gradients up to a scalar factor. The backward
  pass multiplies the gradients by this factor and by the upstream gradient, and casts d_weight in the same
  kernel.
* `Mode.PER_TOKEN`: the forward pass returns per-token statistics, and ordinary autograd differentiates the
  caller's function of these statistics. The backward pass receives the gradients of the statistics and
  recomputes the chunks of logits. With a frozen head, no sampling mask and a loss of log p and lse only, the
  forward pass saves d logp / d hidden instead, and the backward pass scales it
  (`HeadCall.keeps_dlogp_dhidden`).
* `Mode.INTO_MAIN`: the forward pass computes the loss without gradients. The backward pass computes loss and
  gradients, and adds d_weight to the caller's main gradient. Between both passes, no tensor of the size of
  d_weight is kept.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logitless.engine import captured
from logitless.engine.budget import plan_for
from logitless.engine.call import HeadCall, Replayable, Signature, pack, unpack, with_needs
from logitless.engine.choose import resolve_rows
from logitless.engine.early_projection import over_rows, planned, rows_again
from logitless.engine.gradients import Gradients, Solved, either, finish
from logitless.engine.graph_names import graph_key
from logitless.engine.operands import masked_rows
from logitless.engine.plan import Pass, Plan, Write
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.base import METRICS, Reader
from logitless.engine.readers.gathered import GatheredProjection
from logitless.engine.readers.replay import ReplayProjection, ReplayReader
from logitless.engine.reduction import Factors, power_of_two, settled, unit_factors
from logitless.engine.rows import Rows
from logitless.engine.spec import LossSpec
from logitless.engine.static_rows import multiplies_later
from logitless.errors import value_error


class Mode(Enum):
    """The results of the Function, and the pass that computes the gradients."""

    SOLVED = "the loss, solved in the forward pass"
    PER_TOKEN = "per-token statistics"
    INTO_MAIN = "the loss, solved in the backward pass onto a main gradient"


class CallResult(NamedTuple):
    """The results of a public call."""

    loss: Tensor | None  # 0-d
    metrics: Tensor | None  # (heads, 1 + metrics): the loss of each head, then its metrics
    statistics: dict[str, Tensor]  # statistics by name: (N, ...) per token, or `METRICS`
    plan: Plan | None  # None inside a compiled graph


# A function that chooses the rows of a call, such as `resolve_rows`.
RowChoice = Callable[[HeadCall], tuple[HeadCall, Rows]]
# (heads, mode) -> CallResult: a function that replaces the passes (`tools` sets it); None: the passes run.
StandIn = Callable[[Sequence[HeadCall], Mode], CallResult]
_STAND_IN: ContextVar[StandIn | None] = ContextVar("stand_in", default=None)


@contextmanager
def replaced(stand_in: StandIn | None) -> Iterator[None]:
    """Context in which eager calls in this thread run `stand_in` instead of the passes."""
    token = _STAND_IN.set(stand_in)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def run_calls(
    heads: Sequence[HeadCall], mode: Mode, main: Tensor | None = None, grad_scale: float = 1.0
) -> CallResult:
    """Run the heads of one public call, under autograd if any tensor needs a gradient.

    Args:
        heads: one `HeadCall` per head.
        mode: see the module's docstring.
        main: (V, H) main gradient of the mode `INTO_MAIN`.
        grad_scale: factor of the gradients in this mode.
    """
    # `is_compiling` is tested first, so that Dynamo does not trace the ContextVar.
    if not torch.compiler.is_compiling() and (stand_in := _STAND_IN.get()) is not None:
        return stand_in(heads, mode)
    loss = heads[0].loss
    if mode is Mode.SOLVED and not torch.compiler.is_compiling():
        tensors, calls = with_needs(heads)
        run = CallSpec(mode, calls)
        trainable = any([call.trainable for call in calls])
    else:
        signature, tensors, sequences = pack(heads)
        trainable = any(signature.needs)
        mode = mode if trainable or mode is Mode.PER_TOKEN else Mode.SOLVED
        later = mode is Mode.SOLVED and torch.compiler.is_compiling() and _multiplies_later(heads, signature)
        run = CallSpec(mode, None, signature, sequences, main, grad_scale, later)
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        _check_transforms([*tensors, *[head.targets for head in heads]], trainable=trainable)
    return _results(run, tensors, loss, trainable=trainable)


def replayed(call: Replayable) -> CallResult | None:
    """The results of a call of one head by its captured pass; None if there is none or it does not fit."""
    if _STAND_IN.get() is not None or forward_ad._current_level >= 0:
        return None
    solved = captured.replayed(call)
    if solved is None:
        return None
    bias = call.heads["bias"]
    tensors = [call.given["hidden"], call.heads["weight"], *([] if bias is None else [bias])]
    trainable = torch.is_grad_enabled() and any([x.requires_grad for x in tensors])
    run = CallSpec(Mode.SOLVED, None, solved=solved)
    return _results(run, tensors, call.loss, trainable=trainable)


def _results(
    run: "CallSpec", tensors: Sequence[Tensor | None], loss: LossSpec, *, trainable: bool
) -> CallResult:
    """Run the forward pass, under autograd if `trainable`, and name its outputs."""
    mode = run.mode
    outputs = FusedLinearBase.apply(run, *tensors) if trainable else _forward(run, tensors)[0]
    if mode is Mode.PER_TOKEN:
        names = loss.reader.statistic_names(loss)
        return CallResult(None, None, dict(zip(names, outputs, strict=True)), run.plan)
    value, metrics, *statistics = outputs
    # With a main gradient there is no d_logps: the forward pass computes no gradient.
    named = dict(zip(solved_names(loss), statistics)) if statistics else {}
    if not trainable:
        named.pop("d_logps", None)
    return CallResult(value, metrics, named, run.plan)


# What to do instead of a transform that the Function does not support.
BY_FULL_LOGITS = (
    "differentiate by loss.backward() or torch.autograd.grad, or transform a function of the full logits, "
    "such as F.cross_entropy(hidden @ weight.T, targets)"
)


def _check_transforms(tensors: Sequence[Tensor | None], *, trainable: bool) -> None:
    """Raise ValueError for tensors that torch.func or forward-mode AD differentiates or batches."""
    transform = torch._C._functorch.peek_interpreter_stack()
    kind = "" if transform is None else transform.key().name.lower()
    some = [x for x in tensors if x is not None]
    wrapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, some))
    # The kernels of a GPU read memory, which a wrapped tensor does not have.
    unreadable = wrapped and (kind in ("vmap", "jvp") or some[0].is_cuda)
    if (trainable and kind not in ("", "functionalize")) or unreadable:
        expected = "a call outside of the transforms of torch.func"
        raise value_error("torch.func", expected, f"one inside of {kind}", BY_FULL_LOGITS)
    if forward_ad._current_level < 0:
        return
    if any(x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None for x in some):
        raise value_error("forward_ad", "tensors without a tangent", "a dual tensor", BY_FULL_LOGITS)


@dataclass
class CallSpec:
    """The non-tensor arguments of the Function."""

    mode: Mode
    # The heads of an eager call that is solved in the forward pass; None if `solved` is given. All other
    # calls are packed: their backward pass, or their operator, needs the tensors again.
    heads: Sequence[HeadCall] | None
    signature: Signature | None = None
    sequences: int = 0
    main: Tensor | None = None
    grad_scale: float = 1.0
    later: bool = False  # whether product 3 is computed in the backward pass of a compiled graph
    solved: Solved | None = None  # the result of a captured pass, in the place of the heads
    plan: Plan | None = None  # set by an eager forward pass


class FusedLinearBase(torch.autograd.Function):
    """The passes under autograd: called directly in eager mode, as opaque operators under `torch.compile`.

    Steps:

    1. A loss checks and flattens its arguments to one `HeadCall` per head (`engine.call.make_head_call`; the
       loss's own `prepare` comes before it), and `run_calls` applies this Function. A call whose pass was
       captured skips this and step 3: `replayed` applies the Function to a finished `Solved`.
    2. `forward` runs a pass: `solve` for a reduced loss, `token_statistics` for statistics.
    3. The pass chooses the supervised rows, plans the spans and runs the chunk loop (`run_spans`).
    4. `forward` saves what the backward pass of the mode needs: the sums of gradients and their deferred
       factor (`SOLVED`); the tensors of the call, the statistics and, if it is kept, d logp / d hidden
       (`PER_TOKEN`); the tensors of the call (`INTO_MAIN`).
    5. `backward` gets the upstream gradient. In `SOLVED` it runs no chunk. In `PER_TOKEN` it recomputes the
       chunks (`token_gradients`), unless `forward` has saved d logp / d hidden. In `INTO_MAIN` it solves the
       call.
    6. `gradients.finish` multiplies each sum by the deferred factor, in `SOLVED` also by the upstream
       gradient, and casts it to the dtype of its tensor. This is done in place if the sum has this dtype and
       autograd does not retain the graph.
    7. `backward` returns one gradient per trained tensor, and None for all other tensors.

    FSDP2: `make_head_call` gathers a DTensor parameter (`parallel.groups.local_parameter`), so the arguments
    of the Function are plain tensors. The autograd node of this gather averages d_weight over the ranks after
    step 7.

    tp_group: `weight` is this rank's shard (V_r, H). The passes exchange statistics per token and all-reduce
    d_hidden; d_weight (V_r, H) is complete without a collective.

    cp_group: `hidden` contains the tokens of this rank's slices. Every rank gets the loss of the whole
    sequences, d_hidden of its tokens, and its contribution to d_weight, which the caller sums over the group.

    torch.compile: Dynamo traces `forward` and `backward`. Each pass in them is one opaque operator
    (`operators`), so that the chunk loop is not unrolled. The results do not contain a `Plan`. In `SOLVED`,
    `backward` computes product 3 of a call of at most H tokens (`static_rows.multiplies_later`).
    """

    @staticmethod
    def forward(ctx, run: CallSpec, *tensors: Tensor | None):
        outputs, saved, ctx.rows = _forward(run, tensors)
        ctx.set_materialize_grads(False)
        ctx.mode = run.mode
        ctx.count = len(tensors)
        trained = len(tensors) if run.signature is None else len(run.signature.needs)
        ctx.needs = [x is not None for x in saved[1 : 1 + trained]]
        if run.signature is not None:
            ctx.needs = run.signature.needs
        kinds = [(x.dtype, x.shape) for x in tensors[:trained]]
        ctx.product = None
        if run.later:
            weight = run.signature.parts[0].indices.weight
            features = saved[1 + weight]
            ctx.product = weight, tensors[weight].dtype
            kinds[weight] = features.dtype, features.shape
        ctx.kinds = kinds
        if run.mode is Mode.SOLVED:
            ctx.save_for_backward(*saved)
            ctx.mark_non_differentiable(*outputs[1:])
        elif run.mode is Mode.INTO_MAIN:
            ctx.run = run
            ctx.save_for_backward(*tensors)  # `main` is not saved: other calls may modify it before backward
            ctx.mark_non_differentiable(*outputs[1:])
        else:
            ctx.run = run
            ctx.save_for_backward(*tensors, *saved, *outputs)
            loss = run.signature.loss
            names = loss.reader.statistic_names(loss)
            differentiable = loss.reader.differentiable_names(loss)
            plain = [x for name, x in zip(names, outputs, strict=True) if name not in differentiable]
            ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False, got True; logitless losses have no second derivative. If you "
                "need one, differentiate a function of the full logits, such as "
                "F.cross_entropy(hidden @ weight.T, targets)."
            )
        functorch = torch._C._functorch
        if not compiling and any(
            [
                x is not None and (functorch.is_legacy_batchedtensor(x) or functorch.is_batchedtensor(x))
                for x in upstream
            ]
        ):
            remedy = "call torch.autograd.grad once for each gradient"
            raise value_error("is_grads_batched", False, True, remedy)
        gradients = [None] * len(ctx.kinds)
        if any([grad is not None for grad in upstream]):
            gradients = BACKWARD[ctx.mode](ctx, upstream, compiling)
        return (None, *gradients, *[None] * (ctx.count - len(ctx.kinds)))


# -- The chunk loop


def run_spans(plan: Plan, rows: Rows, projection: Projection, reader: Reader, gradients: Gradients) -> None:
    """Run the spans of `plan`: compute logits, statistics, loss and gradients, chunk by chunk.

    1. Allocate one buffer for all chunks. It holds the logits of a chunk, which the gradient overwrites; with
       a fused epilogue no logits are stored, and it holds the gradient alone. Two gradients are new tensors
       instead: the gradient of a `LogitsLoss` without a kernel, and that of gathered logits, which
       has their shape, (C, k) or (S,).

    Then, for each span and each of its chunks:

    2. `projection.take`: take the chunk's hidden states, run the layers in front of the head, and convert the
       targets to columns of this rank's logits.
    3. `reader.read`: compute the values of the reference or teacher, project the chunk (product 1), and
       compute its statistics. It may also write the gradient up to a factor per row.
    4. If `read` wrote the gradient, queue product 2 (`projection.backproject`) at once. Step 5 then runs
       beside it, on a side stream.

    When all chunks of the span are read:

    5. `reader.evaluate`: compute the loss of these rows, and its gradient with respect to their
       statistics.

    Then, for each chunk again (if the span has several, it is projected a second time):

    6. If `read` did not write the gradient: `reader.write` computes the gradient of the logits, then run
       product 2.
    7. `projection.scale`: apply the row factors to d_features and to the features (or to a copy of them).
    8. `projection.reduce`: start the sum of d_features over the ranks of tp_group.
    9. `gradients.add`: add the chunk's d_weight and d_bias (product 3) while this sum runs.
    10. `projection.scatter`: wait for the sum, run the backward pass of the layers, and write the rows of
        d_hidden.

    With `Write.BEFORE_LOSS`, steps 6 to 10 follow step 4.

    FSDP2: the loop does not depend on it. The head is a gathered plain tensor, and its gradient is reduced
    after the backward pass of the Function.

    tp_group: all ranks run the same spans, because they plan for the largest shard. Step 3 gathers the
    statistics of a chunk from all shards and merges them. Steps 8 to 10 sum d_features. d_weight needs no
    collective.

    cp_group: the ranks have different rows, and may run different numbers of chunks. For a loss of sequences,
    all rows of a rank form one span, and the ranks exchange sums in the single evaluation (step 5). For a
    loss of single tokens, the loop has no collective, and `reduction.settled` sums the loss after the
    loop.

    torch.compile: the loop runs eagerly in the body of an operator (`operators`), and Dynamo does not trace
    it.
    """
    buffer, place = projection.new_buffer(plan, fused_epilogue=reader.fused_epilogue)
    sharded = projection.call.vocabulary.sharded

    def take(start: int, stop: int, kind: object, *, reads: bool, writes: bool) -> Chunk:
        size = stop - start
        chunk = Chunk(start, stop, kind, reads, writes, rows.at(start, stop), buffer[:size], place[:size])
        projection.take(chunk)  # features (C, H); targets as this rank's columns
        return chunk

    def write(chunk: Chunk) -> None:
        if chunk.gradient is None:
            reader.write(chunk, projection)
            projection.backproject(chunk)
        chunk.factors = reader.row_factors(chunk)  # empty for a loss of logits
        projection.scale(chunk)  # apply the factors to d_features and to the features of product 3
        arrival = projection.reduce(chunk) if sharded else None  # start the sum over ranks
        gradients.add(chunk, projection)  # product 3, overlaps the sum
        projection.scatter(chunk, arrival)  # wait for the sum, layers backward, write rows of d_hidden

    for span in plan.spans:
        recompute = plan.recomputes(span)
        beside = nullcontext()
        for part in span.chunks:
            chunk = take(*part, reads=plan.reads, writes=plan.writes is not Write.NEVER and not recompute)
            reader.read(chunk, projection)  # reference or teacher, product 1, statistics
            if chunk.gradient is not None:
                # Only a factor per row is missing. Queue product 2 before the host evaluates the loss, so
                # that the GPU is busy during the evaluation.
                beside = side_stream(buffer.device, useful=plan.evaluates and part is span.chunks[-1])
                projection.backproject(chunk)  # product 2; nothing where hidden needs no gradient
            if plan.writes is Write.BEFORE_LOSS:
                write(chunk)
        if plan.evaluates:
            with beside:  # tiny kernels that overlap product 2
                # A rank without rows also evaluates, because the evaluation may contain collectives.
                reader.evaluate(span)
        if plan.writes is Write.AFTER_LOSS:
            for part in span.chunks:
                if recompute:
                    chunk = take(*part, reads=False, writes=True)
                    reader.read(
                        chunk, projection
                    )  # product 1 again, unless `write` projects (fused epilogue)
                write(chunk)


@functools.cache
def _stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """The side stream of a stream. Two streams must not share one: the allocator would give memory that the
    work of the first one still reads to that of the second one.
    """
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device, *, useful: bool) -> AbstractContextManager:
    """Return a context whose body runs on a side stream, if the device is a GPU and `useful` is set.

    The evaluation of a loss launches about a hundred kernels of a few microseconds each, which can overlap a
    product.

    The body starts after all kernels that were queued before the call of this function. It overlaps kernels
    that are queued between this call and the `with` statement. At the end of the context, the main stream
    waits for the side stream.
    """
    if not useful or device.type != "cuda":
        return nullcontext()
    return _beside(device, torch.cuda.current_stream(device).record_event())


@contextmanager
def _beside(device: torch.device, queued_before: torch.cuda.Event) -> Iterator[None]:
    main = torch.cuda.current_stream(device)
    stream = _stream(device, main.cuda_stream)
    stream.wait_event(queued_before)
    with torch.cuda.stream(stream):
        yield
    main.wait_stream(stream)


# -- The passes


def run_head(
    call: HeadCall,
    rows: Rows,
    purpose: Pass,
    gradients: Gradients,
    factors: Factors | None = None,
    known: Mapping[str, Tensor] | None = None,
    upstream: Mapping[str, Tensor] | None = None,
    *,
    deferred: float | Tensor = 1.0,
    heads: int = 1,
) -> tuple[Plan, Reader, Projection]:
    """Run the chunk loop of one head, and add its gradients, up to `deferred`, to `gradients`.

    Args:
        call: the call of the head.
        rows: the rows to project.
        purpose: the kind of the pass.
        gradients: the sums over all heads of the public call.
        factors, known, upstream: see `Reader.__init__`.
        deferred: the factor that the sums of gradients lack, besides the upstream gradient.
        heads: number of heads of the public call.
    """
    plan = plan_for(call, rows, purpose, heads, wide_d_weight=gradients.sums_wide(call))
    readers = ReplayReader if call.sets is not None else call.loss.reader.of(call)
    reader = readers(call, rows, purpose, plan, factors, known, upstream)
    projections = Projection
    if plan.replay is not None:
        projections = ReplayProjection
    elif plan.columns:
        projections = GatheredProjection
    writes = plan.writes is not Write.NEVER
    projection = projections(call, rows, gradients=writes)
    if writes:
        gradients.open(call, deferred, several_chunks=plan.d_weight_parts > 1)
    chunked = rows if rows.replay is None else rows.replay.chunked
    run_spans(plan, chunked, projection, reader, gradients)
    if plan.strategy == "cached_grad" and plan.evaluates:
        reader.finish_cached_grad(projection.d_hidden, projection.d_hidden, projection)
    if writes:
        gradients.close(call, projection, deferred)
    return plan, reader, projection


@dataclass
class Statistics:
    """Per-token statistics of a call."""

    named: dict[str, Tensor]  # by name: (N, ...) per token, 0 for ignored tokens; or `METRICS`
    dlogp_dhidden: Tensor | None  # (N, H) d logp / d hidden, if the plan keeps it
    rows: Rows
    plan: Plan


def solve(calls: Sequence[HeadCall], *, fixed_dtypes: bool, later: bool = False) -> Solved:
    """Compute the loss and its gradients in one pass.

    Args:
        calls: the heads, in order.
        fixed_dtypes: whether the dtypes of the gradients must not depend on the number of tokens.
        later: whether product 3 of a call of one head is computed later; see `Gradients`.
    """
    if len(calls) == 1:
        (call,) = calls
        options = {"fixed_dtypes": fixed_dtypes, "kept_rows": call.targets.shape[0] if later else 0}

        def run(call: HeadCall, rows: Rows, gradients: Gradients | None = None) -> Solved:
            return _solve([(call, rows)], gradients or Gradients([call], **options))

        return over_rows(call, run, partial(captured.captured_solve, solve=run, options=options))
    chosen = list(map(resolve_rows, calls))
    return _solve(chosen, Gradients([call for call, _ in chosen], fixed_dtypes=fixed_dtypes))


def _solve(chosen: Sequence[tuple[HeadCall, Rows]], gradients: Gradients) -> Solved:
    """Run the pass over the heads, each with the rows to project, and add to their `gradients`."""
    deferred: float | Tensor = 1.0
    losses = []
    metrics = []
    for call, rows in chosen:
        factors = unit_factors(call, rows)
        if gradients.defers_factor:
            if not losses:  # all heads have the power of two of the first
                deferred = power_of_two(factors.loss[call.loss.unit])
            factors = factors.divided_by(deferred)
        plan, reader, _ = run_head(
            call,
            rows,
            Pass.SOLVE,
            gradients,
            factors,
            deferred=deferred,
            heads=len(chosen),
        )
        row = settled(call.loss, reader.reports, call.stat_dtype)
        # A new tensor, because the outputs of an operator must not be views of each other.
        losses.append(row[0] * deferred)
        if not (isinstance(deferred, float) and deferred == call.coefficient == 1.0):
            row = torch.cat(((losses[-1] / call.coefficient).view(1), row[1:]))
        metrics.append(row)
    asked = call.loss.return_logps or call.loss.return_predictions
    tokens = _tokens(call, rows, reader, deferred) if asked else []
    table = torch.stack(metrics) if len(metrics) > 1 else metrics[0][None]
    results = gradients.sums, gradients.supervised, gradients.d_logits
    return Solved(sum(losses[1:], losses[0]), table, tokens, deferred, *results, plan, rows)


def solve_into_main(
    call: HeadCall,
    main: Tensor,
    grad_scale: float,
    *,
    fixed_dtypes: bool,
    choose: RowChoice = rows_again,
) -> tuple[Tensor | None, Tensor | None]:
    """Solve a call over the rows that `choose` returns, and add d_weight to `main`.

    Returns:
        (complete d_hidden, complete d_bias).
    """
    chosen = choose(replace(call, coefficient=grad_scale))
    gradients = Gradients([chosen[0]], fixed_dtypes=fixed_dtypes, main=main)
    solved = _solve([chosen], gradients)
    hidden, _, bias, _ = call.indices
    d_bias = None if bias is None or not call.needs.bias else gradients.sums[bias]
    dtypes = call.hidden.dtype, None if d_bias is None else call.bias.dtype
    sums = gradients.sums.get(hidden), d_bias
    d_hidden, d_bias = finish(sums, solved.deferred_on_device, dtypes, owned=True)
    return d_hidden, None if d_bias is None else d_bias.view(-1)


def _plan_into_main(call: HeadCall, solved: Solved) -> Plan:
    """The plan of a call whose backward pass adds to a main gradient.

    Args:
        call: the call, with what needs a gradient: the backward pass solves it.
        solved: the result of the forward pass, which computed no gradients.
    """
    call = call.with_shards(solved.rows.shards)
    if not _are_counted(solved.rows):
        call = planned(call)
    later = plan_for(call, solved.rows, Pass.SOLVE, wide_d_weight=True)
    return replace(solved.plan, in_backward=later)


def _are_counted(rows: Rows) -> bool:
    """Whether the host has counted the supervised tokens, as it has if the rows are not static."""
    return isinstance(rows.tokens, int)


def solved_names(loss: LossSpec) -> tuple[str, ...]:
    """Names of the per-token statistics that `solve` also returns, in order. They depend on the options."""
    if loss.return_logps:
        return (*loss.reader.statistic_names(loss), "d_logps")
    return ("predictions",) if loss.return_predictions else ()


def _tokens(call: HeadCall, rows: Rows, reader: Reader, deferred: float | Tensor) -> list[Tensor]:
    """The (N,) statistics of `solved_names`; d_logps is d loss / d logps."""
    names = solved_names(call.loss)
    statistics = reader.named_statistics()
    if "d_logps" in names:
        has_grad = call.trainable and "logps" in call.loss.differentiates
        zero = torch.zeros_like(statistics["logps"])
        statistics["d_logps"] = reader.grads.logps * deferred if has_grad else zero
        if has_grad and rows.replay is not None:
            statistics["d_logps"] = rows.replay.in_row_order(statistics["d_logps"])
    return [_of_every_token(call, rows, name, statistics[name]) for name in names]


def _of_every_token(call: HeadCall, rows: Rows, name: str, x: Tensor) -> Tensor:
    """A statistic (rows,) of every token (N,): 0 for ignored tokens, of predictions `ignore_index`."""
    x = rows.scattered(x, call.targets.shape[0])
    if name != "predictions":
        return x
    return x.masked_fill(call.targets == call.loss.ignore_index, call.loss.ignore_index)


def token_statistics(call: HeadCall) -> Statistics:
    """Compute per-token statistics.

    If `HeadCall.keeps_dlogp_dhidden`, also compute d logp / d hidden, so that the backward pass need not
    recompute the logits.
    """
    return over_rows(call, _token_statistics)


def _token_statistics(call: HeadCall, rows: Rows) -> Statistics:
    plan, reader, projection = run_head(call, rows, Pass.STATISTICS, Gradients([call], fixed_dtypes=False))
    statistics = {
        name: x if name == METRICS else _of_every_token(call, rows, name, x)
        for name, x in reader.named_statistics().items()
    }
    return Statistics(statistics, projection.d_hidden, rows, plan)


def token_gradients(
    call: HeadCall,
    statistics: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    dlogp_dhidden: Tensor | None,
    rows: Rows | None,
    *,
    fixed_dtypes: bool,
) -> tuple[Tensor, Gradients]:
    """The backward pass of `token_statistics`.

    Args:
        call: the call.
        statistics: the statistics that the forward pass returned, in the order of `statistic_names`.
        upstream: their gradients, in the same order; None: no gradient.
        dlogp_dhidden: (N, H) d logp / d hidden, if the forward pass kept it.
        rows: the rows of the forward pass; None: choose them again.
        fixed_dtypes: see `solve`.

    Returns:
        (deferred factor, gradients up to that factor).
    """
    if rows is None:
        call, rows = resolve_rows(call)
    else:
        call = call.with_shards(rows.shards)
    kind = call.loss.reader
    differentiable = kind.differentiable_names(call.loss)
    named = list(zip(kind.statistic_names(call.loss), statistics, upstream, strict=True))
    named_grads = {name: grad for name, _, grad in named if grad is not None and name in differentiable}
    gradients = Gradients([call], fixed_dtypes=fixed_dtypes)
    if not call.loss.compact and (dlogp_dhidden is not None or gradients.defers_factor):
        # With compact=False, ignored rows have upstream gradients too. The kernels of a chunk do not read
        # them. They must neither multiply a kept d logp / d hidden nor choose the power of two of fp16.
        named_grads = {name: masked_rows(x, rows.supervised) for name, x in named_grads.items()}
    everything = rows.at(0, rows.count)
    grads = {name: x[everything].to(call.stat_dtype) for name, x in named_grads.items()}
    row_statistics = {name: x[everything] for name, x, _ in named if name != METRICS}
    one = torch.ones((), dtype=call.stat_dtype, device=call.targets.device)
    if dlogp_dhidden is not None:
        reader = kind(call, rows, Pass.GRADIENTS, None, None, row_statistics, grads)
        projection = Projection(call, rows, gradients=False)
        make = torch.empty_like if rows.index is None else torch.zeros_like
        projection.d_hidden = make(dlogp_dhidden)
        reader.finish_cached_grad(dlogp_dhidden, projection.d_hidden, projection)
        gradients.close(call, projection, one)
        return one, gradients
    deferred = one
    if gradients.defers_factor:
        # Divide by a power of two so that the largest upstream gradient is near 1. `finish` multiplies by it
        # again.
        largest = torch.stack([x.abs().amax() if x.numel() else one * 0 for x in grads.values()]).amax()
        deferred = power_of_two(torch.where(torch.isfinite(largest) & (largest > 0), largest, one))
        grads = {name: x / deferred for name, x in grads.items()}
    run_head(
        call,
        rows,
        Pass.GRADIENTS,
        gradients,
        None,
        row_statistics,
        grads,
        deferred=deferred,
    )
    return deferred, gradients


# -- Forward and backward pass of each mode


def _forward(run: CallSpec, tensors: Sequence[Tensor | None]):
    """Run the forward pass, eagerly or as an operator.

    Returns:
        (outputs of the Function, tensors that the forward pass computed for the backward pass, `Rows`). The
        rows are None in a graph, and in the mode `SOLVED`, whose backward pass does not use them.
    """
    signature = run.signature
    into_main = run.mode is Mode.INTO_MAIN
    if into_main:  # the backward pass computes the gradients
        signature = signature.without_gradients()
    if torch.compiler.is_compiling():
        key = graph_key(signature)
        if run.mode is Mode.PER_TOKEN:
            dlogp_dhidden, *statistics = torch.ops.logitless.statistics(list(tensors), run.sequences, key)
            return tuple(statistics), [dlogp_dhidden], None
        *outputs, d_logits, rows = torch.ops.logitless.solve(list(tensors), run.sequences, key, run.later)
        saved_count = 1 + len(signature.needs)
        saved = [*outputs[-saved_count:], *_supervised_in_graph(signature, tensors), d_logits, rows]
        outputs = tuple(outputs[:-saved_count])
        return outputs[:-1] if into_main and signature.loss.return_logps else outputs, saved, None
    calls = run.heads if signature is None else unpack(signature, tensors, run.sequences)
    if run.mode is Mode.PER_TOKEN:
        loss = calls[0].loss
        statistics = token_statistics(calls[0])
        run.plan = statistics.plan
        names = loss.reader.statistic_names(loss)
        return tuple(statistics.named[name] for name in names), [statistics.dlogp_dhidden], statistics.rows
    solved = run.solved
    if solved is None:
        solved = solve(calls, fixed_dtypes=False)
    run.plan = solved.plan
    tokens = solved.tokens
    if into_main:
        (call,) = unpack(run.signature, tensors, run.sequences)
        run.plan = _plan_into_main(call, solved)
        tokens = tokens[:-1] if signature.loss.return_logps else tokens  # without d_logps
    indices = range(len(tensors) if signature is None else len(signature.needs))
    sums = [solved.sums.get(index) for index in indices]
    supervised = [solved.supervised.get(index) for index in indices]
    # None: the host knows that the factor is 1, so no multiplication is needed.
    deferred = None if solved.is_final else solved.deferred_on_device
    return (
        (solved.loss, solved.metrics, *tokens),
        [deferred, *sums, *supervised],
        solved.rows if into_main else None,
    )


def _supervised_in_graph(signature: Signature, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`Gradients.supervised` of the trained tensors, from the targets, by operations that Dynamo traces."""
    trained = len(signature.needs)
    reached = {}
    for part, targets in zip(signature.parts, tensors[trained:], strict=False):
        supervised = targets != signature.loss.ignore_index
        some = supervised.any()
        hidden, weight, bias, layers = part.indices
        for index, rows in ((hidden, supervised), *[(other, some) for other in (weight, bias, *layers)]):
            reached[index] = either(reached[index], rows) if index in reached else rows
    return [reached.get(index) for index in range(trained)]


def _multiplies_later(heads: Sequence[HeadCall], signature: Signature) -> bool:
    hidden, weight, _, _ = signature.parts[0].indices
    return len(heads) == 1 and hidden != weight and signature.needs[weight] and multiplies_later(heads[0])


def _backward_solved(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    deferred, *saved = ctx.saved_tensors
    sums = saved[: len(ctx.kinds)]
    supervised = saved[len(ctx.kinds) : 2 * len(ctx.kinds)]
    # Without retain_graph, the saved gradients may be scaled in place and returned.
    owned = not compiling and not torch._C._autograd._get_current_graph_task_keep_graph()
    is_one = deferred is None or deferred.dim() > 0  # an empty tensor, of an operator
    factor = upstream[0] if is_one else deferred * upstream[0]
    grads = _finished(ctx, sums, factor, supervised, owned=owned)
    if ctx.product is not None:
        weight, dtype = ctx.product
        *_, d_logits, rows = saved
        grads[weight] = torch.ops.logitless.weight_gradient(d_logits, grads[weight], rows, dtype)
    return grads


def _backward_per_token(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    saved = ctx.saved_tensors
    run = ctx.run
    tensors = saved[: ctx.count]
    dlogp_dhidden = saved[ctx.count]
    statistics = saved[ctx.count + 1 :]
    if compiling:
        key = graph_key(run.signature)
        arguments = (list(tensors), dlogp_dhidden, list(statistics), list(upstream), run.sequences, key)
        deferred, *sums = torch.ops.logitless.gradients(*arguments)
    else:
        (call,) = unpack(run.signature, tensors, run.sequences)
        deferred, gradients = token_gradients(
            call, statistics, upstream, dlogp_dhidden, ctx.rows, fixed_dtypes=False
        )
        sums = [gradients.sums.get(index) for index in range(len(run.signature.needs))]
    return _finished(ctx, sums, deferred, owned=not compiling)


def _backward_into_main(ctx, upstream: Sequence[Tensor | None], compiling: bool) -> list[Tensor | None]:
    run = ctx.run
    tensors = ctx.saved_tensors
    if compiling:
        supervised = tensors[len(run.signature.needs)] != run.signature.loss.ignore_index
        _expect_one(upstream[0], supervised.any(), on_host=False)
        key = graph_key(run.signature)
        d_hidden, d_bias = torch.ops.logitless.accumulate(
            run.main, run.grad_scale, list(tensors), run.sequences, key
        )
    else:
        _expect_one(upstream[0], ctx.rows.tokens, on_host=run.signature.loss.compact)
        (call,) = unpack(run.signature, tensors, run.sequences)
        choose = resolve_rows if _are_counted(ctx.rows) else rows_again
        d_hidden, d_bias = solve_into_main(call, run.main, run.grad_scale, fixed_dtypes=False, choose=choose)
    hidden, _, bias, _ = run.signature.parts[0].indices
    gradients: list[Tensor | None] = [None] * len(run.signature.needs)  # that of the weight is in `main`
    if run.signature.needs[hidden]:
        gradients[hidden] = d_hidden
    if bias is not None and run.signature.needs[bias]:
        gradients[bias] = d_bias
    return gradients


BACKWARD: Mapping[Mode, Callable] = {
    Mode.SOLVED: _backward_solved,
    Mode.PER_TOKEN: _backward_per_token,
    Mode.INTO_MAIN: _backward_into_main,
}


def _finished(
    ctx,
    sums: Sequence[Tensor | None],
    factor: Tensor,
    supervised: Sequence[Tensor | None] | None = None,
    *,
    owned: bool,
) -> list[Tensor | None]:
    """Return the gradients of the trained tensors, in the shapes and dtypes of these tensors.

    See `gradients.finish` for `supervised`.
    """
    wanted = [
        x if need and x.dim() == 2 else x.reshape(-1, x.shape[-1]) if need else None
        for x, need in zip(sums, ctx.needs, strict=True)
    ]
    grads = finish(wanted, factor, [dtype for dtype, _ in ctx.kinds], supervised, owned=owned)
    return [
        x if x is None or x.dim() == len(shape) else x.view(shape)
        for x, (_, shape) in zip(grads, ctx.kinds, strict=True)
    ]


def _expect_one(upstream: Tensor, tokens: int | Tensor, *, on_host: bool) -> None:
    """Refuse an upstream gradient other than 1, unless the call has no supervised `tokens` and so adds 0."""
    expected = "an upstream gradient of 1 with accumulate_into"
    if on_host:
        if upstream.item() != 1 and tokens != 0:
            raise value_error(
                "loss",
                expected,
                upstream.item(),
                "leave the loss unscaled, and pass the factor as grad_scale",
            )
    else:
        torch._assert_async(
            (upstream == 1) | (tokens == 0),
            f"loss: expected {expected}, got another; pass the factor as grad_scale.",
        )
