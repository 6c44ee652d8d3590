"""Milliseconds and peak bytes of one call, and the round robin that makes several calls comparable."""

import gc
import time
from collections.abc import Callable, Hashable
from statistics import median

import torch

REST = 0.05

# A case prepares one call (clears gradients, allocates outputs) and returns it; only the returned call is
# timed.
Case = Callable[[], Callable[[], object]]


def time_ms(run: Callable[[], object], device: torch.device, *, rest: float = REST) -> float:
    """Milliseconds of `run()` on the device: CUDA events, or the wall clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    # Back to back, matrix products run an H200 into its power limit, and whoever comes later is up to a fifth
    # slower.
    time.sleep(rest)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def interleave(
    cases: dict[Hashable, Case],
    device: torch.device,
    *,
    seconds: float,
    least: int = 5,
    most: int = 25,
    rest: float = REST,
) -> dict[Hashable, list[float]]:
    """Times every case once a round, in an order that rotates, for about `seconds` after one warm-up round.

    Each starts after `rest` seconds; without any the card stays hot.

    Returns the times in ms of each case; the list stays empty where the device ran out of memory.
    """
    times: dict[Hashable, list[float]] = {name: [] for name in cases}
    alive = list(cases)

    def one_round(turn: int, keep: bool) -> None:
        first = turn % max(len(alive), 1)
        for name in alive[first:] + alive[:first]:
            try:
                ms = time_ms(cases[name](), device, rest=rest)
            except torch.OutOfMemoryError:
                alive.remove(name)
                times[name].clear()
                continue
            if keep:
                times[name].append(ms)

    start = time.perf_counter()
    one_round(0, keep=False)
    rounds = int(seconds / max(time.perf_counter() - start, 1e-9))
    for turn in range(min(max(rounds, least), most)):
        one_round(turn + 1, keep=True)
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
