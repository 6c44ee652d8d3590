"""`fused_projection_triton.read` and LoRA dropout name all on which Triton specializes their kernels."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.offline import INTERPRETED  # noqa: E402


@pytest.mark.skipif(INTERPRETED, reason="the process runs without TRITON_INTERPRET either way")
def test_a_bound_launch_always_has_operands_of_one_specialization():
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.kernels.hopper.bound_launches"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bound launches" in done.stdout
