"""Normalizers: factor = m * 2^e with m in [0.5, 1), nothing divided by 0, and Python numbers kept as such."""

import math

import pytest
import torch

from logitless import CrossEntropyLoss
from logitless.engine.choose import resolve_rows
from logitless.engine.reduction import power_of_two, unit_factors
from tests.engine.calls import call

NUMBERS = [1.0, 0.5, 0.75, 3.0, 1 / 3, 1 / 7, 1e-30, 1.5e30, 2.0**-100, math.nextafter(2.0, 0)]


@pytest.mark.parametrize("x", NUMBERS)
def test_power_of_two(x):
    """The smallest power of two above x."""
    expected = next(2.0**e for e in range(-200, 200) if 2.0**e > x)
    assert power_of_two(x) == expected and isinstance(power_of_two(x), float)
    tensor = power_of_two(torch.tensor(x, dtype=torch.float64))
    assert tensor.item() == expected and tensor.dtype == torch.float64 and tensor.dim() == 0
    assert 0.5 <= x / expected < 1


def of_cross_entropy(dtype=torch.float32, compact=True, ignored=2, reduction="mean", **options):
    torch.manual_seed(0)
    targets = torch.randint(0, 11, (5,))
    targets[:ignored] = -100
    loss = CrossEntropyLoss(reduction=reduction, compact=compact)
    made = call(
        loss, torch.randn(5, 4).to(dtype).requires_grad_(), torch.randn(11, 4).to(dtype), targets, **options
    )
    return resolve_rows(made)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "every row"])
def test_a_mean(compact):
    made, rows = of_cross_entropy(compact=compact)
    factors = unit_factors(made, rows)
    assert float(factors.loss["tokens"]) == pytest.approx(1 / 3, rel=1e-7)
    assert float(factors.metrics["tokens"]) == pytest.approx(1 / 3, rel=1e-7)
    # What the host knows stays a Python number, so that nothing is launched for it.
    deferred = power_of_two(factors.loss["tokens"])
    assert isinstance(deferred, float) == isinstance(factors.loss["tokens"], float) == compact


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "every row"])
def test_a_deferred_factor_divides_the_factors_of_the_loss_alone(compact):
    factors = unit_factors(*of_cross_entropy(compact=compact))
    deferred = power_of_two(factors.loss["tokens"])
    divided = factors.divided_by(deferred)
    assert 0.5 <= float(divided.loss["tokens"]) < 1
    assert {unit: x * deferred for unit, x in divided.loss.items()} == factors.loss
    assert divided.metrics is factors.metrics and divided.num_items_unit == factors.num_items_unit


def test_a_sum():
    made, rows = of_cross_entropy(reduction="sum")
    factors = unit_factors(made, rows)
    assert all(float(x) == 1 for x in factors.loss.values())
    assert float(factors.metrics["tokens"]) == pytest.approx(1 / 3)  # metrics are means all the same
