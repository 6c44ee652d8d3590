"""The list of mutants keeps up with the code."""

import pytest

from tests.mutants import MUTANTS, ROOT, applied


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant):
    broken = applied(mutant, (ROOT / mutant.path).read_text())
    compile(broken, mutant.path, "exec")
    assert all((ROOT / test).exists() for test in mutant.tests.split() if test.startswith("tests/"))


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
