"""Early projection: queue a pass before the host knows which rows are supervised.

Otherwise the GPU is idle between the count of supervised rows and the first product, while the host reads the
count, plans, allocates and launches. If the same rows were supervised in the last few calls of an equal loss
with a head of the same shape (all rows, all but the last one of each sequence as `shift` leaves them, or any
others), the pass is queued for these rows, with targets clamped to ids of the vocabulary. The number of rows
for which this was wrong is counted in the same launch, and the host reads it after the whole pass is queued.
If it is not 0, the result is discarded and the call runs from its counts, which also raises its faults.
Either way the result is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.choose import every_row, resolve_rows
from logitless.engine.host_copy import HostCopy
from logitless.engine.operands import is_same
from logitless.engine.remembered import Remembered
from logitless.engine.rows import Rows
from logitless.engine.static_rows import Assumed, holds, is_plain, is_static, of_every_row, with_static_rows
from logitless.kernels.head.targets import clamped, runs_kernels

Result = TypeVar("Result")
# call -> the call, and the rows that are assumed to be supervised
Assume = Callable[[HeadCall], Assumed]

# Consecutive calls with the same supervised rows before the first early projection.
LIKELY = 3
# A discarded projection costs a pass: each one multiplies the number of calls before the next one by this.
PATIENCE = 4


class Counted(NamedTuple):
    """The rows of a call, as the host has counted them."""

    rows: Rows
    shape: tuple[int, int]  # number of tokens and of sequences

    @property
    def every(self) -> bool:
        """Whether they are all rows."""
        return self.rows.count == self.shape[0]


@dataclass
class Streak:
    """The history of the calls of a loss, which several threads may call.

    Attributes:
        length: number of consecutive last calls, of those that the host has counted, with the same supervised
            rows: every row, of any number of tokens, or other rows of calls with one shape.
        needed: the length at which the next call is projected early.
        last: the rows of the last call.
        others: number of positions that are supervised in exactly one of the last two counted calls; None if
            it is known to be 0, or was not computed.
    """

    length: int = 0
    needed: int = LIKELY
    last: Counted | None = None
    others: HostCopy | None = None

    def is_long(self) -> bool:
        """Whether the next call may be projected early."""
        others, self.others = self.others, None
        if others is not None and others.tolist():
            self.length = 1
        return self.length >= self.needed

    def expected(self, call: HeadCall) -> Rows | None:
        """The rows of `call` that are probably supervised; None if they are unknown."""
        last = self.last
        if not self.is_long():
            return None
        if last.shape != _shape(call):
            if not last.every:
                return None
            self.last = last = Counted(every_row(call), _shape(call))
        return last.rows

    def add(self, call: HeadCall, rows: Rows) -> None:
        """Add a call whose rows the host has counted."""
        last = self.last
        self.last = new = Counted(rows, _shape(call))
        if rows.count == 0 or last is None or last.every is not new.every:
            self.length = int(rows.count > 0)
        elif new.every:
            self.length += 1
        elif last.shape == new.shape and last.rows.count == rows.count:
            self.length += 1
            self.others = HostCopy((last.rows.supervised != rows.supervised).sum())
        else:
            self.length = 1

    def end(self) -> None:
        """Reset the history after a wrong guess, and require a longer one."""
        self.length = 0
        self.needed *= PATIENCE


# See `captured.captured_solve`: (call, its assumption, the streak that it is based on) -> (whether there is a
# captured pass; its result, None if the assumption is wrong).
Captured = Callable[[HeadCall, Assume, Streak | None], tuple[bool, Result | None]]


def _shape(call: HeadCall) -> tuple[int, int]:
    return call.targets.shape[0], call.sequence_count


# Streaks by the identity of the loss, the shape of its head, device, stream and inference mode.
_STREAKS = Remembered()


def over_rows(
    call: HeadCall,
    run: Callable[[HeadCall, Rows], Result],
    run_captured: Captured[Result] | None = None,
) -> Result:
    """Run a pass over the supervised rows of a call, or over every row where they are static (`static_rows`).

    Args:
        call: the call of one head.
        run: the pass, called as run(call, rows). It runs a second time if the result of the first run is
            discarded.
        run_captured: the same pass as a CUDA graph (`captured.captured_solve`); None for a pass that returns
            statistics of the supervised tokens alone, whose rows are not static.

    Returns:
        What `run` returns.

    Raises:
        ValueError: a target or an input is invalid (see `spec.Fault`).
    """
    streak = assume = None
    if run_captured is not None:
        assume = _without_counts(call)
    if assume is None:
        streak = _streak(call)
        rows = None if streak is None else streak.expected(call)
        if rows is not None and _has_faults(call):
            streak.length = 0
        elif rows is not None:
            assume = partial(with_clamped_targets, rows=rows)
    if assume is not None:
        result = _assuming(assume, call, streak, run, run_captured)
        if result is not None:
            return result
        if streak is not None:
            streak.end()
    call, rows = resolve_rows(call)
    if streak is not None:
        streak.add(call, rows)
    return run(call, rows)


def _assuming(
    assume: Assume,
    call: HeadCall,
    streak: Streak | None,
    run: Callable[[HeadCall, Rows], Result],
    run_captured: Captured[Result] | None,
) -> Result | None:
    """Run a pass before the host has read what it assumes; None if that was wrong."""
    if run_captured is not None:
        is_captured, result = run_captured(call, assume, streak)
        if is_captured:
            return result
    assumed = assume(call)
    if assumed.unread is None:
        return run(assumed.call, assumed.rows)
    numbers = HostCopy(assumed.unread)
    try:
        result = run(assumed.call, assumed.rows)
    except Exception:
        if holds(numbers.tolist(), assumed.tokens):
            raise
        return None
    return result if holds(numbers.tolist(), assumed.tokens) else None


def rows_again(call: HeadCall) -> tuple[HeadCall, Rows]:
    """The rows of a call that `over_rows` has run, for a pass over the same rows."""
    assume = _without_counts(call)
    if assume is None:
        return resolve_rows(call)
    assumed = assume(call)
    return assumed.call, assumed.rows


def planned(call: HeadCall) -> HeadCall:
    """The call whose plan is that of a pass over its rows."""
    return of_every_row(call) if _without_counts(call) is with_static_rows else call


def _without_counts(call: HeadCall) -> Assume | None:
    """Choose the rows of a call that do not depend on which tokens are supervised; None if they do."""
    if not (is_plain(call) and _runs_on_gpu(call.targets)):
        return None
    if not call.loss.compact:
        return _every_row
    return with_static_rows if is_static(call) else None


def _every_row(call: HeadCall) -> Assumed:
    return Assumed(*resolve_rows(call), None)


def with_clamped_targets(call: HeadCall, rows: Rows) -> Assumed:
    """Return the call with the targets of `rows` clamped to ids of the vocabulary.

    The counts are all 0 if these rows are supervised, and no others.
    """
    loss = call.loss
    num_items = call.num_items if loss.reduction == "mean" else None
    targets, wrong = clamped(call.targets, call.V, loss.ignore_index, num_items, rows.supervised)
    inputs = {name: targets if is_same(x, call.targets) else x for name, x in call.inputs.items()}
    return Assumed(call.with_targets(targets, inputs), rows, wrong)


def _streak(call: HeadCall) -> Streak | None:
    """The streak of the call's loss and head; None for a call that is never projected early.

    Such a call does not run on a GPU, has no host sync, has a loss without an identity (constructed in a
    compiled graph), or has `tp_group` or `cp_group` (the ranks exchange
    their counts in the sync), layers, `cu_seqlens`, a sampling mask, or an integer input other than the
    targets. An integer input may be an index that is only valid where its token is supervised, and is not
    clamped.
    """
    loss = call.loss
    if loss.unmasked or not loss.compact or not loss.identity or not _runs_on_gpu(call.targets):
        return None
    if not is_plain(call):
        return None
    if not all(_is_no_index(x) or is_same(x, call.targets) for x in call.inputs.values()):
        return None
    # The rows of a streak are tensors of one device, which one stream has computed. Autograd cannot save
    # tensors of the inference mode.
    device = call.targets.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = loss.identity, call.weight.shape, device, stream, torch.is_inference_mode_enabled()
    if key not in _STREAKS:
        _STREAKS[key] = Streak()
    return _STREAKS[key]


def _runs_on_gpu(targets: Tensor) -> bool:
    """Whether the targets are on a GPU that runs the kernels, and are not fake tensors."""
    return targets.is_cuda and runs_kernels(targets)


def _is_no_index(x: object) -> bool:
    return not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool


def _has_faults(call: HeadCall) -> bool:
    """Whether the loss has checks of its inputs that only the device can make."""
    faults = call.loss.faults
    return faults is not None and len(faults(call.targets, call.inputs, call.V)) > 0
