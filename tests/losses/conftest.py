"""Tests of losses make their tensors on the GPU where there is one."""

import torch

from tests.support import DEVICE

if DEVICE.type != "cpu":
    torch.set_default_device(DEVICE)
