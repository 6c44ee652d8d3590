"""Sums of several vectors in one launch."""

import pytest
import torch

from logitless.kernels.head.sums import sums
from tests.kernels.support import DEVICE, Random


@pytest.mark.parametrize("n", [0, 1, 7, 5000])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9])
def test_sums(m, n):
    random = Random(n)
    vectors = [random.normal(n) for _ in range(m)]
    vectors[-1] = random.normal(2 * n)[::2]
    expected = torch.stack([x.double().sum() for x in vectors])
    found = sums(vectors)
    assert found.dtype == torch.float32 and found.shape == (m,)
    assert (found - expected).abs().max() <= 1e-6 * max(1, n)
    assert torch.equal(found, sums(vectors))
    if n > 3000:
        vectors[0] = torch.full((n,), torch.nan, device=DEVICE)
        assert sums(vectors).isnan().tolist() == [True, *[False] * (m - 1)]
