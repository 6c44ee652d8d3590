"""Compiles kernels for GPUs that are not here, under the Triton that PYTHONPATH names.

`compile_kernels.py` and `compile_layer_kernels.py` list what is compiled. With `pytest --all` everything is
compiled for every target under the oldest and the newest supported Triton. Otherwise the last variant of
each kernel, which usually has all options, is compiled under both Tritons, each time for one target.
"""

import functools
import importlib
import itertools
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import logitless

ROOT = Path(__file__).parents[2]
TRITONS = ("3.6.0", "3.9.0")
CUDA = ("80", "86", "89", "90", "100", "120")
TARGETS = (
    *[("cuda", capability) for capability in CUDA],
    ("hip", "gfx942"),
    ("hip", "gfx950"),
    ("hip", "gfx1100"),
)
# KiB of shared memory that a program may take on the smallest devices of a capability.
SHARED = {"90": 227, "100": 227}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def jitted(kernel: object) -> object:
    """As Triton made it: where torch is built for CUDA, it is held (`launch.py`)."""
    from logitless.kernels.launch import CachedLaunch

    return kernel.kernel if isinstance(kernel, CachedLaunch) else kernel


@functools.cache
def kernel_modules() -> dict[str, object]:
    """The module of every kernel that is launched, by the kernel's name."""
    library = Path(logitless.__file__).parent
    paths = sorted(path.relative_to(library.parent) for path in library.rglob("*_triton.py"))
    modules = [importlib.import_module(".".join(path.with_suffix("").parts)) for path in paths]
    return {name: module for module in modules for name in vars(module) if name.endswith("_kernel")}


class Source(NamedTuple):
    """What `triton.compile` takes for one variant of a kernel."""

    kernel: object
    signature: dict[str, str]
    constants: dict
    attributes: dict
    warps: int
    registers: int | None = None  # of a thread, at most
    nvidia: bool = False  # contains PTX, and runs on NVIDIA's GPUs alone


def compile_sources(variants: Sequence, source: Callable[[object], Source], arguments: Sequence[str]) -> None:
    """Compile what a command line says, and tell how many: a target and numbers of variants (all without
    any), and after `--` another target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    ends = [index for index, x in enumerate(arguments) if x == "--"]
    for start, stop in itertools.pairwise([-1, *ends, len(arguments)]):
        backend, architecture, *numbers = arguments[start + 1 : stop]
        cuda = backend == "cuda"
        lanes = 32 if cuda or architecture.startswith("gfx1") else 64
        target = GPUTarget(backend, int(architecture) if cuda else architecture, lanes)
        chosen = [variants[int(number)] for number in numbers] or variants
        for each in map(source, chosen):
            if each.nvidia and not cuda:
                continue
            made = ASTSource(each.kernel, each.signature, each.constants, each.attributes)
            options = {"num_warps": each.warps} | ({"maxnreg": each.registers} if cuda else {})
            result = triton.compile(made, target=target, options=options)
            assert result.asm["cubin" if cuda else "hsaco"], made
            shared = result.metadata.shared
            assert shared <= (SHARED.get(architecture, 99) if cuda else 64) * 1024, (each.kernel, shared)
        print(f"triton {triton.__version__}: compiled {len(chosen)} kernels for {backend} {architecture}")


def triton_folder(version: str) -> Path | None:
    """Where `make test` puts that Triton. A GPU machine that was not set up by make has its torch's own,
    which then does for both."""
    folder = ROOT / ".venv" / f"triton-{version}"
    if (folder / "triton").is_dir():
        return folder
    if torch.cuda.is_available():
        return None
    pytest.fail(f"Triton {version} is not in {folder}: `make test` installs it.")


def by_target(kernels: Sequence[object], version: str, *, everything: bool) -> dict[tuple, Sequence[int]]:
    """Numbers of the variants, which are given by their kernels, that are compiled for each target under one
    Triton."""
    if everything:
        return dict.fromkeys(TARGETS, range(len(kernels)))
    last = list({kernel: number for number, kernel in enumerate(kernels)}.values())
    # Under the other Triton each kernel for the next target.
    targets = TARGETS[TRITONS.index(version) :] + TARGETS[: TRITONS.index(version)]
    return {target: last[turn :: len(TARGETS)] for turn, target in enumerate(targets)}


# Between the modules of one process.
NEXT = "++"


def check_compilation(
    modules: Mapping[str, Mapping[tuple[str, str], Sequence[int]]], version: str, cache: Path
) -> None:
    """Run modules in one process, under one Triton, on the numbers of variants for each target."""
    folder = triton_folder(version)
    if folder is None and version != TRITONS[0]:
        pytest.skip("only the installed Triton is available")
    path = os.pathsep.join(str(part) for part in (folder, ROOT) if part)
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.offline"]
    for module, numbers in modules.items():
        assert all(numbers.values()), module
        runs = [["--", *target, *map(str, chosen)] for target, chosen in numbers.items()]
        command += [NEXT, module, *itertools.chain(*runs)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    said = Counter(line.partition(": ")[2] for line in done.stdout.splitlines())
    for numbers in modules.values():
        said.subtract(f"compiled {len(chosen)} kernels for {' '.join(t)}" for t, chosen in numbers.items())
    assert not any(said.values()), said
    assert folder is None or f"triton {version}:" in done.stdout


def main(arguments: Sequence[str]) -> None:
    """Run the modules of a command line that `check_compilation` wrote, each with its own arguments."""
    starts = [at for at, x in enumerate(arguments) if x == NEXT]
    for start, stop in itertools.pairwise([*starts, len(arguments)]):
        module, _, *rest = arguments[start + 1 : stop]
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
