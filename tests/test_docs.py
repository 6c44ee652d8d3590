"""The code of the documentation runs as it is pasted."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"


def test_the_first_block_of_the_readme_runs_as_pasted():
    text = (DOCS.parent / "README.md").read_text()
    names = {"__name__": "pasted"}
    exec(re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1], names)
    expected = torch.nn.functional.cross_entropy(names["logits"].flatten(0, 1), names["targets"].flatten())
    torch.testing.assert_close(names["loss"], expected)
    assert names["hidden"].grad.any() and names["lm_head"].weight.grad.any()


def run_blocks(page: str) -> dict:
    """The names that are there after all blocks of a page."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names = {"__name__": "pasted"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


@pytest.mark.parametrize("page", ["design.md", "layers.md", "recipes.md"])
def test_blocks_run_one_after_the_other(page):
    run_blocks(page)


def test_the_page_of_fused_layers_has_the_tests_table():
    from tests.models.every_fused import families

    assert f"<!-- families -->\n{families()}\n<!-- /families -->" in (DOCS / "layers.md").read_text()


@pytest.fixture(scope="module")
def recipes() -> dict:
    torch.manual_seed(0)
    return run_blocks("several_ids.md")


def kl(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (p * (log_p - log_q)).sum(-1)


# The formulas on full logits: (student's log-probabilities (N, V), of the teacher's ids, the teacher's top-k
# logits, log-probabilities among all) -> (N,).
FORMULAS = {
    "verl_forward_kl": lambda s, at, t, full: kl(full.exp(), full, at),
    "verl_reverse_kl": lambda s, at, t, full: kl(at.exp(), at, full),
    "forward": lambda s, at, t, full: kl(t.softmax(-1), t.log_softmax(-1), at.log_softmax(-1)),
    "reverse": lambda s, at, t, full: kl(at.softmax(-1), at.log_softmax(-1), t.log_softmax(-1)),
    "nemo_reverse_kl_zero_outside": lambda s, at, t, full: (
        kl(at.exp(), at, t.log_softmax(-1))
        + ((s.exp() * s).sum(-1) - (at.exp() * at).sum(-1))
        + 100 * (1 - at.exp().sum(-1))
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("V", [40, 900], ids=["products", "gathered"])
def test_recipes_have_the_numbers_of_their_formulas(recipes, name, V):
    generator = torch.Generator().manual_seed(V)
    h = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    w = torch.randn(V, 6, generator=generator, dtype=torch.float64)
    logits = 2 * torch.randn(9, V, generator=generator)
    t, ids = logits.topk(4)
    full, mask = logits.log_softmax(-1).gather(1, ids), torch.arange(9) % 4 != 1
    truth, found = ([x.clone().requires_grad_() for x in (h, w)] for _ in range(2))
    s = (truth[0] @ truth[1].t()).log_softmax(-1)
    value = FORMULAS[name](s, s.gather(1, ids), t.double(), full.double())[mask].mean()
    teacher = full if name.startswith("verl") else t
    if name in ("forward", "reverse"):
        ours = recipes["nemo_topk_kl"](*found, teacher, ids, mask, name)
    else:
        ours = recipes[name](*found, teacher, ids, mask)
    value.backward()
    ours.backward()
    torch.testing.assert_close(ours, value, rtol=2e-6, atol=1e-6, check_dtype=False)
    for x, y in zip(found, truth):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
