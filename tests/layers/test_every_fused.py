"""Every language model of transformers with fused layers: its own loss and gradients, or untouched."""

import pytest

from tests.layers.every_fused import classes, compare


@pytest.mark.slow
@pytest.mark.parametrize("name", classes())
def test_it_gives_what_the_stock_model_gives_or_is_untouched(name):
    row = compare(name)
    if row.verdict == "not run":
        pytest.skip(row.detail)
    assert row.verdict in ("equal", "untouched"), row
