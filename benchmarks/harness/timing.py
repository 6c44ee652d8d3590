"""Milliseconds and peak bytes of one call, and the round robin that makes several calls comparable."""

import gc
import math
import time
from collections.abc import Callable, Hashable
from statistics import median

import torch

REST = 0.05
# Milliseconds of calls in a row.
IN_A_ROW = 60.0

# A case prepares one call (clears gradients, allocates outputs) and returns it; only the returned call is
# timed.
Case = Callable[[], Callable[[], object]]


def time_ms(
    run: Callable[[], object],
    device: torch.device,
    *,
    rest: float = REST,
    ahead: Callable[[], object] | None = None,
) -> float:
    """Milliseconds of `run()` on the device, after `rest` seconds: CUDA events, or the wall clock on a CPU.

    The device waits for the host's part of a lone call, as it does after each sync of a training loop. It
    does not wait if `ahead()` has queued other work, as the forward pass of a model does.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    # Back to back, matrix products run an H200 into its power limit, and whoever comes later is up to a fifth
    # slower.
    time.sleep(rest)
    if ahead is not None:
        ahead()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def back_to_back_ms(case: Case, device: torch.device, *, least: float = IN_A_ROW) -> float:
    """Milliseconds of one call among calls in a row that take `least` ms or more.

    The host prepares a call while the device works on those before it, and the card is at its power limit.
    On a CPU, which does neither, one call is timed.
    """
    if device.type != "cuda":
        return time_ms(case(), device)
    count = math.ceil(least / max(time_ms(case(), device, rest=0.0), 1e-3))

    def run() -> None:
        for _ in range(count):
            case()()

    return time_ms(run, device, rest=0.0) / count


def interleave(
    cases: dict[Hashable, Case],
    device: torch.device,
    *,
    seconds: float,
    least: int = 5,
    most: int = 25,
    in_a_row: bool = False,
    ahead: Callable[[], object] | None = None,
) -> dict[Hashable, list[float]]:
    """Times every case once a round, in an order that rotates, for about `seconds` after one warm-up round.

    The first of these rounds decides their number.

    Each is one call after a rest and behind `ahead` (`time_ms`), or calls in a row (`back_to_back_ms`).

    Returns the times in ms of each case; the list stays empty where the device ran out of memory.
    """
    times: dict[Hashable, list[float]] = {name: [] for name in cases}
    alive = list(cases)

    def one_round(turn: int, keep: bool) -> None:
        first = turn % max(len(alive), 1)
        for name in alive[first:] + alive[:first]:
            try:
                if in_a_row:
                    ms = back_to_back_ms(cases[name], device)
                else:
                    ms = time_ms(cases[name](), device, ahead=ahead)
            except torch.OutOfMemoryError:
                alive.remove(name)
                times[name].clear()
                continue
            if keep:
                times[name].append(ms)

    one_round(0, keep=False)
    start = time.perf_counter()
    one_round(1, keep=True)
    rounds = int(seconds / max(time.perf_counter() - start, 1e-9))
    for turn in range(2, min(max(rounds, least), most) + 1):
        one_round(turn, keep=True)
    return times


def spread(times: list[float]) -> dict[str, float]:
    """What a row keeps of its times: the median, the extremes and the count."""
    return {"ms": median(times), "ms_min": min(times), "ms_max": max(times), "rounds": len(times)}


def release(device: torch.device) -> None:
    """Hands every cached block of a GPU back, so that the next measurement starts from an empty allocator."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes allocated during `run()` beyond what was allocated before; None on a CPU, which keeps no
    such count."""
    if device.type != "cuda":
        return None
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
