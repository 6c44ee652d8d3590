"""The list of mutants keeps up with the code."""

from pathlib import Path

import pytest

from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant):
    broken = mutant.applied((ROOT / mutant.path).read_text())
    compile(broken, mutant.path, "exec")
    assert all((ROOT / test).exists() for test in mutant.tests.split() if test.startswith("tests/"))


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
