"""A rank that raises or dies ends the others within seconds, and what it raised is told."""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import in_processes, on_devices

pytestmark = pytest.mark.ranks


def last_words(how: str) -> None:
    """Rank 1 goes; the others wait for it in a collective."""
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raises":
            raise ArithmeticError("the cause")
        os._exit(7)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"rank 1:\n.*ArithmeticError: the cause"),
        ("dies", r"process 1 terminated with exit code 7|rank 0:\n"),
    ],
    ids=["raises", "dies"],
)
def test_the_others_end_too(how, message):
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        on_devices(2, last_words, how)
    assert re.search(message, str(error.value), re.DOTALL), str(error.value)
    assert time.monotonic() - start < 60


def device() -> tuple[str, torch.Tensor]:
    return dist.get_backend(), torch.ones(1) * dist.get_rank()


def test_backends():
    assert [backend for backend, _ in in_processes(2, device)] == ["gloo", "gloo"]
    gpus = torch.cuda.device_count() >= 2
    for rank, (backend, x) in enumerate(on_devices(2, device)):
        assert backend == ("nccl" if gpus else "gloo") and x.device.type == "cpu" and x == rank
