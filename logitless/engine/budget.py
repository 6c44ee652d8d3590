"""The plan of a pass within the memory budget of a chunk: the default budget, and the bytes of a row."""

import functools
import math
import weakref
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless.engine.call import HeadCall
from logitless.engine.compiled import compiled_chunk_function
from logitless.engine.evaluation import ChunkInputs, chunk_function, inputs_of_terms
from logitless.engine.plan import MIB, BudgetWarning, Facts, Pass, Plan, Replayed, make_plan, make_replay_plan
from logitless.engine.reduction import Units
from logitless.engine.remembered import Remembered
from logitless.engine.rows import Rows
from logitless.engine.spec import PER_TOKEN, LossSpec, Role
from logitless.engine.terms import UNITS
from logitless.errors import warn
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, LoneShard, WholeVocabulary

# Number of rows with which the memory of a `LogitsLoss` is measured.
MEASURED_ROWS = 64
# A GPU that reports at least this many bytes is large. GPUs sold with 64 GB report slightly less than 64 GiB.
LARGE_CARD = 60 * 2**30
# Measured bytes per row. The key contains the class and identity of the loss, and all other properties on
# which the measurement depends.
_MEASURED = Remembered()
# Number of fp32 copies of the logits that a loss is assumed to need if the measurement fails.
UNMEASURED_COPIES = 8


@functools.cache
def default_budget(device: torch.device) -> int:
    """The default `logits_budget` in bytes.

    * 2.5 GiB on GPUs that report at least 60 GiB (sold as 64 GB). 4,096 rows fit for every common vocabulary
      (Gemma's, with 262,144 ids, is the largest), and 8,192 rows for Qwen's.
    * On other GPUs the smaller of 1 GiB and 1/32 of the GPU's memory.
    * 256 MiB on the CPU: small chunks stay in the cache.
    * 512 MiB on devices that do not report their memory.
    """
    if device.type == "cpu":
        return 256 * MIB
    backend = getattr(torch, device.type, None)
    if hasattr(backend, "get_device_properties"):
        memory = backend.get_device_properties(device).total_memory
        return budget_of_memory(memory)
    return 512 * MIB


def budget_of_memory(memory: int) -> int:
    """The default `logits_budget` in bytes on a GPU with `memory` bytes."""
    return 2560 * MIB if memory >= LARGE_CARD else min(1024 * MIB, memory // 32)


# Warnings that were issued, by the identity of the loss and the subject of the warning.
_WARNED = Remembered()


def warn_once(loss: LossSpec, about: str, message: str) -> None:
    """Issue a `BudgetWarning` once per loss and subject (`about`).

    The numbers in it may differ in every call.
    """
    if (loss.identity, about) not in _WARNED:
        _WARNED[loss.identity, about] = True
        warn(message, BudgetWarning)


class PeakBytes(TorchDispatchMode):
    """Dispatch mode that records the peak memory of the storages that are created while it is active."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self._count(storage.nbytes())
                    weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        return result

    def _count(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def measured_row_bytes(call: HeadCall) -> int:
    """Bytes of temporaries per row in a `LogitsLoss`, measured once per loss and shape of its arguments."""
    loss = call.loss
    device = call.weight.device
    teacher = call.inputs.get("teacher_weight")
    # The width of the largest shard, so that all ranks plan the same chunks.
    teacher_width = 0 if teacher is None else call.vocabulary.max_shard_rows(teacher.shape[0])
    teacher_bytes = teacher_width * call.logits_dtype.itemsize
    if loss.has_kernel(device, call.logits_dtype, call.inputs):
        return teacher_bytes
    sharded = call.vocabulary.sharded
    if sharded or device.type != "cuda":
        device = torch.device("meta")
    vocabulary = LoneShard(None, (call.width,)) if sharded else WHOLE_VOCABULARY
    example = _Example.of(call, teacher_width, device)
    key = type(loss), loss.identity, example, call.trainable, vocabulary
    try:
        if key not in _MEASURED:
            _MEASURED[key] = _measure(loss, example, call.trainable, vocabulary)
        return teacher_bytes + _MEASURED[key]
    except Exception:
        # The call runs the loss after this, and raises the same error with more context.
        return teacher_bytes + UNMEASURED_COPIES * call.width * torch.float32.itemsize


class _Example(NamedTuple):
    """Shapes and dtypes of the arguments of a chunk with `MEASURED_ROWS` rows."""

    width: int
    teacher_width: int
    inputs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    bias: torch.dtype | None
    units: Units
    upstream: torch.dtype | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, call: HeadCall, teacher_width: int, device: torch.device) -> Self:
        loss = call.loss
        inputs = []
        for name in inputs_of_terms(loss):
            x = call.inputs.get(name)
            if isinstance(x, Tensor):
                role = loss.roles[name]
                shape = (MEASURED_ROWS, *x.shape[1:]) if role in PER_TOKEN else x.shape
                inputs.append((name, (teacher_width,) if role is Role.HEAD else tuple(shape), x.dtype))
        unreduced = loss.reduction == "none"
        return cls(
            width=call.width,
            teacher_width=teacher_width,
            inputs=tuple(inputs),
            bias=None if call.bias is None else call.bias.dtype,
            units=Units(
                loss=None if unreduced else (None, *UNITS),
                metrics=(None, *UNITS),
                num_items_unit=None if call.num_items is None else loss.unit,
            ),
            upstream=call.stat_dtype if unreduced and call.trainable else None,
            dtype=call.logits_dtype,
            device=device,
        )

    def arguments(self, loss: LossSpec) -> tuple[Tensor, ChunkInputs]:
        """Return zeros of these shapes, as the arguments of a `ChunkFunction`."""
        make = functools.partial(torch.zeros, device=self.device)
        # As in a chunk, inputs that the call does not pass are None.
        inputs: dict[str, Tensor | None] = dict.fromkeys(inputs_of_terms(loss))
        inputs |= {name: make(shape, dtype=dtype) for name, shape, dtype in self.inputs}
        if self.teacher_width:
            inputs["teacher_logits"] = make(MEASURED_ROWS, self.teacher_width, dtype=self.dtype)
        number = len(self.units.loss or ()) + len(self.units.metrics)
        chunk_inputs = ChunkInputs(
            bias=None if self.bias is None else make(self.width, dtype=self.bias),
            targets=make(MEASURED_ROWS, dtype=torch.int64),
            inputs=inputs,
            factors=make(number, dtype=torch.promote_types(self.dtype, torch.float32)) + 1,
            units=self.units,
            upstream=None if self.upstream is None else make(MEASURED_ROWS, dtype=self.upstream),
        )
        return make(MEASURED_ROWS, self.width, dtype=self.dtype), chunk_inputs


def _measure(loss: LossSpec, example: _Example, differentiate: bool, vocabulary: WholeVocabulary) -> int:
    """Measure the bytes per row that the compiled function allocates on a GPU.

    On the meta device, count the bytes that the uncompiled function would allocate, which are an upper bound.
    """
    arguments = example.arguments(loss)
    if example.device.type == "meta":
        with PeakBytes() as watch:
            chunk_function(loss, differentiate, vocabulary)(*arguments)
        return -(-watch.peak // MEASURED_ROWS)
    evaluate = compiled_chunk_function(loss, differentiate)
    evaluate(*arguments)
    before = torch.cuda.memory_stats(example.device)["allocated_bytes.all.allocated"]
    evaluate(*arguments)
    allocated = torch.cuda.memory_stats(example.device)["allocated_bytes.all.allocated"] - before
    return -(-allocated // MEASURED_ROWS)


def plan_for(
    call: HeadCall, rows: Rows, purpose: Pass, heads: int = 1, *, wide_d_weight: bool = False
) -> Plan:
    """Make the plan of a pass: its strategy, and chunks within `logits_budget` or the default budget of the
    device.

    The budget limits memory of size (C, V). The features and d_features (C, H) of a chunk are not counted,
    because they are no larger than the (N, H) tensors of the call.

    Args:
        call: the call.
        rows: the rows to project.
        purpose: the kind of the pass.
        heads: number of heads of the public call.
        wide_d_weight: whether d_weight is summed in `stat_dtype` for any number of chunks: with
            several heads, with a main gradient, and in compiled graphs with fp32 weights.
            `accum_dtype` of the loss overrides it. A single chunk then spares no memory.
    """
    loss = call.loss
    device = call.weight.device
    needs = call.needs
    budget = loss.logits_budget or default_budget(device)
    costs = loss.reader.costs(call, budget, purpose)
    row_bytes = costs.row_bytes
    fixed = costs.fixed_bytes
    if rows.teacher is not None:
        row_bytes += math.ceil(rows.teacher.share() * costs.teacher_bytes)
    replay = rows.replay
    if replay is not None and replay.picked and call.fp32_logits:
        row_bytes += call.width * call.logits_dtype.itemsize  # a second buffer, for stored logits
    if budget - fixed < row_bytes:
        warn_once(
            loss,
            "row",
            f"logits_budget: expected at least {row_bytes + fixed} bytes, for one row of logits and its "
            f"temporaries, got {budget} bytes; working one row at a time, set "
            f"logits_budget={256 * row_bytes + fixed} (bytes) or more for speed.",
        )
    usable = max(budget - fixed, row_bytes)
    trainable_head = needs.weight or needs.bias
    backward = (needs.hidden or needs.layers) + needs.weight
    twice = purpose is Pass.STATISTICS and call.trainable and not call.keeps_dlogp_dhidden
    spared = 0
    # Memory for the sum of d_weight in a wider dtype, which a single chunk does not need. It is also counted
    # in Pass.STATISTICS, so that this pass has the chunks of the Pass.GRADIENTS that follows if their rows
    # take the same bytes. In fp16 it is not counted, because d_weight is always fp32.
    summed = needs.weight and call.dtype not in (call.stat_dtype, torch.float16)
    if summed and not wide_d_weight and loss.accum_dtype is None:
        spared = call.weight.numel() * call.stat_dtype.itemsize
    facts = Facts(
        rows.count,
        None if rows.group_sizes is None else tuple(rows.group_sizes),
        call.trainable,
        trainable_head,
        costs.allows_cached_grad,
        costs.rereads,
        costs.columns,
        spared,
        backward,
        1 + backward if twice else 0,
        fixed,
        heads,
        str(call.logits_dtype).removeprefix("torch."),
    )
    if replay is not None:
        kinds = replay.plain, replay.picked, replay.gathered, replay.certain
        replayed = Replayed(*kinds, replay.replayed, replay.kept_ids, replay.single)
        return make_replay_plan(purpose, facts, replayed, row_bytes=row_bytes, budget=usable)
    plan = make_plan(purpose, facts, row_bytes=row_bytes, budget=usable)
    if purpose is Pass.SOLVE and "recompute" in plan.parts:
        needed = max(rows.group_sizes) * row_bytes
        enough = needed + loss.reader.costs(call, 2 * needed, purpose).fixed_bytes
        warn_once(
            loss,
            "group",
            f"logits_budget: expected at least {enough} bytes, for the largest group of tokens of this call, "
            f"got {budget} bytes; the group is projected twice (4 products for 3), set "
            f"logits_budget={enough} (bytes) to avoid that.",
        )
    return plan
