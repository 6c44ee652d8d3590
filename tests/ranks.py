"""Several processes of one process group, for the tests of what ranks do together.

Over gloo and on the CPU they are forked from a server that has imported torch and the library once: most of a
process's time went into that. `on_devices` takes NCCL where there are as many GPUs as ranks.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException
from torch.utils._pytree import tree_map_only

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
# Too, where this process has imported trl: then it runs tests of trainers.
FOR_TRAINERS = [
    "transformers.models.llama.modeling_llama",
    "logitless.trl_integration",
    "trl.trainer.sft_trainer",
]


def in_processes(world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """`function(*args)` in each of `world` processes; what each returned, by rank, on the CPU.

    `function` is one that a module holds. A rank that raises or dies ends the others; what it raised is in
    the error.
    """
    for is_last in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            arguments = world, backend, folder, function, args
            try:
                # A process that has looked for GPUs must not be forked.
                (forked if backend == "gloo" else spawned)(_run, arguments, world)
            except ProcessException as error:
                cause = _cause(folder, error)
                # Gloo connects the ranks before `function` runs, which may fail on a busy machine.
                if "connectFullMesh failed" in cause and not is_last:
                    continue
                raise RuntimeError(cause) from None
            return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world)]


def forked(function: Callable[..., None], args: tuple, nprocs: int) -> None:
    """As `torch.multiprocessing.spawn`, on the CPU and from the server: without the imports' time."""
    with mock.patch.dict(os.environ, PYTHONPATH=_path(), CUDA_VISIBLE_DEVICES=""):
        _preload()
        forkserver.ensure_running()
        torch.multiprocessing.start_processes(function, args, nprocs, start_method="forkserver")


@contextmanager
def script(
    command: Sequence[str], *, env: dict[str, str], stdout: int, stderr: TextIO, text: bool
) -> Iterator[SimpleNamespace]:
    """In the place of `subprocess.Popen` of a Python script: it runs in a process from the server. Its lines
    come when it has ended."""
    assert command[0] == sys.executable and stdout == subprocess.PIPE and text
    with tempfile.NamedTemporaryFile("r") as output:
        process = multiprocessing.get_context("forkserver").Process(
            target=_run_script, args=(command[1:], env, output.name, stderr.name)
        )
        with mock.patch.dict(os.environ, PYTHONPATH=_path(), CUDA_VISIBLE_DEVICES=""):
            _preload()
            process.start()
        process.join()
        yield SimpleNamespace(stdout=output, returncode=process.exitcode)


def _run_script(command: Sequence[str], env: dict[str, str], stdout: str, stderr: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(env)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()


def spawned(function: Callable[..., None], args: tuple, nprocs: int) -> None:
    with mock.patch.dict(os.environ, PYTHONPATH=_path()):
        torch.multiprocessing.spawn(function, args, nprocs)


def _preload() -> None:
    multiprocessing.set_forkserver_preload(IMPORTED + FOR_TRAINERS * ("trl" in sys.modules))


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def on_devices(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`in_processes`, over NCCL where each rank can have a GPU, which is its default device then."""
    return in_processes(
        world, function, *args, backend="nccl" if torch.cuda.device_count() >= world else "gloo"
    )


def to_rank_device(x: Any) -> Any:
    """Tensors, also in dicts and sequences, on this rank's device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(torch.get_default_device()), x)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers in fp64 on the CPU, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def device_type() -> str:
    """Of this rank, for device meshes."""
    return torch.get_default_device().type


def _cause(folder: str, error: Exception) -> str:
    """What was raised first: other ranks fail because of it, and may be seen before."""
    raised = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    texts = [f"rank {path.stem}:\n{path.read_text()}" for path in raised]
    return "\n".join((str(error), *texts[:1]))


def _run(rank: int, world: int, backend: str, folder: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    # What torchrun sets; the processes meet through a file, and gloo takes its ports from the system.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world,
        init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    try:
        actual = tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*args))
        torch.save(actual, Path(folder, f"{rank}.pt"))
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)  # at once: leaving the process group may wait for the others
    dist.destroy_process_group()
