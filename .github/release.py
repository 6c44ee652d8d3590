"""What a release needs to know of the repository: its version, and the notes of it.

python .github/release.py check v0.1.0    exits with 1 unless version, tag, changelog and CITATION.cff agree
python .github/release.py notes v0.1.0    prints the changelog's part
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    return re.search(r'__version__ = "(.+)"', (ROOT / "logitless" / "_version.py").read_text())[1]


def cited() -> str:
    return re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]


def notes(number: str) -> str:
    """The part of the changelog about a version; a release candidate has that of its release."""
    number = number.partition("rc")[0]
    parts = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    found = [part for part in parts if part.split()[0] == number]
    if not found:
        raise SystemExit(f"CHANGELOG.md: expected a part `## {number}`, got none; write one.")
    return found[0].partition("\n")[2].strip()


def check(tag: str) -> None:
    """Raises SystemExit unless the tag is that of the version, and changelog and citation have it too."""
    number = version()
    if tag != f"v{number}":
        raise SystemExit(f"tag: expected v{number}, the version of logitless/_version.py, got {tag}.")
    if cited() != number.partition("rc")[0]:
        raise SystemExit(f"CITATION.cff: expected version {number}, got {cited()}.")
    notes(number)


if __name__ == "__main__":
    command, tag = sys.argv[1:]
    if command == "check":
        check(tag)
    else:
        print(notes(tag.removeprefix("v")))
