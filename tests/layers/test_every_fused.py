"""Every language model of transformers with fused layers: its own loss and gradients, and the parts that
docs/layers.md says are fused."""

import pytest

from tests.layers.every_fused import classes, compare, documented


@pytest.mark.slow
@pytest.mark.parametrize("name", classes())
def test_it_gives_what_the_stock_model_gives_or_is_untouched(name):
    row = compare(name)
    if row.verdict == "not run":
        pytest.skip(row.detail)
    fused = documented().get(name)
    assert row.verdict == ("equal" if fused else "untouched"), row
    assert fused in (row.detail, None), row


@pytest.mark.slow
@pytest.mark.parametrize("name", classes())
def test_with_lora_on_all_linear_layers(name):
    row = compare(name, lora=True)
    if row.verdict == "not run":
        pytest.skip(row.detail)
    # Their layers are transformers' Conv1D.
    assert row.verdict == ("untouched" if name in ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel") else "equal"), (
        row
    )
