"""Every causal language model of transformers: `python -m pytest -m every_model`, two minutes on a core."""

import pytest

from tests.models.every_model import compare, kinds

pytestmark = pytest.mark.every_model


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_it_gives_what_the_stock_model_gives_or_is_untouched(kind):
    row = compare(kind)
    if row.verdict == "not built":
        pytest.skip(row.detail)
    assert row.verdict in ("equal", "untouched"), row
