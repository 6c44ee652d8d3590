"""What the tests of TRL's trainers share. They run on the CPU, where the numbers of two runs agree."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import support

pytest.importorskip("trl")

from .kinds import teacher  # noqa: E402
from .tiny import save, tiny_model  # noqa: E402


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a model, and the teacher of `kinds.needs`."""
    path = tmp_path_factory.mktemp("trainers")
    save(tiny_model(), path / "model")
    teacher(path)
    return path
