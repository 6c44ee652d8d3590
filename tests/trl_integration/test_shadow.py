"""Stock TRL trains a model that can already do something; at every step the chunked loss computes the
gradient of the same inputs at the same weights."""

from collections.abc import Callable

import pytest

from benchmarks.proof import shadow, shadow_heads, sums
from benchmarks.proof.shadow import LIMIT, Step
from tests.cases import usually

# Of the whole gradient, for the faults below
SEEN = 5e-4
# Several chunks in every batch
BUDGET = 2048


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> shadow.World:
    """A model that has learned to add, trained once for all tests of this file."""
    return sums.world(tmp_path_factory.mktemp("world") / "model", steps=150)


@pytest.fixture
def compared(world, tmp_path) -> Callable[..., list[Step]]:
    def compare(kind: str, steps: int, **options) -> list[Step]:
        actual = shadow.compare(kind, world, tmp_path, steps=steps, logits_budget=BUDGET, **options)
        assert len(actual) == steps
        return actual

    return compare


def assert_equal(steps: list[Step]) -> None:
    """All gradients, of which few may be zero: GRPO has none where all rewards of a prompt are equal."""
    assert sum(step.norm > 0 for step in steps) >= 0.8 * len(steps)
    for i, step in enumerate(steps):
        assert step.gradient < LIMIT, f"step {i}: off by {step.gradient:.1e} of the gradient"
        assert step.loss_difference < LIMIT, f"step {i}: losses differ by {step.loss_difference:.1e}"


@pytest.mark.parametrize("kind", usually(["SFT", "GRPO"], ["SFT", "DPO", "GRPO"]))
def test_gradients_are_those_of_stock_trl_at_every_step(compared, kind):
    assert_equal(compared(kind, 10))


@pytest.mark.parametrize(
    "kind, options, fault",
    [("DPO", {}, {"beta": 0.1001}), ("GRPO", {"entropy_coef": 0.1}, {"entropy_coef": 0.11})],
)
def test_a_small_fault_is_seen(compared, kind, options, fault):
    """An argument of the loss that is a little off, while everything else is equal."""
    assert min(step.gradient for step in compared(kind, 2, fault=fault, **options)) > SEEN
    assert_equal(compared(kind, 2, **options))


@pytest.mark.parametrize("kind", usually(["Medusa, stage 2"], shadow_heads.KINDS))
def test_gradients_of_heads_at_every_step(world, kind):
    """Medusa's heads and a draft beside full logits; a gradient that is a little off is seen."""
    assert_equal(shadow_heads.compare(kind, world, steps=10, logits_budget=BUDGET))
    (step,) = shadow_heads.compare(kind, world, steps=1, logits_budget=BUDGET, fault=1e-2)
    assert step.gradient > LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("kind", shadow.KINDS)
def test_gradients_over_forty_steps(compared, kind):
    assert_equal(compared(kind, 40))
