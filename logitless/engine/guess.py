"""The first product of a call, begun before the host knows how many rows there are.

Between the counts and the first product the GPU would wait for the host, which reads the counts, plans and
allocates. Where the last few calls of an equal loss had no token to leave out, the GPU is given the first
chunk of all rows before the counts are read. Of a wrong guess the product is thrown away: nothing but time
depends on it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from logitless.engine.call import Call
from logitless.engine.chunk import Chunk
from logitless.engine.plan import Pass, Plan
from logitless.engine.projection import Projection
from logitless.engine.remembered import Remembered
from logitless.engine.rows import TOLIST, Rows
from logitless.engine.side_stream import side_stream

# A guess that is wrong costs a product, so it takes as many calls in a row to make the next one.
LIKELY = 3
# Calls in a row in which every row was walked, by the loss and the shape of its head.
_STREAKS = Remembered()


class Guess:
    """That every row of a call will be walked.

    Args:
        calls: the heads; of several none is begun.
        purpose: of the pass.
        begin: rows -> a head that has begun with them.

    Attributes:
        read: what brings the counts to the host, for `select_rows`.
    """

    def __init__(self, calls: Sequence[Call], purpose: Pass, begin: Callable[[Rows], "Begun"]):
        call, self.read = calls[0], TOLIST
        self._key, self._begun = (call.loss.identity, call.weight.shape), None
        if _STREAKS.get(self._key, 0) >= LIKELY and len(calls) == 1 and _may_begin(call, purpose):
            N = call.targets.shape[0]
            self.read = partial(self._read_beside, begin, Rows(N, N, 0, None, None, None))

    def _read_beside(self, begin: Callable[[Rows], "Begun"], rows: Rows, numbers: Tensor) -> list[int]:
        """The numbers; the copy waits for nothing that is queued after them."""
        beside = side_stream(numbers.device, useful=True)
        self._begun = begin(rows)
        with beside:
            return numbers.tolist()

    def head(self, plan: Plan, rows: Rows) -> "Begun | None":
        """What was begun, if it is the plan of these rows; and the next guess learns of them."""
        every = rows.index is None and rows.group_sizes is None
        _STREAKS[self._key] = _STREAKS.get(self._key, 0) + 1 if every else 0
        begun, self._begun = self._begun, None
        return begun if begun is not None and every and begun.plan == plan else None


class Begun:
    """A head that has projected the first chunk of a plan. To the loop it is the head."""

    def __init__(self, head: Projection, plan: Plan):
        step = plan.steps[0]
        self.plan, self._head = plan, head
        self._buffers = head.new_buffer(plan, in_product=False)
        parts = [x[: step.stop - step.start] for x in self._buffers]
        self._first: Chunk | None = Chunk(step, head.rows.at(step.start, step.stop), *parts)
        head.take(self._first)
        head.project(self._first)

    def __getattr__(self, name: str):
        return getattr(self._head, name)

    def new_buffer(self, plan: Plan, *, in_product: bool) -> tuple[Tensor, Tensor]:
        return self._buffers

    def take(self, chunk: Chunk) -> None:
        first = self._first
        if first is None:
            self._head.take(chunk)
        else:
            chunk.features, chunk.targets, chunk.ignored = first.features, first.targets, first.ignored

    def project(self, chunk: Chunk) -> None:
        if self._first is None:
            self._head.project(chunk)
        self._first = None


def _may_begin(call: Call, purpose: Pass) -> bool:
    """Whether the product can come first, and the GPU would wait for it otherwise."""
    loss = call.loss
    alone = loss.tp_group is None and loss.cp_group is None and call.layers is None
    return alone and _waits(call.targets) and loss.objective.projects_first(call, purpose)


def _waits(x: Tensor) -> bool:
    return x.is_cuda and x.shape[0] > 0
