"""Several processes of one process group, over gloo and on the CPU, for the tests of what ranks do together.

They are forked from a server that has imported torch and the library once: most of a process's time went
into that.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
# What the server imports. torch.compile loads Inductor where it is called, whether or not anything is
# compiled.
IMPORTED = [
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "logitless",
    "tests.support",
]


def in_processes(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` in each of `world` processes; what each returned, by rank.

    `function` is one that a module holds.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=path, CUDA_VISIBLE_DEVICES=""):
        multiprocessing.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        arguments = world, folder, function, args
        torch.multiprocessing.start_processes(_run, arguments, nprocs=world, start_method="forkserver")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def _run(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    # What torchrun sets; the processes meet through a file, and gloo takes its ports from the system.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world,
        init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(function(*args), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()
