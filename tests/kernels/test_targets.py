"""Which targets are supervised, and which are no ids."""

import pytest
import torch

from logitless.kernels.targets import marked
from tests.kernels.support import DEVICE, Random, strided


@pytest.mark.parametrize("N", [0, 1, 7, 3000])
@pytest.mark.parametrize("ignore_index", [-100, 0, 5])
@pytest.mark.parametrize("sharded", [False, True])
def test_against_the_definition(N, ignore_index, sharded):
    V, random = 11, Random(N)
    targets = random.integers(V + 4, N) - 2
    targets[::3] = ignore_index
    others = random.uniform(2, N) < 0.5
    supervised = targets != ignore_index
    outside = supervised & ((targets < 0) | (targets > V - 1))
    size = torch.tensor(V, device=DEVICE) if sharded else V
    for kind in (torch.int64, torch.int32):
        found = marked(strided(targets.to(kind)), size, ignore_index)
        assert found.dtype == torch.bool and torch.equal(found, torch.stack((supervised, outside)))
        found = marked(targets.to(kind), size, ignore_index, strided(others))
        assert torch.equal(found[:2], torch.stack((supervised, outside)))
        assert torch.equal(found[2:], others & supervised)
