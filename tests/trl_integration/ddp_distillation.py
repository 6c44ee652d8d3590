"""Trains IW-OPD with TRL's pair and with ours in each of several processes, and compares them; `test_ddp_distillation.py` runs it."""

import os
import sys
from pathlib import Path

import torch

from tests.support import uncompiled
from tests.trl_integration.test_distillation_trainers import teacher
from tests.trl_integration.test_log_prob_trainers import assert_same, side_by_side
from tests.trl_integration.test_self_distillation_trainers import FUSED
from tests.trl_integration.test_teacher_distillation_trainers import IW_OPD, batches
from tests.trl_integration.tiny import tiny_dataset

torch.set_num_threads(1)
path = Path(sys.argv[1])
# Trainer's own default, under which DDP walks back from the outputs of the forward
changes = IW_OPD | {"loss_top_k": 3, "beta": 0.4, "ddp_find_unused_parameters": True}
with uncompiled():
    trainer = {"teacher_model": teacher(path), "data_collator": batches}
    runs = side_by_side(path, "IWOPD", tiny_dataset(examples=32), trainer=trainer, **changes)
assert isinstance(runs[1].trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
if os.environ["RANK"] == "0":
    assert_same(*runs, strategies=FUSED, rtol=1e-3)
