"""What the pages say about other libraries is on the pages, and in the source of the releases that they name.

`make test-peers` installs the wheels, without what they depend on; their code does not run here.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.pages.claims import WHY
from benchmarks.pages.peer_claims import COLUMNS, PEER_CLAIMS, RELEASES, UNSLOTH, PeerClaim, parameters

ROOT = Path(__file__).parents[1]


def wheel_of(release: str) -> Path | None:
    """The folder of a release in this environment; None if another version or none is installed."""
    name, _, version = release.partition("==")
    for actual in distributions(name=name, path=sys.path):
        if actual.version.partition("+")[0] == version:
            return Path(str(actual.locate_file("")))
    return None


@pytest.mark.parametrize("claim", PEER_CLAIMS, ids=lambda claim: f"{claim.release}, {claim.text}")
def test_a_claim_is_on_its_page(claim):
    assert re.search(claim.pattern(), (ROOT / claim.page).read_text(), re.MULTILINE), claim


def test_the_table_of_features_names_the_releases():
    header = next(
        line for line in (ROOT / WHY).read_text().splitlines() if line.startswith("| | logitless |")
    )
    cells = [cell.strip() for cell in header.strip("|").split("|")]
    for release, place in COLUMNS.items():
        version = cells[place].split()[-1]
        assert release.partition("==")[2].startswith(version), (release, cells[place])
    assert f"unsloth_zoo {UNSLOTH.partition('==')[2]}" in (ROOT / WHY).read_text()


@pytest.mark.parametrize("release", RELEASES)
def test_the_source_of_a_release_bears_its_claims_out(release):
    wheel = wheel_of(release)
    if wheel is None:
        pytest.skip(f"needs {release}: `make test-peers`")
    faults = [claim.find_fault(wheel) for claim in PEER_CLAIMS if claim.release == release]
    assert len(faults) > 1 and not any(faults), [fault for fault in faults if fault]


def test_the_makefile_installs_the_releases():
    makefile = (ROOT / "Makefile").read_text()
    installed = re.search(r"^PEERS := (.*)$", makefile, re.MULTILINE)[1].split()
    in_the_venv = {release for release in RELEASES if release.startswith(("torch==", "trl=="))}
    assert set(installed) == set(RELEASES) - in_the_venv


def test_faults_are_found(tmp_path):
    (tmp_path / "loss.py").write_text(
        "class Loss:\n    def forward(self, x, *, bias=None):\n        return x\n"
    )
    assert parameters((tmp_path / "loss.py").read_text(), "Loss.forward") == ["self", "x", "bias"]

    def fault(file: str = "loss.py", **others: object) -> str | None:
        return PeerClaim("peer==1.0", "README.md", "a text", file, **others).find_fault(tmp_path)

    assert fault() is None and fault(function="Loss.forward", has=("bias",), lacks=("mask",)) is None
    assert fault("other.py") == "peer==1.0 has no file other.py"
    assert fault(function="Loss.backward") == "loss.py of peer==1.0 has no Loss.backward"
    assert fault(function="Loss.forward", lacks=("bias",)) == "Loss.forward of peer==1.0 has 'bias'"
    assert fault(has=("return y",)) == "loss.py of peer==1.0 has no 'return y'"
