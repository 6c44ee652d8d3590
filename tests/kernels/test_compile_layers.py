"""The kernels of norm, rope and gated compile offline for every GPU under the oldest and newest Triton."""

import os
import subprocess
import sys

import pytest

from tests.kernels.compile_layer_kernels import variants
from tests.kernels.test_compile import ROOT, TARGETS, TRITONS, interpreted, triton_folder

pytestmark = pytest.mark.skipif(interpreted, reason="compiled in the run without TRITON_INTERPRET")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("version", TRITONS)
def test_compiles(version, target, tmp_path):
    folder = triton_folder(version)
    if folder is None and version != TRITONS[0]:
        pytest.skip("only the installed Triton is at hand")
    path = os.pathsep.join(str(part) for part in (folder, ROOT) if part)
    environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.compile_layer_kernels", *target]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"compiled {len(variants())} kernels for {' '.join(target)}" in done.stdout
    assert folder is None or f"triton {version}:" in done.stdout


def test_nothing_depends_on_the_batch():
    """No constant, type or number of warps changes with the rows or tokens, so nothing is compiled again."""
    few, many = ({(v.kernel, v.types, v.constants, v.warps) for v in variants(rows)} for rows in (6, 7001))
    assert few == many
