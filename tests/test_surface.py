"""What surrounds the library: metadata, citation, workflows, templates and CONTRIBUTING.md agree with the
project."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
# Mutants run in a copy without it.
pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="no whole checkout")

YAML = sorted((*GITHUB.rglob("*.yml"), ROOT / "CITATION.cff"))


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pythons() -> list[str]:
    """Versions that the metadata name."""
    actual = [
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", x) for x in project()["classifiers"]
    ]
    return [match[1] for match in actual if match]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_it_parses(path):
    assert isinstance(load(path), dict)


def test_citation():
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the format requires
    assert citation["license"] == project()["license"]
    assert [author["name"] for author in citation["authors"]] == [x["name"] for x in project()["authors"]]


def test_workflow_tests_what_the_metadata_promise():
    jobs = load(GITHUB / "workflows" / "ci.yml")["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert versions == pythons() and project()["requires-python"] == f">={versions[0]}"
    commands = [step.get("run", "") for step in jobs["test"]["steps"]]
    oldest = re.search(r"torch>=([\d.]+)", " ".join(project()["dependencies"]))[1]
    assert f'.venv/bin/python -m pip install "torch=={oldest}.*"' in commands
    assert {"make lint"} <= {step.get("run") for step in jobs["lint"]["steps"]} and commands[
        -1
    ] == "make test"
    for job in jobs.values():
        assert job["timeout-minutes"] > 0 and all(("run" in x) != ("uses" in x) for x in job["steps"])


PAGES = (
    "CONTRIBUTING.md",
    ".github/workflows/ci.yml",
    ".github/workflows/frameworks.yml",
    ".github/PULL_REQUEST_TEMPLATE.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_make_knows_its_targets(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|run: )make ([a-z-]+)", (ROOT / page).read_text()))
    assert named and named <= targets


def test_what_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"[`/ (]((?:logitless|tests|docs)/[\w/.]*)", text)
    assert len(paths) > 12 and [path for path in paths if not (ROOT / path).exists()] == []
    folders = {path.name for path in (ROOT / "logitless").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(re.findall(r"^\| `logitless/(\w+)/`", text, re.MULTILINE))


@pytest.mark.parametrize(
    "path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_form(path):
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in form["body"])
