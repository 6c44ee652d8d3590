"""How many bytes a row of logits costs inside a `LogitsLoss`: measured once per loss and vocabulary, not asked of its author."""

import functools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless.losses.batch import UNITS, Scales
from logitless.losses.shard import LoneShard
from logitless.losses.walk import logits_evaluation, logits_function

if TYPE_CHECKING:
    from logitless.losses.base import LinearLoss
    from logitless.losses.engine import Problem

ROWS = 64


class PeakBytes(TorchDispatchMode):
    """The most bytes alive at once among the storages created while it is active."""

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
                    self._count(storage._cdata, storage.nbytes())
                    weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        return result

    def _count(self, key, size):
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key, size):
        self._seen.discard(key)
        self.live -= size


def logits_loss_row_bytes(loss: "LinearLoss", problem: "Problem", logits_dtype: torch.dtype) -> int:
    teacher_weight = problem.inputs["teacher_weight"] if loss.teacher else None
    teacher = 0 if teacher_weight is None else teacher_weight.shape[0]
    # The same on all ranks, which walk the same chunks.
    teacher = problem.width if teacher and problem.shard is not None else teacher
    if loss.has_kernel(problem.weight.device, logits_dtype, problem.inputs):
        return teacher * logits_dtype.itemsize
    widths = tuple((name, x.shape[1:], x.dtype) for name, x in problem.inputs.items() if x is not None and name in loss.token_inputs)
    compiled = problem.shard is None and problem.weight.device.type == "cuda"
    device = problem.weight.device if compiled else torch.device("meta")
    shard = None if problem.shard is None else LoneShard(None, (problem.width,))
    bytes_ = _measure(loss, problem.width, teacher, widths, logits_dtype, device, problem.needs.any, shard)
    return bytes_ + teacher * logits_dtype.itemsize


@functools.cache
def _measure(loss, V: int, teacher_V: int, widths, logits_dtype, device, differentiate: bool, shard: LoneShard | None) -> int:
    """Bytes a row: what the compiled function allocates on a GPU; on the meta device what the uncompiled one would, its upper bound."""
    make = functools.partial(torch.zeros, device=device)
    inputs = {name: make(ROWS, *shape, dtype=dtype) for name, shape, dtype in widths if not name.startswith("teacher")}
    inputs |= {name: None for name in loss.inputs if name not in inputs}
    if teacher_V:
        inputs |= {"teacher_logits": make(ROWS, teacher_V, dtype=logits_dtype), "teacher_bias": None}
    one = make((), dtype=torch.float32) + 1
    units = dict.fromkeys((*UNITS, None), one)
    arguments = (make(ROWS, V, dtype=logits_dtype), None, make(ROWS, dtype=torch.int64), inputs, Scales(units, units), None)
    if device.type == "meta":
        with PeakBytes() as watch:
            logits_evaluation(loss, differentiate, shard)(*arguments)
        return -(-watch.peak // ROWS)
    evaluate = logits_function(loss, differentiate)
    evaluate(*arguments)
    before = torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
    evaluate(*arguments)
    return -(-(torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"] - before) // ROWS)
