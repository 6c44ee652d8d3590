"""The default device is the GPU for the tests of losses alone, and no module of theirs counts on it before
the tests begin."""

import runpy
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests import conftest, support

TESTS = Path(__file__).parent
MODULES = [path for folder in conftest.ON_DEVICE for path in sorted((TESTS / folder).glob("*.py"))]


class Undecided(TorchFunctionMode):
    """Notes every tensor that is made on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            # Without this method and what lies below the tests, in torch or in the library.
            lines = [
                line for line in traceback.extract_stack()[:-1] if Path(line.filename).is_relative_to(TESTS)
            ]
            self.found.append(f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: {func.__name__}")
        return func(*args, **kwargs)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_tensors_of_a_module_name_their_device(path):
    with Undecided() as undecided:
        try:
            runpy.run_path(str(path), run_name=f"{path.stem}_again")
        except pytest.skip.Exception:
            pytest.skip("the module skips itself here")
    assert not undecided.found


def test_the_check_sees_a_tensor_without_a_device(tmp_path):
    with Undecided() as undecided:
        torch.zeros(3, device="cpu")
        torch.zeros(3), torch.nn.Linear(2, 2)
    assert len(undecided.found) == 3 and all(line.startswith("test_conftest.py:") for line in undecided.found)


@pytest.mark.parametrize(
    ("folder", "mark", "device"),
    [
        ("losses", None, "meta"),
        ("losses", "ranks", "cpu"),
        ("kernels", None, "cpu"),
        ("trl_integration", None, "cpu"),
    ],
)
def test_default_device(folder, mark, device, monkeypatch):
    monkeypatch.setattr(support, "DEVICE", torch.device("meta"))
    node = SimpleNamespace(get_closest_marker=lambda name: True if name == mark else None)
    request = SimpleNamespace(path=TESTS / folder / "test_it.py", node=node)
    steps = conftest.default_device.__wrapped__(request)
    next(steps)
    try:
        assert torch.zeros(1).device.type == device
    finally:
        assert next(steps, "over") == "over"
    assert torch.zeros(1).device.type == "cpu"
