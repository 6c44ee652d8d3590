"""The reader of a divergence over a few ids per token: the most probable ids of student or teacher."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.plan import Pass
from logitless.engine.projection import Chunk, Projection
from logitless.engine.readers.base import Costs, logits_bytes
from logitless.engine.readers.gathered import GatheredReader
from logitless.engine.readers.ids import SLOT_BYTES, IdsReader, SlotReader, best
from logitless.engine.replay import GATHER_BREAK_EVEN
from logitless.engine.spec import LossSpec
from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.ids import slots
from logitless.kernels.matmul import project
from logitless.parallel.vocabulary import WHOLE_VOCABULARY

TEACHER = ("teacher_logps", "teacher_rest", "agreement")
# Statistics of the label: log p at temperature 1, log-sum-exp at temperature 1 and its residual, top-1 flag.
LABEL = ("hard", "hard_lse", "hard_lse_residual", "token_accuracy")


def gathered_columns(call: HeadCall) -> int:
    """Number of logits per row that are computed from gathered rows of the head; 0: all, by a product."""
    k = call.loss.slots(call.inputs)
    return k if call.loss.cancels and k * GATHER_BREAK_EVEN < call.V else 0


def teacher_dtype(call: HeadCall) -> torch.dtype:
    """The dtype of the teacher's logits: the wider dtype of the teacher's head and the student's logits."""
    return torch.promote_types(call.logits_dtype, call.inputs["teacher_weight"].dtype)


class SupportReader(IdsReader):
    """The reader of distillation over a support, with statistics of student, teacher and label."""

    statistics: ClassVar = (*IdsReader.statistics, *TEACHER, *LABEL)
    differentiable: ClassVar = ("logps", "rest", "hard")
    gathers: ClassVar = True
    new_statistics: ClassVar = staticmethod(torch.zeros)  # without labels, some statistics are never written

    _teacher_buffer: Tensor | None = None

    @classmethod
    def of(cls, call: HeadCall) -> type[IdsReader]:
        return GatheredReader if gathered_columns(call) else cls

    @staticmethod
    def allows_cached_grad(loss: LossSpec) -> bool:
        # If the log-sum-exp cancels, only the logits of the ids are used, and there is no d logp / d hidden
        # to keep.
        return not loss.cancels and IdsReader.allows_cached_grad(loss)

    @staticmethod
    def statistic_names(loss: LossSpec) -> tuple[str, ...]:
        return (*IdsReader.statistic_names(loss), *TEACHER, *LABEL)

    @classmethod
    def statistic_shapes(cls, loss: LossSpec, rows: int, inputs: Mapping) -> dict[str, tuple]:
        shapes = super().statistic_shapes(loss, rows, inputs)
        return shapes | {"teacher_logps": shapes["logps"]}

    @staticmethod
    def differentiable_names(loss: LossSpec) -> tuple[str, ...]:
        return loss.differentiates

    @classmethod
    def costs(cls, call: HeadCall, budget: int, purpose: Pass) -> Costs:
        costs = super().costs(call, budget, purpose)
        loss = call.loss
        if columns := gathered_columns(call):
            row = costs.row_bytes - logits_bytes(call)[0]
            return costs._replace(row_bytes=row, fixed_bytes=0, columns=columns)
        row = costs.row_bytes + loss.slots(call.inputs) * SLOT_BYTES
        teacher = call.inputs["teacher_weight"]
        if teacher is not None:
            row += call.vocabulary.max_shard_rows(teacher.shape[0]) * teacher_dtype(call).itemsize
        if "hard" in loss.differentiates and loss.temperature != 1.0:
            row += call.width * call.dtype.itemsize
        return costs._replace(row_bytes=row)

    def read(self, chunk: Chunk, projection: Projection) -> None:
        projection.project(chunk)
        if not chunk.reads:
            return
        slot_reader = self._slot_reader(chunk)
        inputs = self.call.inputs
        statistics = self._read_label(chunk, slot_reader)
        argmax_ids = {"student": best(chunk.logits, 1, slot_reader)[:, 0]}
        if inputs["ids"] is None:
            teacher, taught = self._teacher_logits(chunk, slot_reader)
            ids, argmax_ids["teacher"] = self._support(chunk.logits, slot_reader, taught, teacher)
            stats = self._at(chunk.rows)
            teacher.ids_statistics(
                taught, ids, {"logps": stats["teacher_logps"], "rest": stats["teacher_rest"]}
            )
        else:
            ids, statistics["teacher_logps"] = self._given(chunk)
            at = statistics["teacher_logps"].argmax(1, keepdim=True)
            argmax_ids["teacher"] = ids.gather(1, at)[:, 0]
        statistics["agreement"] = argmax_ids["student"] == argmax_ids["teacher"]
        labels = inputs["labels"]
        if labels is not None:
            statistics["token_accuracy"] = argmax_ids["student"] == labels[chunk.row_index]
        self._keep(chunk, statistics)
        self.read_ids(chunk, slot_reader, ids)

    def _given(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the teacher's top-k ids (n, k), duplicates replaced by -1, and their log-probabilities."""
        ids = self.call.inputs["ids"][chunk.row_index]
        logps = self.call.inputs["teacher_logps"][chunk.row_index]
        ids = slots.dedupe(torch.where(logps == -torch.inf, -1, ids))
        return ids, torch.where(ids >= 0, logps.to(self.call.stat_dtype), -torch.inf)

    def _teacher_logits(self, chunk: Chunk, slot_reader: SlotReader) -> tuple[SlotReader, Tensor]:
        """Project the teacher's rows into a separate buffer.

        Returns (slot_reader of the teacher's head, logits).
        """
        call = self.call
        rows, _ = chunk.logits.shape
        hidden, weight = call.inputs["teacher_hidden"], call.inputs["teacher_weight"]
        columns = weight.shape[0]
        if self._teacher_buffer is None or self._teacher_buffer.shape[0] < rows:
            self._teacher_buffer = chunk.logits.new_empty(rows, columns, dtype=teacher_dtype(call))
        logits = project(hidden[chunk.row_index].to(weight.dtype), weight, self._teacher_buffer[:rows])
        vocabulary, V = (call.vocabulary, call.V) if call.vocabulary.sharded else (WHOLE_VOCABULARY, columns)
        teacher = slot_reader._replace(
            transform=call.loss.teacher_transform,
            bias=call.inputs["teacher_bias"],
            vocabulary=vocabulary,
            V=V,
        )
        return teacher, logits

    def _support(
        self, logits: Tensor, slot_reader: SlotReader, taught: Tensor, teacher: SlotReader
    ) -> tuple[Tensor, Tensor]:
        """Return (ids (n, slots) of the support, duplicates replaced by -1; the teacher's arg-max (n,))."""
        loss = self.call.loss
        best_ids = {}
        for name, z, side in (("student", logits, slot_reader), ("teacher", taught, teacher)):
            if not side.vocabulary.sharded:
                # The support contains only ids that both vocabularies have.
                shared = loss.shared_vocabulary or logits.shape[1]
                common = min(shared, logits.shape[1], taught.shape[1])
                z = z[:, :common]
                side = side._replace(bias=None if side.bias is None else side.bias[:common])
            wanted = loss.support in (name, "union")
            best_ids[name] = best(z, loss.k if wanted else 1, side)
        argmax_id = best_ids["teacher"][:, 0]
        if loss.support != "union":
            return best_ids[loss.support], argmax_id
        ids = torch.cat((best_ids["teacher"], best_ids["student"]), 1)
        return slots.dedupe(ids), argmax_id

    def _read_label(self, chunk: Chunk, slot_reader: SlotReader) -> dict[str, Tensor]:
        """Compute log p of the label at temperature 1, and the log-sum-exp at temperature 1."""
        if self.call.inputs["labels"] is None:
            return {}
        columns, labelled = self._labels(chunk)
        stats = kernels.allocate_stats((), len(columns), slot_reader.dtype, chunk.logits.device)
        options = {
            "transform": self._warm(slot_reader),
            "bias": slot_reader.bias,
            "ignore_index": chunk.ignore_index,
        }
        kernels.token_statistics(chunk.logits, columns, stats, **options)
        slot_reader.vocabulary.merge_stats(stats, columns)
        return {
            "hard": torch.where(labelled, stats.logps, 0.0),
            "hard_lse": stats.lse,
            "hard_lse_residual": stats.lse_residual,
        }

    def _labels(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return (labels as columns of the chunk, whether each row has a label).

        The column is `chunk.ignore_index` for ignored tokens. It is the width of the chunk if the label is on
        another rank or outside the vocabulary. A row has a label if the label is in the vocabulary, on any
        rank.
        """
        labels = self.call.inputs["labels"][chunk.row_index].long()
        width = chunk.logits.shape[1]
        columns, local = self.call.vocabulary.locate(labels, self.call.V)
        ignored = chunk.targets == chunk.ignore_index
        labelled = (labels >= 0) & (labels < self.call.V) & ~ignored
        return torch.where(ignored, chunk.targets, torch.where(local, columns, width)), labelled

    def _warm(self, slot_reader: SlotReader):
        return slot_reader.transform._replace(temperature=1.0)

    def write(self, chunk: Chunk, projection: Projection) -> None:
        hard_grads = self.grads.get("hard")
        if hard_grads is None:
            super().write(chunk, projection)
            return
        rows = chunk.rows
        slot_reader = self._slot_reader(chunk)
        stats = self._at(rows)
        columns, labelled = self._labels(chunk)
        warm = self._warm(slot_reader)
        g = torch.where(labelled, hard_grads[rows], 0.0)
        ids, entries, factor = slots.sparse_grad(stats, self._upstream(rows), **slot_reader.gradient_options)
        if warm == slot_reader.transform:
            both = TokenBuffers(logps=g, lse=factor)
            self._spread(chunk, slot_reader._replace(targets=columns), stats, both)
        else:
            # The softmax at temperature 1, before `_spread` overwrites the logits.
            label_stats = self._of_label(stats)
            label_grad = torch.empty_like(chunk.grad_buffer)
            options = {"transform": warm, "bias": slot_reader.bias, "ignore_index": chunk.ignore_index}
            kernels.logits_gradient(
                chunk.logits, columns, label_stats, TokenBuffers(logps=g), gradient=label_grad, **options
            )
            self._spread(chunk, slot_reader, stats, TokenBuffers(lse=factor))
            chunk.grad_buffer.add_(label_grad)
        # The gradient of the label's loss at the ids of the support, whose logits were overwritten in the
        # chunk.
        labels = torch.where(labelled, self.call.inputs["labels"][chunk.row_index].long(), -2)
        z = (stats["logps"] + stats["lse"][:, None]) * slot_reader.transform.temperature
        rounding = stats["lse_residual"] - stats["hard_lse_residual"]
        p = (z - stats["hard_lse"][:, None] + rounding[:, None]).exp()
        label_entries = torch.where(ids == labels[:, None], -torch.expm1(stats["hard"])[:, None], -p)
        label_entries = torch.where(ids >= 0, label_entries * g[:, None] * warm.derivative_at(z), 0.0)
        slots.scatter(chunk.grad_buffer, slot_reader.vocabulary.to_local_ids(ids), entries + label_entries)
        chunk.gradient = chunk.grad_buffer

    def _of_label(self, stats: Mapping[str, Tensor]) -> TokenBuffers:
        return TokenBuffers(stats["hard"], stats["hard_lse"], stats["hard_lse_residual"])
