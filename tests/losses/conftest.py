"""Tests of losses make their tensors on the GPU where there is one, those at the top of a module too.

`pytest tests/losses` and `pytest tests/kernels` are two runs there: the latter make theirs on the CPU and move them.
"""

import torch

from tests.support import DEVICE

if DEVICE.type != "cpu":
    torch.set_default_device(DEVICE)
