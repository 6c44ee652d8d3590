"""Version, tag, changelog and citation agree, and a release workflow that publishes without a token."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import logitless

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".github" / "release.py"


def release(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_the_version_has_a_tag_a_citation_and_notes():
    done = release("check", f"v{logitless.__version__}")
    assert done.returncode == 0, done.stderr
    done = release("notes", f"v{logitless.__version__}")
    assert done.returncode == 0 and len(done.stdout) > 200 and "\n## " not in done.stdout


def test_another_tag_is_refused():
    done = release("check", "v99.0.0")
    assert done.returncode == 1 and f"expected v{logitless.__version__}" in done.stderr
    done = release("notes", "v99.0.0")
    assert done.returncode == 1 and "CHANGELOG.md: expected a part" in done.stderr


def test_the_newest_tag_is_not_of_a_later_version():
    tags = subprocess.run(
        ["git", "tag", "--list", "v*", "--merged", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if tags.returncode or not tags.stdout.strip():
        pytest.skip("no repository, or no release yet")
    packaging = pytest.importorskip("packaging.version")
    newest = max(packaging.Version(tag.removeprefix("v")) for tag in tags.stdout.split())
    assert packaging.Version(logitless.__version__) >= newest


def test_publishing_needs_no_token():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "build"
    assert any("gh-action-pypi-publish" in step.get("uses", "") for step in jobs["publish"]["steps"])
    assert not re.search(r"secrets\.|password", text)
    commands = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    for needed in ("python -m build", "twine check --strict", "release.py check", "release.py notes"):
        assert needed in commands
