"""What the tests of TRL's trainers share. They run on the CPU, where the numbers of two runs agree."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

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
