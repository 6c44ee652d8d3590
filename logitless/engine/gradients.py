"""Sums of the gradients of a call's trained tensors, over chunks and over heads, up to the deferred factor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from logitless.engine.call import Call
from logitless.engine.chunk import Chunk
from logitless.engine.projection import Projection
from logitless.kernels.matmul import accumulate
from logitless.kernels.scale import scale


@dataclass
class Sum:
    """A buffer: the first chunk writes it, later ones add."""

    total: Tensor
    written: bool = False

    def add(self, gradient: Tensor, features: Tensor) -> None:
        """gradient.T @ features."""
        accumulate(self.total, gradient, features, first=not self.written)
        self.written = True


class Gradients:
    """Where the loop adds a chunk's share of d_weight and d_bias, and what comes of it.

    What several heads share is summed in fp32; what is one head's alone is cast as soon as the head is done, so that a single
    unshared d_weight in fp32 is alive at a time. The cast loses nothing that the last one, after a power of two, would not.
    """

    def __init__(self, calls: Sequence[Call], *, static: bool, main: Tensor | None = None):
        self._static, self._main = static, main
        self._several = len(calls) > 1
        self._last = {slot: call for call in calls for slot in call.slots[:3]}
        self._weight: Sum | None = None  # of the head that is walked
        self._bias: Sum | None = None
        self._sums: dict[int, Tensor] = {}

    @classmethod
    def fresh(cls, calls: Sequence[Call], *, static: bool) -> Self:
        """In buffers of our own. With `static` their dtypes do not depend on the number of tokens, as in a compiled graph."""
        return cls(calls, static=static)

    @classmethod
    def onto(cls, main: Tensor, calls: Sequence[Call], *, static: bool) -> Self:
        """The weight's gradient is added to `main` (V, H) as it is: no factor is left for the backward pass."""
        return cls(calls, static=static, main=main)

    def deferred(self, call: Call) -> float | None:
        """The deferred factor that these sums demand; None: any will do.

        In fp16 alone gradients must be kept at order one, which takes `main` to that order and back.
        """
        return None if self._main is None or call.dtype == torch.float16 else 1.0

    def open(self, call: Call, deferred: float | Tensor, *, several_chunks: bool) -> None:
        """Begin with a head."""
        needs, (V, H), device = call.needs, call.weight.shape, call.weight.device
        several_chunks = several_chunks or self._static
        if needs.weight and self._main is not None:
            self._weight = Sum(self._main, written=True)
            if self.deferred(call) is None:
                self._main.div_(deferred)
        elif needs.weight:
            dtype = call.loss.accum_dtype or (call.stat_dtype if several_chunks else call.dtype)
            self._weight = self._sum(call.slots.weight, (V, H), dtype, device)
        if needs.bias:
            self._bias = self._sum(call.slots.bias, (V, 1), call.stat_dtype, device)

    def _sum(self, slot: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Sum:
        if slot in self._sums:
            return Sum(self._sums[slot], written=True)
        self._sums[slot] = torch.empty(shape, dtype=dtype, device=device)
        return Sum(self._sums[slot])

    def add(self, chunk: Chunk, head: Projection) -> None:
        """Product 3: a chunk's share of d_weight and d_bias."""
        if self._weight is not None:
            self._weight.add(chunk.gradient, head.trained_features(chunk))
        if self._bias is not None:
            self._add_bias(chunk)

    def _add_bias(self, chunk: Chunk) -> None:
        gradient, factor = chunk.gradient, chunk.factor
        if factor is None:
            factor = gradient.new_ones(gradient.shape[0])
        column = factor.to(gradient.dtype)
        if column.dtype == factor.dtype:
            self._bias.add(gradient, column[:, None])
            return
        # In two pieces: a factor that all tokens share would be rounded the same way in all of them.
        pieces = Sum(self._bias.total.new_empty(self._bias.total.shape[0], 2))
        pieces.add(gradient, torch.stack((column, (factor - column).to(column.dtype)), dim=1))
        share = pieces.total.sum(1, keepdim=True)
        self._bias.total.add_(share) if self._bias.written else self._bias.total.copy_(share)
        self._bias.written = True

    def close(self, call: Call, head: Projection, deferred: float | Tensor) -> None:
        """End with a head: zero what no chunk reached, take its d_hidden, cast what no later head adds to."""
        for total in (self._weight, self._bias):
            if total is not None and not total.written:
                total.total.zero_()
        if self._main is not None and call.needs.weight and self.deferred(call) is None:
            self._main.mul_(deferred)
        if call.needs.hidden:
            self._add_hidden(call, head.d_hidden)
        if head.layers is not None:
            slots = dict(zip(call.layers.tensors, call.slots.layers, strict=True))
            for name, total in head.layers.sums.items():
                self._sums[slots[name]] = total.to(call.layers.tensors[name].dtype)
        if self._several:
            for slot, x in ((call.slots.weight, call.weight), (call.slots.bias, call.bias)):
                if slot in self._sums and self._last[slot] is call:
                    self._sums[slot] = self._sums[slot].to(x.dtype)
        self._weight = self._bias = None

    def _add_hidden(self, call: Call, d_hidden: Tensor) -> None:
        slot = call.slots.hidden
        if not self._several:
            self._sums[slot] = d_hidden
        elif slot in self._sums:
            self._sums[slot].add_(d_hidden)
        else:
            self._sums[slot] = d_hidden.to(call.stat_dtype)

    def of(self, slot: int) -> Tensor | None:
        """The sum of one of the call's trained tensors; None where it needs none, or lies in `main`."""
        return self._sums.get(slot)


def finish(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype, *, owned: bool) -> Tensor | None:
    """`gradient * factor` in `dtype`, in fp32 arithmetic and one pass; in place where nobody else will read the gradient."""
    if gradient is None:
        return None
    if torch.compiler.is_compiling():
        return (gradient.to(factor.dtype) * factor).to(dtype)
    return scale(gradient, factor, gradient if owned and gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype))
