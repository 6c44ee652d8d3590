"""Which kernels a device gets: products with an epilogue by GPU generation."""

import pytest
import torch

from logitless import kernels

CUDA = torch.device("cuda")
find = kernels.fused_products.__wrapped__  # without its cache


@pytest.fixture
def generation(monkeypatch):
    """Sets the compute capability of the GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", None)

    def choose(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))

    return choose


def test_hopper_has_its_own(generation):
    generation(9)
    found = find(CUDA)
    assert found.__name__ == "logitless.kernels.hopper" and found.DTYPES == (torch.bfloat16,)
    assert found.row_bytes(1024, stored=True) - found.row_bytes(1024, stored=False) == 2 * 1024
    assert callable(found.read) and callable(found.write)


@pytest.mark.parametrize("major", [8, 10, 12])
def test_other_generations_have_none(generation, major):
    generation(major)
    assert find(CUDA) is None


def test_what_is_no_cuda_has_none(generation, monkeypatch):
    generation(9)
    assert find(torch.device("cpu")) is None and find(torch.device("xpu")) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert find(CUDA) is None


def test_without_triton_there_are_none(generation, monkeypatch):
    generation(9)
    monkeypatch.setattr(kernels, "_triton_runs", lambda device_type: False)
    assert find(CUDA) is None
