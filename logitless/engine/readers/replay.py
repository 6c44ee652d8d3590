"""Losses of per-token statistics with a sampling mask: the softmax of a row is over the ids of its set.

`ReplayReader` multiplies each gathered row with the rows of the head for the ids of its set
(`_read_gathered`), lets the projection multiply all other rows with the whole head, and computes the
statistics of a set from the logits of its slots. `ReplayProjection` has the two products of the gradients of
gathered rows, and is a plain `Projection` for all other rows. The evaluation of the loss is that of
`TokenReader`, because it does not depend on the sets.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.plan import Kind, Plan, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.tokens import TokenReader
from logitless.engine.replay import GATHERED, PICKED, Replay
from logitless.engine.rows import Rows
from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import LogitTransform
from logitless.kernels.ids import sets
from logitless.kernels.ids.sets import Slots
from logitless.kernels.matmul import project


class ReplayProjection(Projection):
    """A projection in which the gradient of the gathered rows has one entry per slot: (S,), not (C, V)."""

    def __init__(self, call: HeadCall, rows: Rows, *, gradients: bool):
        super().__init__(call, rows.replay.chunked, gradients=gradients)
        self.replay: Replay = rows.replay
        self.local = {which: _local(call, slots) for which, slots in self.replay.slots.items()}
        self.gathers = False  # whether the current chunk is the chunk of the gathered rows
        # Buffer for the logits of the picked rows, if the chunks of the plain rows do not store logits.
        self._picked: Tensor | None = None
        self._stored = True
        self._rows = 0

    def new_buffer(self, plan: Plan, *, fused_epilogue: bool) -> tuple[Tensor, Tensor]:
        self._stored = not fused_epilogue
        self._rows = plan.token_chunk
        return super().new_buffer(plan, fused_epilogue=fused_epilogue)

    def take(self, chunk: Chunk) -> None:
        super().take(chunk)
        self.gathers = chunk.kind is Kind.GATHERED
        if chunk.kind is Kind.PICKED and not self._stored:
            if self._picked is None:
                shape = (self._rows, self.weight.shape[0])
                dtype = self.call.logits_dtype
                self._picked = self.weight.new_empty(shape, dtype=dtype)
            chunk.logits = self._picked[: chunk.count]
            chunk.grad_buffer = chunk.logits
            if chunk.logits.dtype != self.weight.dtype:
                chunk.grad_buffer = chunk.logits.view(self.weight.dtype)[:, : self.weight.shape[0]]

    def backproject(self, chunk: Chunk) -> None:
        if not self.gathers:
            super().backproject(chunk)
        elif self.needs.hidden or self.needs.layers:
            out = self.d_features(chunk)
            chunk.d_features = sets.slot_rows(self.weight, self.local[GATHERED], chunk.gradient, out)

    def accumulate(self, total: Tensor, gradient: Tensor, features: Tensor, *, first: bool) -> None:
        if self.gathers:
            sets.add_slot_rows(total, self.local[GATHERED], gradient, features, first=first)
        else:
            Projection.accumulate(total, gradient, features, first=first)


def _local(call: HeadCall, slots: Slots) -> Slots:
    """Return the slots with ids replaced by rows of this rank's head; negative for ids of other ranks."""
    if not call.vocabulary.sharded:
        return slots
    start, width = call.vocabulary.row_range(call.V)
    ids = slots.ids - start
    return slots._replace(ids=torch.where((slots.ids >= 0) & (ids >= 0) & (ids < width), ids, -1))


class ReplayReader(TokenReader):
    """The reader of a loss of per-token statistics in a call with a sampling mask.

    Statistics and their gradients are in chunk order (see `replay.Replay`), except inside `evaluate`.
    """

    def resume(self, known: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> None:
        reordered = self.replay.in_chunk_order
        known = {name: reordered(x) for name, x in known.items()}
        super().resume(known, {name: reordered(x) for name, x in upstream.items()})

    def start(self, plan: Plan) -> None:
        super().start(plan)
        count = self.rows.count
        certain = slice(count - self.replay.certain, count)
        for name, x in self.stats.items():
            x[certain] = float(name == "is_top1")
        if self.ref_logps is not None:
            self.ref_logps[certain] = 0.0

    @property
    def replay(self) -> Replay:
        return self.rows.replay

    def named_statistics(self) -> dict[str, Tensor]:
        return {name: self.replay.in_row_order(x) for name, x in super().named_statistics().items()}

    def read(self, chunk: Chunk, projection: ReplayProjection) -> None:
        kind = chunk.kind
        if kind is Kind.PLAIN:
            super().read(chunk, projection)
        elif kind is Kind.GATHERED:
            self._read_gathered(chunk, projection)
        else:
            self._read_picked(chunk, projection)

    def _read_gathered(self, chunk: Chunk, projection: ReplayProjection) -> None:
        call = self.call
        slots = projection.local[GATHERED]
        logits = self.replay.logits
        if GATHERED not in logits:
            products = sets.slot_products(chunk.features, projection.weight, slots, call.stat_dtype)
            logits[GATHERED] = self._logits(products, slots, call.loss.logit_transform, call.bias)
        if not chunk.reads:
            return
        sets.set_statistics(logits[GATHERED], slots, self._stats(chunk))
        if self.ref_logps is not None:
            inputs = call.inputs
            hidden = inputs["ref_hidden"][chunk.row_index].to(call.dtype).contiguous()
            products = sets.slot_products(hidden, self.ref_weight, slots, call.stat_dtype)
            z = self._logits(products, slots, call.loss.ref_transform, inputs["ref_bias"])
            self._keep_reference(chunk, z, slots)

    def _logits(
        self, products: Tensor, slots: Slots, transform: LogitTransform, bias: Tensor | None
    ) -> Tensor:
        """(S,) logits of the slots of all ranks, from this rank's products; rounded like those of a chunk."""
        products = products.to(self.call.logits_dtype).to(products.dtype)
        bias = None if bias is None else bias[slots.ids.clamp(min=0)]
        z, _ = transform.logits(products, bias)
        return self._of_all_ranks(z, slots)

    def _of_all_ranks(self, z: Tensor, slots: Slots) -> Tensor:
        """Sum z over the ranks. Only one rank has a nonzero number for each slot, so the sum is exact."""
        if not self.call.vocabulary.sharded:
            return z
        return self.call.vocabulary.reduce(torch.where(slots.ids >= 0, z, 0.0))

    def _read_picked(self, chunk: Chunk, projection: ReplayProjection) -> None:
        call = self.call
        slots = self._picked_slots(chunk, projection)
        stats = self._stats(chunk)
        if chunk.reads and self.ref_logps is not None:
            inputs = call.inputs
            rest = self._without_sets(chunk, slots)
            hidden = inputs["ref_hidden"][chunk.row_index].to(call.dtype)
            project(hidden, self.ref_weight, chunk.logits)
            z = self._picked_logits(chunk, slots, call.loss.ref_transform, inputs["ref_bias"])
            if rest is not None:
                ref_stats = kernels.allocate_stats((), len(rest), call.stat_dtype, rest.device)
                options = {"transform": call.loss.ref_transform, "bias": inputs["ref_bias"]}
                kernels.token_statistics(
                    chunk.logits, rest, ref_stats, **options, ignore_index=chunk.ignore_index
                )
                call.vocabulary.merge_stats(ref_stats, rest)
                self.ref_logps[chunk.rows] = ref_stats.logps
            self._keep_reference(chunk, z, slots)
        projection.project(chunk)
        rest = self._without_sets(chunk, slots)
        z = self._picked_logits(chunk, slots, call.loss.logit_transform, call.bias)
        self.replay.logits[PICKED] = z
        if not chunk.reads:
            return
        if rest is not None:
            options = {
                "transform": call.loss.logit_transform,
                "bias": call.bias,
                "ignore_index": chunk.ignore_index,
            }
            kernels.token_statistics(chunk.logits, rest, stats, **options)
            call.vocabulary.merge_stats(stats, rest)
        sets.set_statistics(z, slots, stats)

    def _picked_logits(
        self, chunk: Chunk, slots: Slots, transform: LogitTransform, bias: Tensor | None
    ) -> Tensor:
        """(S,) logits of the chunk's slots; the entries for other chunks are arbitrary."""
        z = torch.zeros(slots.ids.shape[0], dtype=self.call.stat_dtype, device=slots.ids.device)
        sets.picked_logits(chunk.logits, slots, z, transform=transform, bias=bias)
        return self._of_all_ranks(z, slots)

    def _picked_slots(self, chunk: Chunk, projection: ReplayProjection) -> Slots:
        first = chunk.start - self.replay.plain
        return projection.local[PICKED].of_rows(first, chunk.stop - self.replay.plain)

    def _without_sets(self, chunk: Chunk, slots: Slots) -> Tensor | None:
        """(C,) targets, ignored in rows that have a set; None if the host knows that every row has one."""
        if self.call.loss.compact:
            return None
        return torch.where(slots.bounds.diff() > 0, chunk.ignore_index, chunk.targets)

    def _stats(self, chunk: Chunk) -> TokenBuffers:
        return self.stats[chunk.rows]

    def _keep_reference(self, chunk: Chunk, z: Tensor, slots: Slots) -> None:
        ref_stats = kernels.allocate_stats((), 0, z.dtype, z.device)
        rows = chunk.rows
        ref_stats = TokenBuffers(
            logps=self.ref_logps[rows],
            **{
                name: torch.empty_like(self.ref_logps[rows])
                for name, _ in ref_stats.items()
                if name != "logps"
            },
        )
        sets.set_statistics(z, slots, ref_stats)

    def evaluate(self, span: Span) -> None:
        replay = self.replay
        if replay.order is None:
            super().evaluate(span)
            return
        stats, ref_logps = self.stats, self.ref_logps
        self.stats = TokenBuffers(**{name: replay.in_row_order(x) for name, x in stats.items()})
        if ref_logps is not None:
            self.ref_logps = replay.in_row_order(ref_logps)
        super().evaluate(span)
        self.stats, self.ref_logps = stats, ref_logps
        self.grads = TokenBuffers(**{name: replay.in_chunk_order(x) for name, x in self.grads.items()})

    def write(self, chunk: Chunk, projection: ReplayProjection) -> None:
        kind = chunk.kind
        loss = self.call.loss
        if kind is Kind.PLAIN:
            super().write(chunk, projection)
            return
        stats = self._stats(chunk)
        grads = self.grads[chunk.rows]
        if kind is Kind.GATHERED:
            z = self.replay.logits[GATHERED]
            slots = projection.local[GATHERED]
            chunk.gradient = sets.set_gradient(z, slots, stats, grads, loss.logit_transform)
            return
        slots = self._picked_slots(chunk, projection)
        chunk.gradient = chunk.grad_buffer
        rest = self._without_sets(chunk, slots)
        if rest is None:
            chunk.grad_buffer.zero_()
        else:
            options = {
                "transform": loss.logit_transform,
                "bias": self.call.bias,
                "ignore_index": chunk.ignore_index,
            }
            kernels.logits_gradient(chunk.logits, rest, stats, grads, gradient=chunk.grad_buffer, **options)
        sets.scatter_gradient(
            chunk.grad_buffer, self.replay.logits[PICKED], slots, stats, grads, loss.logit_transform
        )
