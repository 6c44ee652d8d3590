"""Compiles kernels for GPUs that are not here, under the Triton that PYTHONPATH names.

`compile_kernels.py` and `compile_layer_kernels.py` list what is compiled. With `pytest --all` everything is
compiled for every target under the oldest and the newest supported Triton. Otherwise each of these eight runs
takes an eighth, so that what is compiled is compiled once, for one of the targets under one of the two.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
TRITONS = ("3.6.0", "3.9.0")
TARGETS = (("cuda", "80"), ("cuda", "90"), ("cuda", "100"), ("hip", "gfx942"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Source(NamedTuple):
    """What `triton.compile` takes for one variant of a kernel."""

    kernel: object
    signature: dict[str, str]
    constants: dict
    attributes: dict
    warps: int


def wanted(variants: Sequence, numbers: Sequence[str]) -> Sequence:
    """Those of the numbers on a command line; all without any."""
    return [variants[int(number)] for number in numbers] or variants


def compile_sources(sources: Sequence[Source], backend: str, architecture: str) -> None:
    """Compile for one target, and say how many."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    cuda = backend == "cuda"
    target = GPUTarget("cuda", int(architecture), 32) if cuda else GPUTarget(backend, architecture, 64)
    for source in sources:
        made = ASTSource(source.kernel, source.signature, source.constants, source.attributes)
        result = triton.compile(made, target=target, options={"num_warps": source.warps})
        assert result.asm["cubin" if cuda else "hsaco"], source
    print(f"triton {triton.__version__}: compiled {len(sources)} kernels for {backend} {architecture}")


def triton_folder(version: str) -> Path | None:
    """Where `make test` puts that Triton. A GPU machine that was not set up by make has its torch's own,
    which then does for both."""
    folder = ROOT / ".venv" / f"triton-{version}"
    if (folder / "triton").is_dir():
        return folder
    if torch.cuda.is_available():
        return None
    pytest.fail(f"Triton {version} is not in {folder}: `make test` installs it.")


def an_eighth(numbers: Sequence[int], version: str, target: tuple[str, str]) -> Sequence[int]:
    """What one of the eight runs compiles without --all."""
    turn = TARGETS.index(target) * len(TRITONS) + TRITONS.index(version)
    return numbers[turn :: len(TARGETS) * len(TRITONS)]


def pairwise(variants: Sequence[tuple]) -> list[int]:
    """Numbers of variants of kernels (the first field) in which every two values of other fields that come
    together in some variant do so; of a field that is a tuple, every two members."""

    def pairs(kernel: str, *fields: object) -> set[tuple]:
        each = [x if isinstance(x, tuple) else (x,) for x in fields]
        values = [(i, x) for i, field in enumerate(each) for x in field]
        return {(kernel, *pair) for pair in itertools.combinations(values, 2)}

    covers = [pairs(*variant) for variant in variants]
    missing, found = set().union(*covers), []
    while missing:
        found.append(max(range(len(covers)), key=lambda i: len(covers[i] & missing)))
        missing -= covers[found[-1]]
    return sorted(found)


def check_compilation(
    module: str, numbers: Sequence[int], version: str, target: tuple[str, str], cache: Path
) -> None:
    """Run `module` for one target under one Triton, in a process of its own, on variants by number."""
    assert numbers
    folder = triton_folder(version)
    if folder is None and version != TRITONS[0]:
        pytest.skip("only the installed Triton is at hand")
    path = os.pathsep.join(str(part) for part in (folder, ROOT) if part)
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module, *target, *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"compiled {len(numbers)} kernels for {' '.join(target)}" in done.stdout
    assert folder is None or f"triton {version}:" in done.stdout
