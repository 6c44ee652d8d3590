"""The one chunk loop: walks a plan's steps over the rows of a call.

`Walk` projects, multiplies out and accumulates; what happens to a chunk of logits in between is the affair of its two kinds:
`TokenWalk` (a loss of per-token numbers, through the kernels) and `LogitsWalk` (any function of the logits, differentiated by
`torch.func.grad_and_value` under `torch.compile`).

Gradients enter a chunk at order one. Wherever the gradient of a row is a multiple of what the chunk already holds, that factor
(`row_scale`) is applied on the narrow [C, H] side of the products instead of rewriting [C, V] logits.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logitless.kernels import cross_entropy as kernels
from logitless.kernels.cross_entropy import TokenStats
from logitless.kernels.head import Head
from logitless.kernels.matmul import accumulate, hidden_gradient, project
from logitless.kernels.scale import scale
from logitless.losses.batch import Batch, Rows, Scales, reduced, tallied, unreduced
from logitless.losses.plan import Plan, Span, Step
from logitless.losses.shard import IGNORED, VocabShard

if TYPE_CHECKING:
    from logitless.losses.base import LinearLoss


@dataclass
class Needs:
    """Which of the head's operands need a gradient."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias

    @property
    def head(self) -> bool:
        return self.weight or self.bias


@dataclass
class Walk:
    loss: "LinearLoss"
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H), in the dtype of the products
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,)
    inputs: Mapping[str, Tensor | None]
    rows: Rows
    needs: Needs
    scales: Scales | None
    shard: VocabShard | None = None
    reports: list = field(default_factory=list)
    d_hidden: Tensor | None = None
    d_weight: Tensor | None = None  # given: summed on top of what it holds
    d_bias: Tensor | None = None
    blocks: "Blocks | None" = None  # layers between the hidden states and the head
    frozen_columns: int = 0  # of weight, from the left: d_weight has the others alone

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.loss.logits_dtype or self.weight.dtype

    def run(self, plan: Plan, accum_dtype: torch.dtype | None) -> None:
        """Walk the plan; leaves the terms in `reports` and, given a dtype to sum d_weight in, the gradients that are needed."""
        N, (V, H) = self.hidden.shape[0], self.weight.shape
        buffer = self.weight.new_empty((plan.token_chunk, V), dtype=self.logits_dtype)
        if self.needs.hidden and accum_dtype:
            make = torch.empty if plan.rows == N else torch.zeros
            self.d_hidden = make(N, H, dtype=self.weight.dtype, device=self.weight.device)
        first = self.d_weight is None and self.d_bias is None
        if self.needs.weight and accum_dtype and first:
            self.d_weight = torch.empty(V, H - self.frozen_columns, dtype=accum_dtype, device=self.weight.device)
        if self.needs.bias and accum_dtype and first:
            self.d_bias = torch.empty(V, 1, dtype=torch.promote_types(self.weight.dtype, torch.float32), device=self.weight.device)
        for step in plan.steps:
            if step.stop > step.start:
                x, targets = self._take(step)
                if step.read:
                    self._read_reference(step, targets, buffer)
                logits = project(x, self.weight, buffer[: step.stop - step.start])
                row_scale = self._read(step, logits, targets) if step.read else None
                aside = beside(self.weight.device, step.solve is not None and row_scale is not None)
                # A gradient that lacks only its row_scale is multiplied out at once: the GPU is busy while the host solves.
                d_hidden = None if row_scale is None else self._d_hidden(step, _overlay(logits, self.weight.dtype))
            else:
                aside = nullcontext()
            if step.solve is not None:
                with aside:
                    self._solve(step.solve)
            if step.write and step.stop > step.start:
                gradient, row_scale = self._write(step, logits, targets, row_scale)
                d_hidden = self._d_hidden(step, gradient) if d_hidden is None else d_hidden
                self._add(step, x, gradient, row_scale, d_hidden, first)
                first = False
        if first:
            for total in (self.d_weight, self.d_bias):
                if total is not None:
                    total.zero_()

    def _take(self, step: Step) -> tuple[Tensor, Tensor]:
        """Hidden states of a step's rows, in the dtype of the products, and their targets, as columns of the logits."""
        at = self.rows.slice(step.start, step.stop)
        x, targets = self.hidden[at].to(self.weight.dtype), self.targets[at]
        if self.shard is not None:
            targets = self.shard.columns(targets, self.loss.ignore_index)
        return (x if self.blocks is None else self.blocks.forward(x)), targets

    def _d_hidden(self, step: Step, gradient: Tensor) -> Tensor | None:
        """gradient @ weight [C, H]: in its place in d_hidden, or beside it where rows are gathered."""
        if not self.needs.hidden:
            return None
        at = self.rows.slice(step.start, step.stop)
        direct = isinstance(at, slice) and self.blocks is None
        out = self.d_hidden[at] if direct else self.weight.new_empty((step.stop - step.start, self.weight.shape[1]))
        return hidden_gradient(gradient, self.weight, out)

    def _add(self, step: Step, x: Tensor, gradient: Tensor, row_scale: Tensor | None, d_hidden: Tensor | None, first: bool) -> None:
        """Add a chunk's share to the gradients. Beside the chunk this takes two [C, H] matrices at most."""
        at = self.rows.slice(step.start, step.stop)
        if d_hidden is not None and row_scale is not None:
            scale(d_hidden, row_scale, d_hidden)
        # The other ranks' share arrives beside the d_weight product.
        arrival = None if self.shard is None or d_hidden is None else self.shard.all_reduce_async(d_hidden)
        if self.needs.weight:
            ours = self.blocks is None and (not isinstance(at, slice) or x.dtype != self.hidden.dtype)
            if self.frozen_columns:
                x, ours = x[:, self.frozen_columns :].clone(memory_format=torch.contiguous_format), True
            if row_scale is not None:
                x = scale(x, row_scale, x if ours else torch.empty_like(x))
            accumulate(self.d_weight, gradient, x, first=first)
        if self.needs.bias:
            column = gradient.new_ones(gradient.shape[0]) if row_scale is None else row_scale
            self._add_bias(gradient, column, first)
        if arrival is not None:
            arrival.wait()
        if d_hidden is not None:
            if self.blocks is not None:
                d_hidden = self.blocks.backward(d_hidden)
            if not isinstance(at, slice):
                self.d_hidden.index_copy_(0, at, d_hidden)
            elif self.blocks is not None:
                self.d_hidden[at] = d_hidden

    def _add_bias(self, gradient: Tensor, column: Tensor, first: bool) -> None:
        high = column.to(gradient.dtype)
        if high.dtype == column.dtype:
            accumulate(self.d_bias, gradient, high[:, None], first=first)
            return
        # In two pieces: a factor that all tokens share would be rounded the same way in all of them.
        pieces = torch.stack((high, (column - high).to(high.dtype)), dim=1)
        share = self.d_bias.new_empty(self.d_bias.shape[0], 2)
        accumulate(share, gradient, pieces, first=True)
        share = share.sum(1, keepdim=True)
        self.d_bias.copy_(share) if first else self.d_bias.add_(share)

    def _batch(self, span: Span) -> Batch:
        """The declared inputs, cut to a span: per token, per sequence, or whole."""
        at = self.rows.slice(span.start, span.stop)
        sequences = self.rows.sequences(span.first, span.last) if self.loss.sequence_inputs else None
        cut = {}
        for name, value in self.inputs.items():
            if value is None or name in (*self.loss.shared_inputs, "teacher_weight", "teacher_bias"):
                cut[name] = value
            elif not name.startswith("ref_") or name in (*self.loss.token_inputs, *self.loss.sequence_inputs):
                cut[name] = value[sequences if name in self.loss.sequence_inputs else at]
        ignore_index = None if self.loss.compact else self.loss.ignore_index
        segments = self.rows.segments(span.stop - span.start, span.first, span.last)
        V = self.weight.shape[0] if self.shard is None else self.shard.total
        return Batch(self.targets[at], V, cut, segments, ignore_index=ignore_index, shard=self.shard, slices=self.loss.slices)

    def _read_reference(self, step: Step, targets: Tensor, buffer: Tensor) -> None:
        """Where a reference model takes part, its numbers of the same rows, through the same buffer."""

    def _read(self, step: Step, logits: Tensor, targets: Tensor) -> Tensor | None:
        raise NotImplementedError

    def _solve(self, span: Span) -> None:
        raise NotImplementedError

    def _write(self, step: Step, logits: Tensor, targets: Tensor, row_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


class Blocks:
    """Layers between the hidden states and the head, run forward and backward on a chunk of rows at a time; nothing else is stored."""

    def __init__(
        self, module: torch.nn.Module, tensors: dict[str, Tensor], trained: list[str], *, grad: bool, autocast: torch.dtype | None
    ):
        self._module, self._grad, self._autocast = module, grad, autocast
        self.trained = trained
        self._leaves = {name: x.detach().requires_grad_(name in trained) for name, x in tensors.items()}
        sums = (tensors[name] for name in trained)
        self.grads = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in sums]

    def forward(self, x: Tensor) -> Tensor:
        # An operator's body runs outside of the autocast that its call was in.
        autocast = torch.autocast(x.device.type, dtype=self._autocast, enabled=self._autocast is not None)
        with torch.set_grad_enabled(self._grad), _own_hooks(), autocast:
            self._x = x.detach().requires_grad_(self._grad)
            self._y = torch.func.functional_call(self._module, self._leaves, (self._x,))
        return self._y.detach().to(x.dtype)

    def backward(self, d_y: Tensor) -> Tensor:
        wanted = [self._x, *(self._leaves[name] for name in self.trained)]
        d_x, *found = torch.autograd.grad(self._y, wanted, d_y.to(self._y.dtype))
        for total, gradient in zip(self.grads, found, strict=True):
            total += gradient
        self._x = self._y = None
        return d_x


def _own_hooks():
    """Hooks that keep what they are given: those of an activation checkpoint around the call would drop what is saved here, and run the
    model again for it."""
    # Detached: an operation that saves its own output would otherwise keep itself alive, and with it what nobody differentiates.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)


@contextmanager
def _no_hooks():
    """No saved-tensor hooks at all: torch.func works under none, not even under one that does nothing."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        hooks.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def beside(device: torch.device, useful: bool) -> AbstractContextManager:
    """A context for work that needs what the GPU has been given so far, and runs beside what it is given before the context is entered.

    Solving a chunk is a hundred kernels of a few microseconds each; beside the d_hidden product they take no time of their own. Either
    stream waits for the other at the context's ends, so that memory passes between them in order.
    """
    if not useful or device.type != "cuda":
        return nullcontext()
    so_far = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def aside():
        stream, main = _side_stream(device), torch.cuda.current_stream(device)
        stream.wait_event(so_far)
        with torch.cuda.stream(stream):
            yield
        main.wait_stream(stream)

    return aside()


def _overlay(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient's place: the logits themselves, or their first bytes seen in a narrower dtype."""
    return logits if logits.dtype == dtype else logits.view(dtype)[:, : logits.shape[1]]


@dataclass
class TokenWalk(Walk):
    stats: TokenStats = None  # (rows,) each, filled by reading
    grads: TokenStats = None  # (rows,) each, filled by solving, or given
    vectors: bool = False  # whether d logp / d hidden itself is kept, to be scaled afterwards
    ref_logps: Tensor | None = None  # (rows,) of the reference model, filled by reading
    column_weights: Tensor | None = None  # class weights of a shard

    @property
    def _head(self) -> dict:
        ignored = self.loss.ignore_index if self.shard is None else IGNORED
        return {"head": self.loss.head, "bias": self.bias, "ignore_index": ignored}

    @property
    def _column_weights(self) -> Tensor | None:
        """(columns,) class weights."""
        return self.inputs.get("class_weights") if self.column_weights is None else self.column_weights

    def _read_reference(self, step: Step, targets: Tensor, buffer: Tensor) -> None:
        if self.ref_logps is None:
            return
        weight, hidden = self.inputs["ref_weight"], self.inputs["ref_hidden"][self.rows.slice(step.start, step.stop)]
        logits = project(hidden.to(weight.dtype), weight, buffer[: step.stop - step.start])
        found = kernels.allocate_stats((), len(targets), self.ref_logps.dtype, targets.device)
        head = self._head | {"head": self.loss.ref_head, "bias": self.inputs["ref_bias"]}
        kernels.token_statistics(logits, targets, found, **head)
        if self.shard is not None:
            self.shard.combine(found, targets)
        self.ref_logps[step.start : step.stop] = found.logps

    def _batch(self, span: Span) -> Batch:
        batch = super()._batch(span)
        if self.ref_logps is not None:
            batch.ref_logps = self.ref_logps[span.start : span.stop]
        return batch

    def _read(self, step: Step, logits: Tensor, targets: Tensor) -> Tensor | None:
        out = self.stats[step.start : step.stop]
        multiple_of_d_logp = self.vectors or tuple(self.loss.differentiates) == ("logps",)
        if step.write and multiple_of_d_logp and kernels.single_pass(self.weight.dtype):
            gradient = _overlay(logits, self.weight.dtype)
            row_scale = kernels.logprob_gradient(logits, targets, out, gradient=gradient, **self._head)
            if self.shard is not None:
                # A share below exp(-40) is none; further down the target's entry over it would overflow.
                row_scale = row_scale * self.shard.combine(out, targets).clamp(min=-40).exp()
                self.shard.set_target(gradient, targets, out, row_scale, self.loss.head)
            return row_scale
        kernels.token_statistics(logits, targets, out, class_weights=self._column_weights, **self._head)
        if self.shard is not None:
            self.shard.combine(out, targets)
        return None

    def _solve(self, span: Span) -> None:
        """Terms of a span, and their gradient with respect to the numbers that the loss differentiates."""
        batch, stats = self._batch(span), self.stats[span.start : span.stop]
        names, slices = self.loss.differentiates if self.needs.any else (), self.loss.slices

        def objective(variables: dict[str, Tensor]):
            numbers = TokenStats(**dict(stats.items()) | variables)
            terms, metrics = batch.masked(*self.loss.terms(numbers, batch))
            return sum(reduced(terms, self.scales.loss, slices).values()), tallied(metrics, self.scales.metrics, slices)

        gradients, total, metrics = grad_and_value(objective, {name: getattr(stats, name) for name in names})
        for name, gradient in gradients.items():
            getattr(self.grads, name)[span.start : span.stop] = gradient
        self.reports.append((total, metrics))

    def _write(self, step: Step, logits: Tensor, targets: Tensor, row_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gradient = _overlay(logits, self.weight.dtype)
        grads = self.grads[step.start : step.stop]
        if self.vectors:
            grads = TokenStats(logps=torch.ones_like(grads.logps))
        if row_scale is not None:
            return gradient, row_scale * grads.logps
        kernels.logits_gradient(
            logits, targets, self.stats[step.start : step.stop], grads,
            gradient=gradient, class_weights=self._column_weights, **self._head,
        )  # fmt: skip
        return gradient, None


def grad_and_value(objective: Callable, variables: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, object]:
    """`torch.func.grad_and_value(objective, has_aux=True)`, by plain autograd: its operations take the host a third of the time, and
    those of a loss are so small that the host's time is what they cost."""
    with torch.enable_grad(), _own_hooks():
        leaves = {name: x.detach().requires_grad_() for name, x in variables.items()}
        total, found = objective(leaves)
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in variables.items()}, total, found
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True)), total.detach(), found


@dataclass
class LogitsWalk(Walk):
    values: Tensor | None = None  # (rows,) per-token losses, where they are not reduced here
    upstream: Tensor | None = None  # (rows,) their gradients, in a second walk

    def _read(self, step: Step, logits: Tensor, targets: Tensor) -> None:
        """A function of logits sees each token alone, so that a chunk is solved as soon as it is read."""
        self._evaluate(Span(step.start, step.stop), logits, differentiate=step.write)

    def _solve(self, span: Span) -> None:
        if span.stop == span.start:
            self._evaluate(span, self.weight.new_empty((0, self.weight.shape[0]), dtype=self.logits_dtype), differentiate=False)

    def _evaluate(self, span: Span, logits: Tensor, differentiate: bool) -> None:
        batch = self._batch(span)
        if self.loss.teacher and batch.teacher_hidden is not None:
            teacher, weight = batch.teacher_hidden, self.inputs["teacher_weight"]
            batch.teacher_logits = project(teacher.to(weight.dtype), weight, logits.new_empty(logits.shape[0], weight.shape[0]))
        upstream = None if self.upstream is None else self.upstream[span.start : span.stop]
        if self.loss.has_kernel(logits.device, logits.dtype, self.inputs):
            self._gradient, found = self._fused(logits, batch, upstream, differentiate)
        else:
            inputs = {name: getattr(batch, name) for name in self.inputs if name not in ("teacher_hidden", "teacher_weight")}
            inputs["teacher_logits"] = getattr(batch, "teacher_logits", None)
            evaluate = logits_function(self.loss, differentiate, self.shard)
            with _no_hooks():
                self._gradient, found = evaluate(logits, self.bias, batch.targets, inputs, self.scales.tensors(logits), upstream)
        self.reports.append(found["report"])
        if self.values is not None:
            self.values[span.start : span.stop] = found["values"]

    def _fused(self, logits: Tensor, batch: Batch, upstream: Tensor | None, differentiate: bool) -> tuple[Tensor | None, dict]:
        """`logits_evaluation` by the loss's own kernel."""
        factors = gradient = None
        if differentiate:
            factor = self.scales.loss["tokens"] if upstream is None else upstream
            factors = torch.where(batch.supervised, factor, 0.0).to(torch.float32)
            gradient = _overlay(logits, self.weight.dtype)
        terms, metrics = batch.masked(*self.loss.kernel(logits, self.bias, batch, factors, gradient))
        found = tallied(metrics, self.scales.metrics)
        if self.scales.loss is not None:
            return gradient, {"report": (sum(reduced(terms, self.scales.loss).values()), found)}
        values = unreduced(terms)
        return gradient, {"report": (values.sum(), found), "values": values}

    def _write(self, step: Step, logits: Tensor, targets: Tensor, row_scale: None) -> tuple[Tensor, None]:
        gradient, self._gradient = self._gradient, None
        return gradient.to(self.weight.dtype), None


def logits_objective(loss: "LinearLoss", shard: VocabShard | None, logits, bias, targets, inputs, scales, upstream):
    """A LogitsLoss on one chunk of raw products: (scalar to differentiate, its report and, unreduced, the values)."""
    z, _ = loss.head.logits(logits, bias)
    if inputs.get("teacher_logits") is not None:
        teacher, _ = loss.teacher_head.logits(inputs["teacher_logits"], inputs.get("teacher_bias"))
        inputs = inputs | {"teacher_logits": teacher}
    V = logits.shape[1] if shard is None else shard.total
    batch = Batch(targets, V, inputs, ignore_index=None if loss.compact else loss.ignore_index, shard=shard)
    terms, metrics = batch.masked(*loss.terms(z, batch))
    found = tallied(metrics, scales.metrics)
    if scales.loss is not None:
        total = sum(reduced(terms, scales.loss).values())
        return total, {"report": (total.detach(), found)}
    values = unreduced(terms)
    total = (values if upstream is None else values * upstream).sum()
    return total, {"report": (total.detach(), found), "values": values.detach()}


def logits_evaluation(loss: "LinearLoss", differentiate: bool, shard: VocabShard | None = None) -> Callable:
    """(logits, bias, targets, inputs, scales, upstream) -> (gradient or None, what `logits_objective` found), in plain PyTorch."""

    def evaluate(logits, *arguments):
        def objective(z):
            return logits_objective(loss, shard, z, *arguments)

        if differentiate and shard is not None:
            # What crosses the group has derivatives of its own, which torch.func does not take.
            gradients, _, found = grad_and_value(lambda leaves: objective(leaves["z"]), {"z": logits})
            return gradients["z"], found
        if differentiate:
            gradient, (_, found) = torch.func.grad_and_value(objective, has_aux=True)(logits)
            return gradient, found
        return None, objective(logits)[1]

    return evaluate


@functools.cache
def logits_function(loss: "LinearLoss", differentiate: bool, shard: VocabShard | None = None) -> Callable:
    """`logits_evaluation` under torch.compile; where no compiler works, as it is, with one warning. Collectives stay uncompiled."""
    plain = logits_evaluation(loss, differentiate, shard)
    if shard is not None:
        return plain
    state = {"run": torch.compile(plain, dynamic=True)}

    def evaluate(*arguments):
        try:
            with _stance(arguments[0].device):
                return state["run"](*arguments)
        except Exception as error:
            if state["run"] is plain:
                raise
            result = plain(*arguments)  # an error of the loss itself is raised from here
            state["run"] = plain
            warnings.warn(f"{type(loss).__name__} runs uncompiled, slower and in more memory: {error}", stacklevel=2)
            return result

    return evaluate


def _stance(device: torch.device) -> AbstractContextManager:
    """While a CUDA graph is captured nothing can be compiled: what has not been runs as it is."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return torch.compiler.set_stance("eager_on_recompile") if capturing else nullcontext()


def scale_rows(
    d_logp: Tensor, weight: Tensor, targets: Tensor, stats: TokenStats, grads: TokenStats, head: Head, shard: VocabShard | None
) -> Tensor:
    """d loss / d hidden of some rows from d logp / d hidden of each: the whole backward pass of a frozen head.

    d lse / d hidden is what is left when d logp / d hidden is taken from d z(target) / d hidden, a row of the head.
    """
    scaled = d_logp.to(stats.lse.dtype)
    if grads.lse is None:
        return scaled * grads.logps[:, None]
    slope = grads.lse * head.derivative_at(stats.logps + stats.lse)
    scaled = scaled * (grads.logps - grads.lse)[:, None]
    known = torch.where(slope != 0, targets, 0)  # with compact=False a row may have no target; its gradients are zero
    if shard is not None:
        local = known - shard.start
        here = (local >= 0) & (local < shard.width)
        rows = torch.where(here[:, None], weight[torch.where(here, local, 0)].to(scaled.dtype), 0.0)
        return torch.addcmul(scaled, slope[:, None], shard.all_reduce(rows))
    return torch.addcmul(scaled, slope[:, None], weight[known].to(scaled.dtype))
