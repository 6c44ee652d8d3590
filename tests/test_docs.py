"""The code of the documentation runs as it is pasted."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["design.md", "layers.md", "recipes.md"])
def test_blocks_run_one_after_the_other(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"__name__": "pasted"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)


def test_the_page_of_fused_layers_has_the_tests_table():
    from tests.models.every_fused import families

    assert f"<!-- families -->\n{families()}\n<!-- /families -->" in (DOCS / "layers.md").read_text()
