"""A pass over every row of a call, queued before the host knows that every row counts.

Between the counts and the first product the GPU would wait for the host, which reads the counts, plans,
allocates and launches. Where every row of the last few calls of an equal loss counted, a pass takes all rows,
with targets clamped to ids of the vocabulary, and the host reads what is wrong with that once the whole pass
is queued. If anything is, the result is thrown away and the call is run from its counts, which raises its
faults. Nothing but time depends on the guess.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from logitless.engine.call import Call
from logitless.engine.choose import choose_rows, every_row
from logitless.engine.remembered import Remembered
from logitless.engine.rows import Rows
from logitless.kernels.head.targets import clamped, runs_kernels

Result = TypeVar("Result")

# Calls in a row in which every row counted, before the first guess. A wrong guess costs a pass, so that each
# multiplies the calls before the next one.
LIKELY, PATIENCE = 3, 4


@dataclass
class Streak:
    """What the calls of a loss have shown.

    Attributes:
        length: calls in a row in which every row counted.
        needed: the length from which on the next call is taken to be alike.
    """

    length: int = 0
    needed: int = LIKELY


# By the loss and the shape of its head.
_STREAKS = Remembered()


def over_rows(call: Call, run: Callable[[Call, Rows], Result]) -> Result:
    """Run a pass over the supervised rows of a call.

    Args:
        call: one head's share of a call.
        run: the pass. It changes nothing that outlives its result, as it may run twice.

    Returns:
        What `run` returns.

    Raises:
        ValueError: what is wrong with the call's targets and inputs (see `spec.Fault`).
    """
    streak = _streak(call)
    if streak is not None and streak.length >= streak.needed and _has_faults(call):
        streak.length = 0
    elif streak is not None and streak.length >= streak.needed:
        guess = Guess(call)
        try:
            found = run(guess.call, guess.rows)
        except Exception:
            if guess.holds():
                raise
        else:
            if guess.holds():
                return found
            del found  # before anything takes its place
        streak.length = 0
        streak.needed *= PATIENCE
    call, rows = choose_rows(call)
    if streak is not None:
        streak.length = streak.length + 1 if rows.count == call.targets.shape[0] else 0
    return run(call, rows)


class Guess:
    """That every row of a call counts.

    Attributes:
        call: the call, with targets that are ids of the vocabulary.
        rows: all of them.
    """

    def __init__(self, call: Call):
        loss = call.loss
        num_items = call.num_items if loss.reduction == "mean" else None
        targets, wrong = clamped(call.targets, call.V, loss.ignore_index, num_items)
        inputs = {name: targets if _is_same(x, call.targets) else x for name, x in call.inputs.items()}
        self.call, self.rows = replace(call, targets=targets, inputs=inputs), every_row(call)
        self._wrong, self._copied = wrong.to("cpu", non_blocking=True), None
        if targets.is_cuda:
            self._copied = torch.cuda.current_stream(targets.device).record_event()

    def holds(self) -> bool:
        """Whether it is right; waits for the counts, not for what was queued after them."""
        if self._copied is not None:
            self._copied.synchronize()
        return not any(self._wrong.tolist())


def _streak(call: Call) -> Streak | None:
    """What the calls of this kind have shown; None where no guess is made.

    Ranks that share a call meet in its sync. Boundaries and other ids than the targets are not clamped, and
    an integer per token may be an index where its token counts, and anything where it does not.
    """
    loss = call.loss
    if loss.unmasked or not loss.compact or not _waits(call.targets):
        return None
    if loss.tp_group is not None or loss.cp_group is not None:
        return None
    if call.layers is not None or call.cu_seqlens is not None:
        return None
    if not all(_is_no_index(x) or _is_same(x, call.targets) for x in call.inputs.values()):
        return None
    key = loss.identity, call.weight.shape
    if key not in _STREAKS:
        _STREAKS[key] = Streak()
    return _STREAKS[key]


def _waits(targets: Tensor) -> bool:
    """Whether there is a GPU that would wait for the host, and not a stand-in without memory."""
    return targets.is_cuda and runs_kernels(targets)


def _is_no_index(x: object) -> bool:
    return not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool


def _is_same(x: object, targets: Tensor) -> bool:
    """Whether an input is the targets, as labels may be."""
    alike = isinstance(x, Tensor) and x.dtype == targets.dtype and x.shape == targets.shape
    return alike and x.data_ptr() == targets.data_ptr() and x.stride() == targets.stride()


def _has_faults(call: Call) -> bool:
    """Whether only the device can tell that the inputs, too, are right."""
    faults = call.loss.faults
    return faults is not None and len(faults(call.targets, call.inputs, call.V)) > 0
