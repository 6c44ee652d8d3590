"""Sums of the gradients over chunks and heads, up to the deferred factor; the result of a pass that computes
them; the checks of a main gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine.call import HeadCall, d_hidden_dtype
from logitless.engine.plan import Plan
from logitless.engine.projection import Chunk, Projection
from logitless.engine.rows import Rows
from logitless.errors import type_error, value_error
from logitless.kernels.head.scale import guarded, scale_all
from logitless.kernels.matmul import accumulate


class SumDtypes(NamedTuple):
    """The dtypes in which the gradients of one head are summed."""

    hidden: torch.dtype
    weight: torch.dtype
    bias: torch.dtype


def sum_dtypes(call: HeadCall, *, multi_head: bool, wide_d_weight: bool) -> SumDtypes:
    """Return the dtypes in which the gradients of a head are summed.

    Args:
        call: the head.
        multi_head: whether the public call has several heads.
        wide_d_weight: whether d_weight is summed in `stat_dtype`: with several chunks, and in the
            calls that `budget.plan_for` names. `accum_dtype` of the loss overrides it.
    """
    weight = call.loss.accum_dtype
    if weight is None:
        # In fp16 the sum may overflow although the mean does not.
        weight = call.stat_dtype if wide_d_weight or call.dtype == torch.float16 else call.dtype
    hidden = call.stat_dtype if multi_head else d_hidden_dtype(call.dtype)
    return SumDtypes(hidden, weight, call.stat_dtype)


def finished_sums(calls: Sequence[HeadCall]) -> dict[int, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each entry of `Gradients.sums` after the last head, with `fixed_dtypes=True`."""
    several = len(calls) > 1
    sums = {}
    for call in calls:
        dtypes = sum_dtypes(call, multi_head=several, wide_d_weight=True)
        hidden, weight, bias, layers = call.indices
        if call.needs.hidden:
            sums[hidden] = call.hidden.shape, dtypes.hidden
        if call.needs.weight:
            is_cast = several or _casts(call, call.weight)
            sums[weight] = call.weight.shape, call.weight.dtype if is_cast else dtypes.weight
        if call.needs.bias:
            shape = torch.Size((call.bias.shape[0], 1))
            sums[bias] = shape, call.bias.dtype if several or _casts(call, call.bias) else dtypes.bias
        if call.layers is not None:
            for index, (name, x) in zip(layers, call.layers.tensors.items(), strict=True):
                if name in call.layers.trained:
                    sums[index] = x.shape, x.dtype
    return sums


def _casts(call: HeadCall, x: Tensor) -> bool:
    """Whether the sum of the gradient of `x` is cast to its dtype in a graph: a sum in fp16 may overflow."""
    return torch.float16 not in (call.dtype, x.dtype)


def defers_factor(calls: Sequence[HeadCall]) -> bool:
    """See `Gradients.defers_factor`."""
    return calls[0].dtype == torch.float16


@dataclass
class Sum:
    """A buffer that the first chunk overwrites and later chunks add to."""

    total: Tensor
    written: bool = False


class Gradients:
    """The sums of d_hidden, d_weight, d_bias and the layers' gradients over the chunks and heads of a call.

    With several heads, the gradient of a tensor is summed in `stat_dtype`, or d_weight in `accum_dtype` if
    the loss has one. The gradient of a weight or bias that only one head uses is cast to the dtype of the
    tensor when this head is done, so that at most one such sum exists. After this cast, `finish` multiplies
    by the deferred power of two, which is exact, and by the upstream gradient, which rounds a second time
    unless it is a power of two. `fixed_dtypes` has the same cast, except in fp16, where the sum may overflow
    although the mean does not: one chunk needs no wider sum, and a graph saves the result in few bytes.

    Args:
        calls: the heads, in order.
        fixed_dtypes: whether the dtypes of the sums must not depend on the number of tokens (in compiled
            graphs).
        main: (V, H) main gradient to which the complete d_weight is added: `finish` does not apply a factor
            to it. In fp16, `open` divides `main` by the deferred factor and `close` multiplies it again.
        kept_rows: 0: product 3 is computed. Otherwise the number N of tokens of a call of one head: the
            operands of product 3 are kept instead, first the rows that the pass projects, and then rows
            that nothing is written to.

    Attributes:
        d_logits: (N, V) first operand of product 3, if it is computed later; None: it was computed. The
            second operand (N, H) is in `sums`, in the place of d_weight.
        sums: the gradients up to the deferred factor, by index of the trained tensor: (N, H), (V, H), (V, 1),
            or the shape of a layer's parameter.
        supervised: the rows of each entry of `sums` that a supervised token may reach, by index: (N,) bool
            for d_hidden, () for the others; None: all rows. Only these rows are multiplied by the upstream
            gradient (`finish`).
        defers_factor: whether the pass chooses a factor by which `finish` multiplies the sums, a power of two
            that keeps them near 1 (in fp16), and passes it to `open` and `close`. If not, it passes 1.0.
    """

    def __init__(
        self,
        calls: Sequence[HeadCall],
        *,
        fixed_dtypes: bool,
        main: Tensor | None = None,
        kept_rows: int = 0,
    ):
        self._fixed_dtypes = fixed_dtypes
        self._kept_rows = kept_rows
        self._features: Tensor | None = None
        self.d_logits: Tensor | None = None
        self._main = main
        self._several = len(calls) > 1
        self._last = {index: call for call in calls for index in call.indices[:3]}
        self.sums: dict[int, Tensor] = {}
        self.supervised: dict[int, Tensor | None] = {}
        self.defers_factor = defers_factor(calls)
        self._weight: Sum | None = None  # of the head between `open` and `close`
        self._bias: Sum | None = None

    def sums_wide(self, call: HeadCall) -> bool:
        """Whether d_weight is summed in `stat_dtype` for any number of chunks; see `budget.plan_for`."""
        is_wide = call.weight.dtype == call.stat_dtype or not _casts(call, call.weight)
        return self._several or self._main is not None or self._fixed_dtypes and is_wide

    def open(self, call: HeadCall, deferred: float | Tensor, *, several_chunks: bool) -> None:
        """Begin a head: allocate its sums of d_weight and d_bias, or reuse the sums of an earlier head."""
        needs = call.needs
        V, H = call.weight.shape
        _, weight, bias, _ = call.indices
        dtypes = sum_dtypes(
            call, multi_head=self._several, wide_d_weight=several_chunks or self.sums_wide(call)
        )
        if self._kept_rows:
            self._features = call.weight.new_empty(self._kept_rows, H, dtype=call.dtype)
        elif needs.weight and self._main is not None:
            self._weight = Sum(self._main, written=True)
            if self.defers_factor:
                self._main.div_(deferred)
        elif needs.weight:
            self._weight = self._sum_of_weight(call, dtypes.weight)
        if needs.bias:
            written = bias in self.sums
            if not written:
                self.sums[bias] = torch.empty(V, 1, dtype=dtypes.bias, device=call.weight.device)
            self._bias = Sum(self.sums[bias], written=written)

    def _sum_of_weight(self, call: HeadCall, dtype: torch.dtype) -> Sum | None:
        index = call.indices.weight
        written = index in self.sums
        if not written:
            self.sums[index] = torch.empty(call.weight.shape, dtype=dtype, device=call.weight.device)
        return Sum(self.sums[index], written=written)

    def add(self, chunk: Chunk, projection: Projection) -> None:
        """Product 3: add a chunk's d_weight and d_bias."""
        if self._kept_rows:
            self._keep(chunk)
        elif self._weight is not None:
            projection.accumulate(
                self._weight.total, chunk.gradient, chunk.trained, first=not self._weight.written
            )
            self._weight.written = True
            chunk.trained = None  # frees a scaled copy of the features before the layers' backward pass
        if self._bias is not None:
            self._add_bias(chunk, projection)

    def _keep(self, chunk: Chunk) -> None:
        """Keep the operands of product 3."""
        gradient = chunk.gradient
        self._features[chunk.rows] = chunk.trained
        if self._is_whole(chunk):
            self.d_logits = gradient
            return
        if self.d_logits is None:
            self.d_logits = self._features.new_empty(self._kept_rows, gradient.shape[1])
        self.d_logits[chunk.rows] = gradient  # the next chunk overwrites the gradient

    def _is_whole(self, chunk: Chunk) -> bool:
        """Whether the gradient of a chunk has every row, and its memory, which is of this pass, no more."""
        gradient = chunk.gradient
        return (
            gradient is chunk.grad_buffer
            and gradient.shape[0] == self._kept_rows
            and gradient.is_contiguous()
            and gradient.untyped_storage().nbytes() == gradient.nbytes
        )

    def _add_bias(self, chunk: Chunk, projection: Projection) -> None:
        gradient = chunk.gradient
        if chunk.factors:
            factor = math.prod(chunk.factors[1:], start=chunk.factors[0])
        else:
            factor = gradient.new_ones(chunk.features.shape[0])
        column = factor.to(gradient.dtype)
        total = self._bias.total
        if column.dtype == factor.dtype:
            projection.accumulate(total, gradient, column[:, None], first=not self._bias.written)
        else:
            # Represent the factor as the sum of two numbers of the narrow dtype. A single number would round
            # the factor of all tokens in the same direction, and the errors would add up.
            pieces = torch.stack((column, (factor - column).to(column.dtype)), dim=1)
            shares = total.new_empty(total.shape[0], 2)
            accumulate(shares, gradient, pieces, first=True)
            share = shares.sum(1, keepdim=True)
            total.add_(share) if self._bias.written else total.copy_(share)
        self._bias.written = True

    def close(self, call: HeadCall, projection: Projection, deferred: float | Tensor) -> None:
        """End a head: zero sums that no chunk wrote, add d_hidden, and cast sums that no later head uses."""
        for total in (self._weight, self._bias):
            if total is not None and not total.written:
                total.total.zero_()
        if self._main is not None and call.needs.weight and self.defers_factor:
            self._main.mul_(deferred)
        hidden, weight, bias, layers = call.indices
        if call.needs.hidden and hidden in self.sums:
            self.sums[hidden].add_(projection.d_hidden)
        elif call.needs.hidden:
            self.sums[hidden] = (
                projection.d_hidden.to(call.stat_dtype) if self._several else projection.d_hidden
            )
        rows = projection.rows
        if self._several:
            reached = dict.fromkeys((weight, bias, *layers), rows.supervised_count)
            for index, own in ({hidden: rows.supervised} | reached).items():
                self.supervised[index] = either(self.supervised.get(index, own), own)
        elif rows.supervised is not None:
            self.supervised = {hidden: rows.supervised}
            self.supervised |= dict.fromkeys((weight, bias, *layers), rows.supervised_count)
        if projection.layers is not None:
            indices = dict(zip(call.layers.tensors, layers, strict=True))
            for name, total in projection.layers.sums.items():
                self.sums[indices[name]] = total.to(call.layers.tensors[name].dtype)
        if self._several or self._fixed_dtypes:
            for index, x in ((weight, call.weight), (bias, call.bias)):
                is_cast = index in self.sums and (self._several or _casts(call, x))
                if is_cast and self._last[index] is call:
                    self.sums[index] = self.sums[index].to(x.dtype)
        if self._kept_rows:
            if self.d_logits is None:  # no row is supervised
                self.d_logits = self._features.new_empty(self._kept_rows, call.weight.shape[0])
            self.sums[weight] = self._features
        self._weight = self._bias = None


@dataclass
class Solved:
    """The loss of a call, and its gradients up to a deferred factor."""

    loss: Tensor  # 0-d
    metrics: Tensor  # (heads, 1 + metrics): the loss of each head without its coefficient, then its metrics
    tokens: list[Tensor]  # (N,) per-token statistics, in the order of `solved_names`
    deferred: float | Tensor  # the factor by which the gradients must still be multiplied; a number, or 0-d
    sums: dict[int, Tensor]  # as in `Gradients`, like the next two
    supervised: dict[int, Tensor | None]
    d_logits: Tensor | None
    plan: Plan  # of the last head
    rows: Rows  # of the last head

    @property
    def is_final(self) -> bool:
        """Whether the host knows that the deferred factor is 1."""
        return isinstance(self.deferred, float) and self.deferred == 1.0

    @property
    def deferred_on_device(self) -> Tensor:
        """The deferred factor as a 0-d tensor in the dtype of the loss."""
        if isinstance(self.deferred, Tensor):
            return self.deferred
        return torch.full((), self.deferred, dtype=self.loss.dtype, device=self.loss.device)


def either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The rows that are supervised in one of two heads, in the form of `Gradients.supervised`."""
    return None if a is None or b is None else torch.logical_or(a, b)


def finish(
    gradients: Sequence[Tensor | None],
    factor: Tensor,
    dtypes: Sequence[torch.dtype],
    supervised: Sequence[Tensor | None] | None = None,
    *,
    owned: bool,
) -> list[Tensor | None]:
    """Return `gradient * factor` for each gradient (n, m), cast to its entry of `dtypes`.

    Computed in the dtype of the factor, fp32 or wider. Where the kernels run, one launch scales two
    gradients; elsewhere, each gradient takes an operation of its own. With `owned`, gradients that already
    have the dtype are scaled in place. Rows that no supervised token reaches (`Gradients.supervised`) are 0
    for every factor.
    """
    if supervised is None:
        supervised = [None] * len(gradients)
    if torch.compiler.is_compiling():
        return [
            None if x is None else (x.to(factor.dtype) * guarded(factor, rows).reshape(-1, 1)).to(dtype)
            for x, dtype, rows in zip(gradients, dtypes, supervised, strict=True)
        ]
    finished = [
        x if x is None or (owned and x.dtype == dtype) else torch.empty_like(x, dtype=dtype)
        for x, dtype in zip(gradients, dtypes, strict=True)
    ]
    pairs = [pair for pair in zip(gradients, finished, strict=True) if pair[0] is not None]
    reached = [rows for rows, x in zip(supervised, gradients, strict=True) if x is not None]
    scale_all(pairs, (factor,), reached)
    return finished


def check_main_gradient(call: HeadCall, weight: object, main: object, grad_scale: float) -> None:
    """Raise TypeError or ValueError unless the backward pass of this call can add d_weight to `main`."""
    name = "accumulate_into"
    shape = tuple(call.weight.shape)
    stat = torch.promote_types(call.dtype, torch.float32)
    if not isinstance(main, Tensor):
        raise type_error(name, "a tensor", type(main).__name__, "pass the main gradient")
    if call.weight is not weight:
        remedy = "leave accumulate_into out"
        raise value_error(name, "a torch.Tensor as weight", type(weight).__name__, remedy)
    if main.shape != shape:
        remedy = f"allocate it with torch.zeros_like(weight, dtype={stat})"
        raise value_error(name, f"weight's shape {shape}", tuple(main.shape), remedy)
    if main.dtype != stat:
        raise type_error(name, f"a {stat} tensor", main.dtype, "sum the micro-batches in full precision")
    if call.loss.accum_dtype not in (None, main.dtype):
        raise value_error(
            "accum_dtype",
            f"None or {main.dtype} with accumulate_into",
            call.loss.accum_dtype,
            "leave it out: d_weight is summed in the main gradient, in its dtype",
        )
    if main.device != weight.device:
        raise value_error(name, f"weight's device {weight.device}", main.device, "move it there")
    if main.requires_grad:
        raise value_error(
            name, "a tensor that requires no gradient", "one that does", "it is a gradient: detach it"
        )
    if not weight.requires_grad:
        raise value_error(name, "a trainable weight", "a frozen one", "leave it out")
    # A view of a parameter has a part of the main gradient. Under torch.compile every input is a leaf.
    leaf = weight if weight._base is None else weight._base
    if not leaf.is_leaf:
        remedy = "leave it out, so that the tensors from which the weight was computed get their gradients"
        raise value_error(name, "a parameter as weight, or a view of one", "a computed tensor", remedy)
    if call.loss.reduction == "none":
        raise value_error(
            "reduction", "'mean' or 'sum' with accumulate_into", repr(call.loss.reduction), "reduce the loss"
        )
    if not isinstance(grad_scale, int | float) or not math.isfinite(grad_scale):
        raise value_error(
            "grad_scale", "a finite number", grad_scale, "pass 1 / the number of micro-batches, for example"
        )
