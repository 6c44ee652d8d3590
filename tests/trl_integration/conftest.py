"""What the tests of TRL's trainers share. They run on the CPU, where the numbers of two runs agree."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests import support

pytest.importorskip("trl")


@pytest.fixture(autouse=True)
def as_written() -> Iterator[None]:
    """A LogitsLoss is not compiled: minutes of compilation show nothing about TRL."""
    with support.uncompiled():
        yield


@pytest.fixture
def calls() -> Iterator[SimpleNamespace]:
    """`calls.number`: how often a loss that is trained on has gone through the engine."""
    with support.eager_calls() as calls:
        yield calls


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """The tensors here are tiny: a second thread only waits for the first, for long when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
