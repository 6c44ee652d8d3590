"""What is shipped: a wheel holds the library alone; a source distribution also what is needed to test and
measure it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.test_docs import FENCE, TEXTS

ROOT = Path(__file__).parents[1]
SHIPPED = ("logitless", "tests", "benchmarks", "examples", "docs", ".github")
FILES = (
    *(
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "AGENTS.md",
        "SECURITY.md",
        "Makefile",
        "Dockerfile",
    ),
    *("constraints.txt", "frameworks.txt", "mkdocs.yml", "hatch_build.py"),
)
BUILD = (
    "from hatchling import build; build.build_sdist('dist'); build.build_wheel('dist'); "
    "build.build_editable('editable')"
)


def files_below(root: Path) -> set[str]:
    """Of the folders that are shipped, without what Python and the tools leave behind."""
    files = (path for folder in SHIPPED for path in (root / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with a wheel and a source distribution, built offline from a copy of the repository."""
    pytest.importorskip("hatchling", reason="hatchling, of the dev extra, is not installed")
    copy = tmp_path_factory.mktemp("repository")
    for name in SHIPPED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, check=True)
    return copy / "dist"


def test_sdist_holds_everything(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = (files_below(ROOT) | set(FILES)) - names
    assert not missing
    assert not [name for name in names if name.endswith(".pyc")]


def open_wheel(folder: Path) -> zipfile.ZipFile:
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(built) -> Message:
    """Of the wheel."""
    with open_wheel(built) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_wheel_says_what_it_is(metadata):
    assert metadata["Author"] == "logitless maintainers" and metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier") and "grpo" in metadata["Keywords"].split(",")
    assert metadata["Description-Content-Type"] == "text/markdown"
    addresses = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert {"Repository", "Issues", "Changelog", "Documentation"} <= addresses.keys()


def test_the_readme_works_outside_of_the_repository(metadata):
    """On a package index no file lies beside it."""
    (home,) = (url.split(", ")[1] for url in metadata.get_all("Project-URL") if url.startswith("Repository"))
    readme = metadata.get_payload(decode=True).decode()
    assert readme.startswith("# logitless") and f"({home}/raw/main/docs/ce.png)" in readme
    targets = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(targets) > 15 and all(target.startswith(("https:", "#")) for target in targets)
    own = [target.removeprefix(f"{home}/blob/main/") for target in targets if f"{home}/blob" in target]
    assert own and all((ROOT / target.partition("#")[0]).exists() for target in own)


def test_wheel_holds_the_library_and_nothing_else(built):
    with open_wheel(built) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in files_below(ROOT) if name.startswith("logitless/")}


def test_the_wheel_runs_the_readme(built, tmp_path):
    """Unpacked, with nothing of the repository in reach: the first block of the README."""
    with open_wheel(built) as archive:
        archive.extractall(tmp_path)
    (_, block), *_ = FENCE.findall(TEXTS["README.md"])
    block += "\nimport sys; print(sys.modules['logitless'].__file__)"
    done = run(block, tmp_path)
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(tmp_path), done.stdout + done.stderr
    assert "3 products" in done.stdout


@pytest.mark.slow
def test_the_sdist_tests_itself(built, tmp_path):
    """A few tests of it, of the library that lies beside them."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    tests = ["tests/engine/test_plan.py", "tests/test_support.py"]
    assert all((folder / test).exists() for test in tests)
    done = run("import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", folder, *tests)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Python code in a folder whose `logitless` comes before any that is installed."""
    environment = os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_an_editable_install_is_a_path(built):
    """Type checkers follow a path in a .pth file; they do not run a finder."""
    with open_wheel(built.parent / "editable") as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert Path(archive.read(path).decode().strip()) == built.parent
