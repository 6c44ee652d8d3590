"""Outcomes of recipes: a fault of the run with the flag is seen beside the null."""

from dataclasses import replace
from math import inf, nan

import pytest

from benchmarks.proof import outcomes, sums
from benchmarks.proof.convergence import failed
from benchmarks.proof.outcomes import RECIPES, Start, measure, measured, parted, summary


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Start:
    return replace(outcomes.begin(tmp_path_factory.mktemp("outcomes"), "cpu", quick=True), most_steps=6)


@pytest.mark.slow
def test_a_planted_fault_is_seen(start):
    """DPO whose beta has the wrong sign where the flag is set."""
    seeds = [measure(start, "DPO", seed, {"beta": -0.1}) for seed in range(3)]
    actual = summary({"seeds": seeds})
    assert actual["verdict"] == "difference" and actual["flag"]["mean"] < -0.1
    assert abs(actual["moved"]["mean"]) < 1e-4
    assert [each["parted"]["moved"] for each in seeds] == [None] * 3


def test_grpo_has_a_reward_of_the_right_sum_alone(start):
    """And only prompts that are not held out."""
    prompts, completions = ["1+2=", "1+2=", "30+4="], ["3<eos>", "4", "34"]
    assert sums.is_right(prompts, completions) == [1, 0, 1]
    held_out, *_ = sums.texts(sums.HELD_OUT)
    asked = RECIPES["GRPO"].made.columns(start.world)["prompt"]
    assert len(asked) == len(sums.TRAINED) and not {*asked} & {*held_out}


def verdict(flag: list[float], moved: list[float]) -> str:
    """Of these differences from a stock metric of 1."""
    seeds = [
        {"seed": i, "stock": 1.0, "flag": 1 + a, "moved": 1 + b} for i, (a, b) in enumerate(zip(flag, moved))
    ]
    return summary({"seeds": [*seeds, {"seed": 9, "failed": "no"}]})["verdict"]


def test_verdicts():
    null, wide = [0.001, -0.002, 0.001], [0.2, -0.1, 0.1]
    assert verdict([0.1, 0.11, 0.1], null) == "difference"
    assert verdict([0.1, 0.11, 0.1], wide) == "none found, smaller than 0.12"
    assert verdict([0.1, -0.11, 0.1], null) == "none found, smaller than 0.35"
    assert verdict([2e-5, 2e-5, 2.1e-5], [0.0] * 3).startswith("none found"), "rounding"
    assert verdict([0.0] * 3, null) == "none: equal in every seed"
    assert verdict([0.1], [0.1]) == "one seed" and verdict([], []) == "failed"


def test_the_step_at_which_runs_part():
    assert parted([1.0, 2.0, 0.0], [1.0, 2.01, 0.0]) is None
    assert parted([1.0, 2.0, 0.0], [1.0, 2.03, 0.0]) == 2 and parted([0.0], [1e-9]) == 1


def test_a_metric_that_is_not_finite_fails(start, monkeypatch):
    monkeypatch.setitem(RECIPES, "Medusa", replace(RECIPES["Medusa"], metric=lambda *given: nan))
    ((_, actual),) = measured(start, [("Medusa", 0)], 1, lambda: inf)
    assert "finite" in actual["failed"]


def test_what_fails_or_has_no_time_is_told(start):
    units = [("no recipe", 0), ("Medusa", 0)]
    ((unit, actual),) = measured(start, units[:1], 1, lambda: inf)
    assert unit == units[0] and "KeyError" in actual["failed"]
    assert not [*measured(start, units, 1, lambda: 0.0)]


def test_a_difference_fails_the_command():
    differs = {"name": "DPO", "seeds": [], "verdict": "difference"}
    broken = {"name": "SFT", "seeds": [{"seed": 0, "failed": "no"}], "verdict": "failed"}
    equal = {"name": "GRPO", "seeds": [], "verdict": "none found, smaller than 0.1"}
    actual = failed({"quick": False, "outcomes": [differs, broken, equal]})
    assert actual == ["outcomes of DPO: a difference", "outcomes of SFT: no"]


@pytest.mark.slow
def test_a_wrong_beta_is_seen_with_eight_seeds(tmp_path):
    start = outcomes.begin(tmp_path, "cpu")
    actual = summary({"seeds": [measure(start, "DPO", seed, {"beta": 0.2}) for seed in range(8)]})
    assert actual["verdict"] == "difference"


@pytest.mark.slow
def test_processes_beside_each_other(start):
    units = [("Medusa", seed) for seed in range(3)]
    actual = dict(measured(start, units, 2, lambda: 100.0))
    assert sorted(actual) == units and all("failed" not in each for each in actual.values())
    assert not [*measured(start, units, 2, lambda: 0.0)]
