"""What the tests of TRL's trainers share. They run on the CPU, where the numbers of two runs agree."""

import pytest
import torch

pytest.importorskip("trl")


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The tensors here are tiny: a second thread only waits for the first, for long when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
