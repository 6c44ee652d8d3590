"""Which kernels a device gets: products with an epilogue by GPU generation."""

import pytest
import torch

from logitless import kernels
from logitless.kernels import matmul

CUDA = torch.device("cuda")
find = kernels.fused_products


@pytest.fixture
def generation(monkeypatch):
    """Sets the compute capability of the GPU."""
    pytest.importorskip("triton")
    kernels._generation.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)

    def choose(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))

    yield choose
    kernels._generation.cache_clear()


def test_hopper_has_its_own(generation):
    generation(9)
    actual = find(CUDA)
    assert actual.__name__ == "logitless.kernels.hopper" and actual.DTYPES == (torch.bfloat16,)
    assert actual.row_bytes(1024, stored=True) - actual.row_bytes(1024, stored=False) == 2 * 1024
    assert callable(actual.read) and callable(actual.write)


@pytest.mark.parametrize("major", [8, 10, 12])
def test_other_generations_have_none(generation, major):
    generation(major)
    assert find(CUDA) is None


def test_what_is_no_cuda_has_none(generation, monkeypatch):
    generation(9)
    assert find(torch.device("cpu")) is None and find(torch.device("xpu")) is None
    kernels._generation.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert find(CUDA) is None


def test_without_triton_there_are_none(generation, monkeypatch):
    generation(9)
    monkeypatch.setattr(kernels, "_triton_runs", lambda device_type: False)
    assert find(CUDA) is None


def test_a_gpu_that_is_planned_for():
    cpu = torch.device("cpu")
    with kernels.planned_for(9):
        assert find(cpu) is find(CUDA) is not None and kernels.uses_triton(cpu, torch.bfloat16)
        assert not kernels.uses_triton(cpu, torch.float64)
        assert matmul.piece_bytes(cpu, torch.bfloat16, torch.float32, 5000, 8) == 0
        assert matmul.piece_bytes(cpu, torch.bfloat16, torch.float64, 5000, 8) > 0
        with kernels.planned_for(8):
            assert find(cpu) is None and kernels.uses_triton(cpu, torch.bfloat16)
        assert find(cpu) is not None
    assert find(cpu) is None
