"""The Medusa example, in fewer steps than by default."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_heads_learn_in_both_stages():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "examples/medusa.py",
        "--backbone-steps",
        "60",
        "--head-steps",
        "35",
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "stage 2" in done.stdout
