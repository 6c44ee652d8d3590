"""One conftest for all tests: `python -m pytest tests` is one run on any machine, with or without a GPU."""

import os

# No test may reach a hub; transformers reads the variables when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from tests import support  # noqa: E402

# Folders whose tests make their tensors on `support.DEVICE` without saying so. What a module makes while it is imported
# comes before any fixture and must name its device (test_conftest.py). Tests elsewhere name the device of each tensor.
ON_DEVICE = ("losses", "engine", "parallel")


@pytest.fixture(autouse=True, scope="module")
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """The default device of one test module: the GPU for the folders of ON_DEVICE, where there is one."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder not in ON_DEVICE or support.DEVICE.type == "cpu":
        yield
        return
    before = torch.get_default_device()
    torch.set_default_device(support.DEVICE)
    yield
    torch.set_default_device(before)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Nothing is compiled while the test runs; see `support.uncompiled`."""
    with support.uncompiled():
        yield
