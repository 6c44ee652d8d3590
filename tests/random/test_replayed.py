"""Random calls that are replayed have the results, to the bit, of the same calls that are not."""

from dataclasses import replace
from unittest import mock

import pytest
from torch import Tensor

from logitless.engine import captured
from logitless.engine.early_projection import LIKELY
from tests.engine.test_captured import captures, expect_equal
from tests.random.calls import Call, World
from tests.random.known import unknown
from tests.random.losses import FAMILIES
from tests.random.search import REPEATED, search
from tests.random.test_losses import calls, fits, formula, run, solve

HEADS = ("weight", "bias", "ref_weight", "ref_bias", "teacher_weight", "teacher_bias")
# Seeds of the calls: equal until the pass is captured, then other values, of which others may be ignored.
SEEDS = (*[0] * (LIKELY + 1), 2, 0, 0)


class Fixed(World):
    """A call whose heads stay where those of an earlier one are."""

    def __init__(self, case: Call, heads: dict[str, Tensor]):
        super().__init__(case)
        self.heads = heads

    def ours(self, name, x):
        x = super().ours(name, x)
        if name not in HEADS or x is None:
            return x
        kept = self.heads.setdefault(name, x)
        if kept is not x:
            kept.copy_(x)
        return kept


def check(case: Call, *, static: bool = True) -> None:
    family, heads = FAMILIES[case.loss], {}
    with captures(static=static), mock.patch.object(captured, "SIGHTINGS", 1):
        for seed in SEEDS:
            w = Fixed(replace(case, seed=case.seed + seed), heads)
            w.inputs = family.given(w)
            solve(family, w)  # which finds the shape of its result
            actual = run(family, w)
            with mock.patch.object(captured, "CAPTURES_ON", ()):
                expected = run(family, w)
            assert actual.keys() == expected.keys()
            for name, x in actual.items():
                assert (x is None) == (expected[name] is None), name
                if x is not None:
                    expect_equal([x], [expected[name]])


SEARCHES = {
    f"{name}, replayed": (calls(name).filter(fits).filter(unknown), lambda case: check(case))
    for name in FAMILIES
}


@pytest.mark.parametrize("name", SEARCHES)
def test_replayed(name):
    search(*SEARCHES[name], REPEATED, max_examples=3)


KINDS = {"DPO": "sigmoid", "GRPO": "dapo"}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("loss", ["cross-entropy", "DPO", "ORPO", "KTO", "GRPO", "RLOO", "distillation"])
def test_calls_are_replayed(loss, static):
    """Of which no token is ignored, so that other values are replayed without static rows as well."""
    options = {"loss_type": KINDS[loss]} if loss in KINDS else {}
    case = replace(formula(loss, options), lengths=(4, 4, 4, 4), padding=0, ignored=0.0)
    replay = captured.CapturedPass.run
    with mock.patch.object(captured.CapturedPass, "run", autospec=True, side_effect=replay) as ran:
        check(case, static=static)
    assert ran.call_count >= 3
