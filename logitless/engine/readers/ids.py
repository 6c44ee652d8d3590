"""The readers of losses of several ids per token.

`IdsReader` computes the log-probabilities of ids that are an input. `TopkReader` selects the k ids with
the largest logits. `SlotReader` computes the statistics of several ids from a chunk of logits.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from logitless.engine.call import HeadCall
from logitless.engine.plan import Pass, Plan, Span
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.base import Costs, Reader, evaluate_statistics, logits_bytes
from logitless.engine.spec import LossSpec
from logitless.errors import value_error
from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head import select as selection
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import LogitTransform
from logitless.kernels.ids import slots
from logitless.kernels.ids.gathered import weighted_rows
from logitless.kernels.ids.slots import Upstream
from logitless.parallel.vocabulary import WholeVocabulary

# A column that no head has.
OUT_OF_RANGE_COLUMN = 2**31 - 1
# Bytes of statistics and temporaries for one slot of a row.
SLOT_BYTES = 160


class SlotReader(NamedTuple):
    """Computes statistics of several ids per token from a chunk of logits, and holds the kernels' arguments.

    `logits` (n, columns) are the chunk's logits of this rank's part of the vocabulary. `ids` (n, k) are ids
    of the whole vocabulary; a negative id is an empty slot.
    """

    transform: LogitTransform
    bias: Tensor | None  # (columns,)
    vocabulary: WholeVocabulary
    V: int
    targets: Tensor  # (n,) `ignore_index` in ignored rows, else a column that no head has
    ignore_index: int
    dtype: torch.dtype  # dtype of the statistics

    @property
    def options(self) -> dict:
        """Keyword arguments for the kernels that read a chunk."""
        return {"transform": self.transform, "bias": self.bias, "ignore_index": self.ignore_index}

    @property
    def gradient_options(self) -> dict:
        """Keyword arguments for `slots.sparse_grad`: ignored rows, and the transform of the head."""
        return {"transform": self.transform, "targets": self.targets, "ignore_index": self.ignore_index}

    def statistics(
        self, logits: Tensor, names: tuple[str, ...], maxima: Tensor | None = None
    ) -> TokenBuffers:
        """Compute log-sum-exp and the named statistics of each row over this rank's columns; 0 if ignored."""
        stats = kernels.allocate_stats(names, len(self.targets), self.dtype, logits.device)
        kernels.token_statistics(logits, self.targets, stats, **self.options, maxima=maxima)
        return stats

    def pop_logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits (n, k) of the ids, from the ranks that have them; -inf in empty slots.

        Overwrites these logits in the chunk with a value whose exponential is 0.
        """
        columns = self.vocabulary.to_local_ids(ids)
        z = slots.pop_logits(logits, columns, transform=self.transform, bias=self.bias)
        return self.vocabulary.logits_of(ids, z, columns)

    def ids_statistics(
        self, logits: Tensor, ids: Tensor, out: Mapping[str, Tensor], gradient: Tensor | None = None
    ) -> Tensor | None:
        """Write statistics of the ids to `out` (see `slots.statistics`), and overwrite their logits in the
        chunk.

        With `gradient`, also write p_r d z_r / d x_r for all other ids r to it, up to a factor per row, and
        return this factor (n,).
        """
        z = self.pop_logits(logits, ids)
        stats = kernels.allocate_stats(
            ("entropy",) if "entropy" in out else (), len(self.targets), self.dtype, logits.device
        )
        if gradient is None:
            kernels.token_statistics(logits, self.targets, stats, **self.options)
        else:
            options = {"gradient": gradient, **self.options}
            scale = kernels.logprob_gradient(logits, self.targets, stats, **options)
        options = {"logits": logits, "targets": self.targets, **self.options}
        options["columns"] = self.vocabulary.to_local_ids(ids)
        options["exchange"] = self.vocabulary.gathered if self.vocabulary.sharded else None
        slots.statistics(z, ids, stats, out, **options)
        if gradient is None:
            return None
        # `gradient` is the softmax over the ids that remain in the chunk, and `part` is the log of their
        # probability in the whole softmax. The entries of the ids that were overwritten are 0, because their
        # probability or, with a softcap, its derivative is 0. If no id remains in the chunk, lse is -inf and
        # the factor is 0.
        part = (stats.lse - out["lse"]) + (stats.lse_residual - out["lse_residual"])
        return torch.where(stats.lse == -torch.inf, 0.0, -scale * part.exp())


class IdsReader(Reader):
    """The reader of a loss of the log-probabilities of given ids.

    Attributes:
        stats: (rows, ...) each, by `statistic_names`: written by `read`, or the known statistics.
        grads: (rows, ...) d loss / d statistic by name: written by `evaluate`, or the upstream gradients.
        keeps_dlogp_dhidden: whether sum_v p_v W[v] over all other ids is kept, and scaled later.
    """

    statistics: ClassVar = ("ids", "logps", "lse", "lse_residual", "rest", "entropy")
    differentiable: ClassVar = ("logps", "lse", "rest", "entropy")
    new_statistics: ClassVar = staticmethod(torch.empty)  # all rows are written before they are used

    _targets: Tensor | None = None  # (N,) the ignored value in ignored rows, else OUT_OF_RANGE_COLUMN

    def resume(self, known: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> None:
        self.stats = dict(known)
        self.grads = dict(upstream)

    def start(self, plan: Plan) -> None:
        call = self.call
        V = call.V
        if call.loss.k is not None and call.loss.k > V:
            raise value_error("k", f"at most the {V} ids of the vocabulary", call.loss.k, "pass a smaller k")
        self.stats = self.allocate(plan)
        self.grads: dict[str, Tensor] = {}
        self.keeps_dlogp_dhidden = plan.strategy == "cached_grad"

    def allocate(self, plan: Plan) -> dict[str, Tensor]:
        """Allocate the statistics (rows, ...) by name."""
        call = self.call
        shapes = self.statistic_shapes(call.loss, self.rows.count, call.inputs)
        return {
            name: self.new_statistics(shape, dtype=dtype or call.stat_dtype, device=call.targets.device)
            for name, (shape, dtype) in shapes.items()
        }

    @staticmethod
    def statistic_names(loss: LossSpec) -> tuple[str, ...]:
        extra = ("entropy",) if "entropy" in (*loss.differentiates, *loss.observes) else ()
        return ("ids", "logps", "lse", "lse_residual", "rest", *extra)

    @staticmethod
    def differentiable_names(loss: LossSpec) -> tuple[str, ...]:
        return (*loss.differentiates, "lse")

    @classmethod
    def statistic_shapes(cls, loss: LossSpec, rows: int, inputs: Mapping) -> dict[str, tuple]:
        slots = {name: ((rows, loss.slots(inputs)), None) for name in ("logps",)}
        slots["ids"] = ((rows, loss.slots(inputs)), torch.int64)
        return {name: slots.get(name, ((rows,), None)) for name in cls.statistic_names(loss)}

    @staticmethod
    def allows_cached_grad(loss: LossSpec) -> bool:
        return set(loss.differentiates) <= {"logps", "lse", "rest"}

    @classmethod
    def costs(cls, call: HeadCall, budget: int, purpose: Pass) -> Costs:
        loss = call.loss
        device = call.weight.device
        dtype = call.logits_dtype
        row = loss.slots(call.inputs) * SLOT_BYTES
        fixed = kernels.twin_bytes(device, dtype, call.width, budget)
        if loss.k is not None:
            k = min(loss.k, call.width)
            row += selection.row_bytes(call.width, k)
            fixed = max(fixed, selection.fixed_bytes(device, dtype, call.width, k, budget))
        logits, pieces = logits_bytes(call)
        return Costs(row + logits, fixed + pieces, cls.allows_cached_grad(loss), rereads=False)

    def named_statistics(self) -> dict[str, Tensor]:
        return self.stats

    def read(self, chunk: Chunk, projection: Projection) -> None:
        projection.project(chunk)
        if not chunk.reads:
            return
        self.read_ids(chunk, self._slot_reader(chunk), self.call.inputs["ids"][chunk.row_index])

    def read_ids(self, chunk: Chunk, slot_reader: SlotReader, ids: Tensor) -> None:
        """Compute and keep the statistics of ids (n, k). Overwrites the logits of the ids in the chunk.

        In a writing step of strategy cached_grad, the same kernel writes the gradient of the logits of all
        other ids, up to `chunk.factor`.
        """
        self._keep(chunk, {"ids": ids})
        stats = self._at(chunk.rows)
        names = ("logps", "lse", "lse_residual", "rest", "entropy")
        out = {name: stats[name] for name in names if name in stats}
        single = self.keeps_dlogp_dhidden and chunk.writes and kernels.single_pass(chunk.grad_buffer.dtype)
        chunk.gradient = chunk.grad_buffer if single else None
        chunk.factor = slot_reader.ids_statistics(chunk.logits, ids, out, chunk.gradient)

    def _slot_reader(self, chunk: Chunk) -> SlotReader:
        call = self.call
        ignored = chunk.ignore_index
        if self._targets is None:
            unused_column = OUT_OF_RANGE_COLUMN if ignored != OUT_OF_RANGE_COLUMN else OUT_OF_RANGE_COLUMN - 1
            self._targets = torch.where(call.targets == call.loss.ignore_index, ignored, unused_column)
        targets = self._targets[chunk.row_index]
        return SlotReader(
            call.loss.logit_transform, call.bias, call.vocabulary, call.V, targets, ignored, call.stat_dtype
        )

    def _keep(self, chunk: Chunk, statistics: Mapping[str, Tensor]) -> None:
        for name, x in statistics.items():
            if name in self.stats:
                self.stats[name][chunk.rows] = x

    def evaluate(self, span: Span) -> None:
        rows = slice(span.start, span.stop)
        for name, gradient in evaluate_statistics(self, span, self._at(rows)).items():
            if name not in self.grads:
                self.grads[name] = torch.zeros_like(self.stats[name])
            self.grads[name][rows] = gradient

    def write(self, chunk: Chunk, projection: Projection) -> None:
        slot_reader = self._slot_reader(chunk)
        rows = chunk.rows
        stats = self._at(rows)
        upstream = Upstream(None)
        if self.keeps_dlogp_dhidden:
            ids = stats["ids"]
            entries = 0.0
            factor = torch.ones_like(stats["lse"])
        else:
            upstream = self._upstream(rows)
            ids, entries, factor = slots.sparse_grad(stats, upstream, **slot_reader.gradient_options)
        self._spread(chunk, slot_reader, stats, TokenBuffers(lse=factor, entropy=upstream.entropy))
        slots.scatter(chunk.grad_buffer, slot_reader.vocabulary.to_local_ids(ids), entries)
        chunk.gradient = chunk.grad_buffer

    def _spread(
        self, chunk: Chunk, slot_reader: SlotReader, stats: dict[str, Tensor], grads: TokenBuffers
    ) -> None:
        """Overwrite the logits with the part of their gradient that is a row factor times probabilities."""
        # If there is no target in the chunk, the kernel does not use log-probabilities: pass any (n,) tensor.
        logps = stats["hard" if grads.logps is not None else "lse"]
        token_stats = TokenBuffers(logps, stats["lse"], stats["lse_residual"], stats.get("entropy"))
        options = {
            "transform": slot_reader.transform,
            "bias": slot_reader.bias,
            "ignore_index": chunk.ignore_index,
        }
        kernels.logits_gradient(
            chunk.logits, slot_reader.targets, token_stats, grads, gradient=chunk.grad_buffer, **options
        )

    def _at(self, rows: slice) -> dict[str, Tensor]:
        """The statistics of some rows."""
        return {name: x[rows] for name, x in self.stats.items()}

    def _upstream(self, rows: slice) -> Upstream:
        grads = {name: x[rows] for name, x in self.grads.items()}
        return Upstream(*(grads.get(name) for name in Upstream._fields))

    def row_factors(self, chunk: Chunk) -> tuple[Tensor, ...]:
        return () if chunk.factor is None else (chunk.factor,)

    def scale_cached_grad(
        self, dlogp_dhidden: Tensor, at: slice | Tensor, rows: slice, projection: Projection
    ) -> Tensor:
        """(n, H) d loss / d hidden of the rows `rows` of the statistics, which are the rows `at` of the call.

        `dlogp_dhidden` (n, H) holds sum_v p_v W[v] over all ids v outside `stats["ids"]`. The terms of the
        ids in `stats["ids"]` are computed from their rows of the head and added, so that nothing cancels.
        """
        call = self.call
        loss = call.loss
        options = {
            "transform": loss.logit_transform,
            "targets": call.targets[at],
            "ignore_index": loss.ignore_index,
        }
        ids, entries, factor = slots.sparse_grad(self._at(rows), self._upstream(rows), **options)
        columns = call.vocabulary.to_local_ids(ids)
        if not call.vocabulary.sharded:
            out = torch.empty_like(dlogp_dhidden)
            return weighted_rows(projection.weight, columns, entries, out, base=dlogp_dhidden, factor=factor)
        input_terms = call.vocabulary.reduce(weighted_rows(projection.weight, columns, entries))
        return torch.addcmul(input_terms, dlogp_dhidden.to(input_terms.dtype), factor[:, None])


class TopkReader(IdsReader):
    """The k ids with the largest logits of each row, and their log-probabilities, without gradients.

    One pass over a chunk computes its statistics and the maxima of column tiles, which `best` uses to select
    the ids.
    """

    @staticmethod
    def statistic_names(loss: LossSpec) -> tuple[str, ...]:
        return ("ids", "logps", "lse", "entropy")

    def read(self, chunk: Chunk, projection: Projection) -> None:
        projection.project(chunk)
        slot_reader = self._slot_reader(chunk)
        k = self.call.loss.k
        maxima = selection.new_maxima(chunk.logits, min(k, chunk.logits.shape[1]))
        stats = slot_reader.statistics(chunk.logits, ("entropy",), maxima)
        slot_reader.vocabulary.merge_stats(stats, slot_reader.targets)
        ids = best(chunk.logits, k, slot_reader, maxima)
        logps = (slot_reader.pop_logits(chunk.logits, ids) - stats.lse[:, None]) - stats.lse_residual[:, None]
        if not self.call.loss.compact:
            supervised = (chunk.targets != chunk.ignore_index)[:, None]
            ids = torch.where(supervised, ids, 0)
            logps = torch.where(supervised, logps, 0.0)
        self._keep(chunk, {"ids": ids, "logps": logps, "lse": stats.lse, "entropy": stats.entropy})


def best(logits: Tensor, k: int, slot_reader: SlotReader, maxima: Tensor | None = None) -> Tensor:
    """(n, k) ids of the k largest logits of the whole vocabulary, in descending order.

    Equal logits are in ascending order of their ids.
    """
    vocabulary = slot_reader.vocabulary
    width = logits.shape[1]
    options = {"transform": slot_reader.transform, "bias": slot_reader.bias, "maxima": maxima}
    columns = selection.select(logits, min(k, width), **options)
    if not vocabulary.sharded:
        return columns
    bias = None if slot_reader.bias is None else slot_reader.bias[columns]
    z = selection.compared(logits.gather(1, columns), slot_reader.transform, bias)
    missing = (0, min(k, max(vocabulary.sizes)) - columns.shape[1])
    z = pad(z, missing, value=-torch.inf)
    ids = pad(columns + vocabulary.start, missing, value=slot_reader.V)
    z, ids = (vocabulary.gathered(x).transpose(0, 1).flatten(1) for x in (z, ids))
    # Sort by id, then stably by logit, so that among equal logits the lowest id comes first. Padding comes
    # last.
    ids, by_id = ids.sort(dim=1, stable=True)
    chosen = z.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return ids.gather(1, chosen)
