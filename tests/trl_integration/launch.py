"""Two processes of one training run on this machine, over gloo, on the CPU."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

WORLD = 2


def in_two_processes(folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` in either process; what each returned, by rank. `function` is one that a module holds, for pickling."""
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        torch.multiprocessing.spawn(_run, args=(str(folder), function, args), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def _run(rank: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    # what torchrun sets; the processes meet through a file, and gloo takes its ports from the system
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    dist.init_process_group(
        "gloo", rank=rank, world_size=WORLD, init_method=f"file://{folder}/store", timeout=timedelta(seconds=60)
    )  # fmt: skip
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
