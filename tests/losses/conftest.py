"""Tests of losses make their tensors on the GPU where there is one."""

import pytest
import torch

from tests.support import DEVICE


@pytest.fixture(autouse=True)
def default_device():
    with torch.device(DEVICE):
        yield
