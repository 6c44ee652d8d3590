"""Unshifted labels, moved to the positions that predict them: within their sequences, padded or packed."""

import pytest
import torch

from logitless.engine.operands import shifted
from tests.support import DEVICE


def test_padded():
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]], device=DEVICE)
    assert shifted(labels, -100).tolist() == [[2, 3, -100], [5, 6, -100]]
    assert shifted(torch.zeros(2, 0, device=DEVICE), 0.0).shape == (2, 0)


@pytest.mark.parametrize(
    "bounds, expected",
    [
        ([0, 6], [1, 2, 3, 4, 5, -1]),
        ([0, 2, 5, 6], [1, -1, 3, 4, -1, -1]),
        ([0, 0, 2, 2, 2, 6, 6], [1, -1, 3, 4, 5, -1]),  # empty sequences
        ([0, 1, 2, 3, 4, 5, 6], [-1] * 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_packed(bounds, expected, dtype):
    starts = torch.tensor(bounds, device=DEVICE)
    if dtype == torch.bool:
        found = shifted(torch.ones(6, dtype=dtype, device=DEVICE), 0, cu_seqlens=starts)
        assert found.tolist() == [x >= 0 for x in expected]
    else:
        found = shifted(torch.arange(6, dtype=dtype, device=DEVICE), -1, cu_seqlens=starts)
        assert found.tolist() == expected
    assert found.dtype == dtype


def test_no_tokens():
    starts = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    assert shifted(torch.zeros(0, device=DEVICE), 0.0, cu_seqlens=starts).shape == (0,)
