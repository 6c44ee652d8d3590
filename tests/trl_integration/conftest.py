"""No test of this folder may reach a hub; transformers reads the variables when it is imported."""

import os

import pytest
import torch

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

pytest.importorskip("trl")


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The tensors here are tiny: a second thread only waits for the first, for long when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
