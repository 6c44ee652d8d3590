"""Compiles kernels for GPUs that are not here, under the Triton that PYTHONPATH names.

`compile_kernels.py` and `compile_layer_kernels.py` list what is compiled. With `pytest --all` everything is
compiled for every target under the oldest and the newest supported Triton. Otherwise each of these eight runs
takes an eighth, so that every kernel is compiled once, for one of the targets under one of the two.
"""

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


class Share(NamedTuple):
    """Every `step`-th of the variants from `first` on."""

    first: int
    step: int

    def of(self, variants: Sequence) -> Sequence:
        return variants[self.first :: self.step]


class Source(NamedTuple):
    """What `triton.compile` takes for one variant of a kernel."""

    kernel: object
    signature: dict[str, str]
    constants: dict
    attributes: dict
    warps: int


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


def usual_share(version: str, target: tuple[str, str], *, everything: bool) -> Share:
    turn = TARGETS.index(target) * len(TRITONS) + TRITONS.index(version)
    return Share(0, 1) if everything else Share(turn, len(TARGETS) * len(TRITONS))


def check_compilation(
    module: str, count: int, version: str, target: tuple[str, str], cache: Path, share: Share
) -> None:
    """Run `module` for one target under one Triton, in a process of its own, on a share of `count`
    variants."""
    folder = triton_folder(version)
    if folder is None and version != TRITONS[0]:
        pytest.skip("only the installed Triton is at hand")
    path = os.pathsep.join(str(part) for part in (folder, ROOT) if part)
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module, *target, *map(str, share)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"compiled {len(share.of(range(count)))} kernels for {' '.join(target)}" in done.stdout
    assert folder is None or f"triton {version}:" in done.stdout
