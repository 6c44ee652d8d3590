"""Our own rows of the benchmarks and every layer operator once, at small and odd shapes, for a tool that
looks at memory accesses. Left out are kernels of sharded heads, and options beyond those rows.

    python -m tests.kernels.sanitized          # compiles, so that the tool need not wait for it
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.kernels.sanitized

`--tool racecheck` looks at shared memory. Words behind it name the calls to make.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.layers.comparison import both_ways
from benchmarks.layers.operators import Maker, operators
from benchmarks.losses import sampler
from benchmarks.regressions.own_rows import ROWS, Row, loss_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def both(row: Row) -> None:
    arguments = row.inputs.build(row.inputs.quick, DEVICE, 0)
    loss = loss_of(row.call(*arguments))
    if loss.requires_grad:
        loss.backward()


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    seen = set()
    for row in ROWS:  # some differ in their large shapes alone
        if (row.inputs.quick, row.call) not in seen:
            seen.add((row.inputs.quick, row.call))
            yield row.name, partial(both, row)
    for sets in sampler.SETS:
        arguments = sampler.inputs(sampler.QUICK_SHAPES[0], sets, DEVICE, 0)
        yield f"sampling mask, {sets.name}", sampler.step(sampler.replayed, arguments)
    for operator in operators(Maker(DEVICE, True)):
        yield operator.name, partial(both_ways, operator, operator.ours)


def main(words: list[str]) -> None:
    for name, call in calls():
        if words and not any(word in name for word in words):
            continue
        start = time.perf_counter()
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        print(f"{time.perf_counter() - start:6.1f} s  {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
