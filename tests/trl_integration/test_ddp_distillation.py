"""Two processes: the head is used outside of the forward that DDP watches."""

import os
import subprocess
import sys
from pathlib import Path

from .test_distillation_trainers import teacher
from .test_self_distillation_trainers import decided


def test_ddp_sees_the_deferred_head(tmp_path):
    decided(tmp_path)
    teacher(tmp_path)
    script, root = Path(__file__).with_name("ddp_distillation.py"), Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-3000:]
