"""The code of the documentation runs as it is pasted, each page in a namespace of its own, from its first
block to its last. A block that is left out says so, and why, in a title that readers see."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
import torch

import logitless
from logitless.tools.cards import SUPPORT

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```python(?: title="not run: ([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SEVERAL_IDS = "docs/several_ids.md"  # run once for all the tests of its functions
PAGES = [page for page, text in TEXTS.items() if FENCE.search(text) and page != SEVERAL_IDS]
# More than torch, which the core's tests must do without.
PACKAGES = ("datasets", "peft", "tokenizers", "torchao", "transformers", "trl")


def run_blocks(page: str) -> dict:
    """The names that are there after all blocks of a page."""
    names = {"__name__": "pasted"}
    for number, (left_out, block) in enumerate(FENCE.findall(TEXTS[page]), 1):
        if not left_out:
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    return names


@pytest.fixture(scope="module", autouse=True)
def as_pasted():
    """Uncompiled, as one divergence takes torch.compile a minute on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield
    if torch.distributed.is_initialized():  # by the page about several GPUs
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_one_after_the_other(page, tmp_path, monkeypatch):
    for package in PACKAGES:
        if f"\nfrom {package}" in TEXTS[page]:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_blocks(page)
    if page == "README.md":
        assert not list(tmp_path.iterdir()), "the README's blocks write nothing into the current folder"


def test_num_items_of_the_loss_of_pairs_counts_pairs():
    """Against plain PyTorch on full logits: the margin divided by 8 pairs, the NLL by the chosen tokens."""
    torch.manual_seed(0)
    names = run_blocks("docs/howto/own-loss.md")
    hidden, weight, targets = names["hidden"], names["weight"], names["targets"]
    logps = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    chosen, rejected = (logps.sum(1) - names["ref_sums"]).chunk(2)
    margin = torch.nn.functional.softplus(rejected - chosen)
    torch.testing.assert_close(names["share"].loss, -logps[:2].mean() + margin.sum() / 8)


@pytest.mark.slow
def test_the_notebook_shows_equal_curves_and_less_memory():
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib").use("Agg")
    names = {"__name__": "pasted"}
    for cell in json.loads((ROOT / "docs" / "notebooks" / "sft.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "sft.ipynb", "exec"), names)
    assert names["gap"] < 1e-3 and names["last"] < 0.7 * names["first"]
    full, ours = (names["peaks"][name][-1] for name in ("full logits", "logitless"))
    assert 0 < ours < full / 3


def test_no_block_is_overlooked():
    for page, text in TEXTS.items():
        fences = re.findall(r"^ *```py.*$", text, re.MULTILINE)
        assert len(fences) == len(FENCE.findall(text)), page
    left_out = [reason for text in TEXTS.values() for reason, _ in FENCE.findall(text) if reason]
    assert len(left_out) <= 6 and all(len(reason) > 20 for reason in left_out)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the site names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_lead_somewhere():
    """`make docs` checks those of the site; these are also the README's, and work in a checkout."""
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            place, _, anchor = target.partition("#")
            if place.startswith(("https:", "mailto:")) or anchor.startswith("logitless."):
                continue
            path = (ROOT / page).parent / place if place else ROOT / page
            assert path.exists(), (page, target)
            assert not anchor or anchor in anchors(path), (page, target)


def test_result_files_that_pages_name_exist():
    for page, text in TEXTS.items():
        for name in re.findall(r"benchmarks/results/[\w.-]+\.json", text):
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_every_page_is_in_the_site():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {f"docs/{page}" for page in re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"]))}
    assert pages == TEXTS.keys() - {"README.md"}


def test_messages_to_look_up_are_the_librarys():
    """Each piece of a message between names and values is a text in the code."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "logitless").rglob("*.py")]
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    code = "\n".join(text for text in constants if isinstance(text, str))
    rows = re.findall(r"^\| (`.*?) \|", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if " " in message]
    assert len(messages) > 30
    for message in messages:
        if message.startswith("'NoneType'") or message.startswith("model("):  # Python's own
            continue
        for piece in re.split(r"…|: expected |, got | with | as it comes", message):
            assert piece.strip(" ,") in code, (message, piece)


def test_the_page_of_fused_layers_has_the_tests_table():
    from tests.layers.every_fused import families

    assert f"<!-- families -->\n{families()}\n<!-- /families -->" in TEXTS["docs/layers.md"]


def test_papers_are_those_of_the_docstrings():
    actual = re.findall(
        r"^\| \[`(\w+)`\]\[\w+\] \| (.*) \| [^|]*\|$", TEXTS["docs/choosing.md"], re.MULTILINE
    )
    links = [(name, link) for name, cell in actual for link in re.findall(r"\((https:[^)]+)\)", cell)]
    assert len(links) > 15
    for name, link in links:
        assert link in getattr(logitless, name).__doc__, (name, link)


def test_the_table_of_devices_is_the_doctors():
    lines = ["| device | architecture, or type of device | what runs | state |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in SUPPORT]
    table = "\n".join(["<!-- devices -->", *lines, "<!-- /devices -->"])
    assert table in TEXTS["docs/versions.md"], f"docs/versions.md: expected\n{table}"


@pytest.fixture(scope="module")
def recipes() -> dict:
    torch.manual_seed(0)
    return run_blocks(SEVERAL_IDS)


def kl(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (p * (log_p - log_q)).sum(-1)


# The formulas on full logits: (student's log-probabilities (N, V), of the teacher's ids, the teacher's top-k
# logits, log-probabilities among all) -> (N,).
FORMULAS = {
    "verl_forward_kl": lambda s, at, t, full: kl(full.exp(), full, at),
    "topk_reverse_kl": lambda s, at, t, full: kl(at.exp(), at, full),
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
    truth, actual = ([x.clone().requires_grad_() for x in (h, w)] for _ in range(2))
    s = (truth[0] @ truth[1].t()).log_softmax(-1)
    value = FORMULAS[name](s, s.gather(1, ids), t.double(), full.double())[mask].mean()
    teacher = full if name in ("verl_forward_kl", "topk_reverse_kl") else t
    if name in ("forward", "reverse"):
        ours = recipes["nemo_topk_kl"](*actual, teacher, ids, mask, name)
    else:
        ours = recipes[name](*actual, teacher, ids, mask)
    value.backward()
    ours.backward()
    torch.testing.assert_close(ours, value, rtol=2e-6, atol=1e-6, check_dtype=False)
    for x, y in zip(actual, truth):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_link_references_are_defined(page):
    """MkDocs shows others as text, also with --strict."""
    text = re.sub(r"```.*?```|`[^`\n]*`(?!\]\[)", "", page.read_text(), flags=re.DOTALL)
    used = set(re.findall(r"\]\[([A-Za-z_]+)\]", text))
    assert used <= set(re.findall(r"^\[([A-Za-z_]+)\]: ", text, flags=re.MULTILINE))


def test_the_reference_reads_names_that_exist():
    """docs/docstrings.py reads which names of a package are public from the package's source."""
    source = ast.parse((ROOT / "docs" / "docstrings.py").read_text())
    [packages] = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES"
    ]
    for package, attribute in packages.items():
        module = importlib.import_module(".".join(filter(None, ("logitless", package))))
        assert attribute is None or hasattr(module, attribute)
