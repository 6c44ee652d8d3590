"""No module whose tests run on the GPU by default makes a tensor while it is imported without naming its
device."""

import runpy
import traceback
from pathlib import Path

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests import conftest

TESTS = Path(__file__).parent
MODULES = [path for folder in conftest.ON_DEVICE for path in sorted((TESTS / folder).glob("*.py"))]


class Undecided(TorchFunctionMode):
    """Notes every tensor that is made on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            # Without this method and what lies below the tests, in torch or in the library.
            lines = [
                line for line in traceback.extract_stack()[:-1] if Path(line.filename).is_relative_to(TESTS)
            ]
            self.calls.append(f"{Path(lines[-1].filename).name}:{lines[-1].lineno}: {func.__name__}")
        return func(*args, **kwargs)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_tensors_of_a_module_name_their_device(path):
    with Undecided() as undecided:
        try:
            runpy.run_path(str(path), run_name=f"{path.stem}_again")
        except pytest.skip.Exception:
            pytest.skip("the module skips itself here")
    assert not undecided.calls
