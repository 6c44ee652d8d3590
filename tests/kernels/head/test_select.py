"""The k largest logits of each row, of equal ones those with the lowest ids."""

import pytest
import torch

from logitless.kernels.head import select as file
from logitless.kernels.head.cross_entropy import allocate_stats, token_statistics
from logitless.kernels.head.select import select
from logitless.kernels.head.transform import LogitTransform
from tests.cases import DTYPES, covering_array, dtypes
from tests.kernels.support import DEVICE, Random

NEGATIVE, CAPPED = LogitTransform(None, -0.5, 0.7), LogitTransform(1.5, 0.8, 2.0)
# A second block, ragged in its last tile of 64.
V = 2100


def expected(z: torch.Tensor, k: int) -> torch.Tensor:
    """By the definition: sorted by falling logit, then by rising id."""
    rows = [sorted(range(len(row)), key=lambda v: (-row[v], v))[:k] for row in z.double().tolist()]
    return torch.tensor(rows, device=z.device)


@dtypes
@pytest.mark.parametrize("V, k", [(1, 1), (17, 1), (17, 17), (129, 2), (1000, 64), (2500, 5), (300, 128)])
def test_against_a_sort(V, k, dtype):
    logits = Random(V + k).normal(7, V).to(dtype)
    logits[1] = (logits[1] * 1.5).round()  # many ties
    logits[2] = 0.0
    logits[3] = -torch.inf
    logits[4, : V // 2] = -torch.inf
    logits[5, V // 3] = torch.inf
    assert torch.equal(select(logits, k, transform=LogitTransform()), expected(logits, k))


def test_zeros_of_both_signs_are_equal():
    logits = torch.tensor([[-0.0, 0.0, -0.0, -1.0]], device=DEVICE)
    assert select(logits, 3, transform=LogitTransform()).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("transform", [NEGATIVE, CAPPED], ids=["negative", "softcap"])
def test_order_is_that_of_the_transformed_logits(transform):
    random = Random(3)
    logits, bias = random.normal(5, 400), random.normal(400)
    z, _ = transform.logits(logits, bias)
    assert torch.equal(select(logits, 9, transform=transform, bias=bias), expected(z, 9))


def test_rows_with_gaps_and_nan():
    logits = Random(4).normal(6, 500)
    assert torch.equal(
        select(logits[::2, :300], 7, transform=LogitTransform()), expected(logits[::2, :300], 7)
    )
    logits[0, 40] = torch.nan
    assert select(logits, 2, transform=LogitTransform())[0, 0] == 40


def test_more_ids_than_the_kernel_takes(monkeypatch):
    logits = (Random(5).normal(3, 400) * 4).round()
    k = file.MOST_IDS + 7
    assert torch.equal(select(logits, k, transform=LogitTransform()), expected(logits, k))


HEADS = {"plain": LogitTransform(), "negative": NEGATIVE, "softcap": CAPPED}
FACTORS = {"transform": list(HEADS), "bias": [False, True], "dtype": list(DTYPES)}


@pytest.mark.parametrize("case", covering_array(FACTORS, lambda case: True, repeats=True))
def test_maxima_that_the_statistics_find_in_passing(case):
    random, transform = Random(6), HEADS[case["transform"]]
    logits, bias = random.normal(5, V).to(DTYPES[case["dtype"]]), random.normal(V) if case["bias"] else None
    logits[1, 70] = torch.nan
    maxima = file.new_maxima(logits, 9)
    if maxima is None:
        pytest.skip("maxima are found by the kernel alone")
    stats = allocate_stats(("entropy",), 5, torch.float32, logits.device)
    targets = torch.full((5,), V, device=DEVICE)
    token_statistics(logits, targets, stats, transform=transform, bias=bias, maxima=maxima)
    ids = select(logits, 9, transform=transform, bias=bias, maxima=maxima)
    assert torch.equal(ids, select(logits, 9, transform=transform, bias=bias))
    z = file.compared(logits, transform, bias)
    tiles = torch.nn.functional.pad(z, (0, -V % 64), value=-torch.inf).view(5, -1, 64)
    assert torch.equal(maxima, tiles.amax(2))


def test_more_columns_than_the_kernel_takes(monkeypatch):
    monkeypatch.setattr(file, "MOST_COLUMNS", 100)
    logits = Random(7).normal(3, 101)
    assert file.new_maxima(logits, 4) is None
    assert torch.equal(select(logits, 4, transform=LogitTransform()), expected(logits, 4))
