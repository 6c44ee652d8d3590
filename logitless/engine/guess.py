"""The first product of a call, begun while the number of its rows is on its way to the host.

Between the counts and the first product the GPU waits for the host, which reads the counts, plans and
allocates. Where the last few calls of an equal loss had no token to leave out, the GPU is given the first
chunk of all rows before the counts are read. Of a wrong guess the product is thrown away: nothing but time
depends on it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from logitless.engine.call import Call
from logitless.engine.plan import Pass, Plan
from logitless.engine.projection import Projection
from logitless.engine.rows import Rows

# A guess that is wrong costs a product, so it takes as many calls in a row to make the next one.
LIKELY = 3
# Calls in a row in which every row was walked, by the loss and the shape of its head.
_STREAKS: dict[tuple, int] = {}
MOST_STREAKS = 1024


class Guess:
    """That every row of a call will be walked.

    Args:
        calls: the heads; of several none is begun.
        purpose: of the pass.
        begin: (call, rows) -> (plan, head that has begun with it).
    """

    def __init__(
        self, calls: Sequence[Call], purpose: Pass, begin: Callable[[Call, Rows], tuple[Plan, Projection]]
    ):
        self._call, self._begin = calls[0], begin
        self._key = self._call.loss.identity, self._call.weight.shape
        self._likely = len(calls) == 1 and _STREAKS.get(self._key, 0) >= LIKELY and _may(self._call, purpose)
        self._begun: tuple[Plan, Projection] | None = None

    def read(self, numbers: Tensor) -> list[int]:
        """The numbers on the host, after the product is begun."""
        if not self._likely:
            return numbers.tolist()
        arrived = _sent(numbers)
        N = self._call.targets.shape[0]
        self._begun = self._begin(self._call, Rows(N, N, 0, None, None, None))
        return arrived()

    def head(self, plan: Plan, rows: Rows) -> Projection | None:
        """What was begun, if the plan is the same that all rows have; and the next guess learns from it."""
        every = rows.index is None and rows.group_sizes is None
        if len(_STREAKS) >= MOST_STREAKS:
            _STREAKS.clear()
        _STREAKS[self._key] = _STREAKS.get(self._key, 0) + 1 if every else 0
        begun, self._begun = self._begun, None
        if begun is None or not every or begun[0] != plan:
            return None
        begun[1].rows = rows
        return begun[1]


def _may(call: Call, purpose: Pass) -> bool:
    """Whether a product can be begun, and the GPU would wait for it otherwise."""
    loss = call.loss
    alone = loss.scope == "token" and loss.tp_group is None and loss.cp_group is None and call.layers is None
    return alone and loss.compact and _waits(call.targets) and loss.objective.projects_first(call, purpose)


def _waits(x: Tensor) -> bool:
    return x.is_cuda and x.shape[0] > 0


def _sent(numbers: Tensor) -> Callable[[], list[int]]:
    """Send numbers to the host; what comes back waits for them, and for nothing that is queued later."""
    if not numbers.is_cuda:
        return numbers.tolist
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    arrival = torch.cuda.current_stream(numbers.device).record_event()

    def arrived() -> list[int]:
        arrival.synchronize()
        return there.tolist()

    return arrived
