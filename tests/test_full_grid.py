"""The option grid runs, and has every combination once."""

import pytest

from tests import full_grid
from tests.commands import output_of


def test_every_combination_once():
    cases = full_grid.cases()
    names = (*full_grid.GRID, "ignored")
    assert len({(dtype, *(case[name] for name in names)) for case, dtype in cases}) == len(cases) == 41_472


@pytest.mark.slow
def test_the_command_runs():
    assert "3 cases, 0 failed" in output_of(full_grid.main, "--jobs", "1", "--every", "15000")
