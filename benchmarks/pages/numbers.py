"""The measured numbers in the sentences of README.md and docs, with their sources.

A number counts as measured if it has a unit and stands in prose or in a table that is written by hand. Each
must be covered by a claim of `benchmarks/pages/claims.py`: the sentence with `{}` in the place of its
numbers, and a source for each. Code, and tables that commands write between `<!-- KIND:NAME -->` markers, are
left out.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from benchmarks.harness.report import RESULTS

ROOT = RESULTS.parents[1]
LEFT_OUT = re.compile(
    r"^```.*?^```$"  # code blocks
    r"|<!-- (?P<mark>\w+(?::[\w-]+)?) -->.*?<!-- /(?P=mark) -->"  # tables that commands write
    r"|`(?:[^`\n]|\n(?!\n))+`"  # code in a sentence
    r"|(?<=\])\([^)\s]+\)"  # addresses of links
    r"|^\[[^\]]+\]: \S+$",
    re.MULTILINE | re.DOTALL,
)
UNIT = r"(?:GiB|MiB|KiB|GB|MB|ms|us|microseconds|seconds|minutes|times|tokens/s|%|x(?! \d))(?!\w)"
# The first number of a range (1 to 3%) has the unit of the second.
NUMBER = re.compile(rf"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)(?=(?:(?: to |-| and | or )\d[\d,.]*)?\s?{UNIT})")
PRINTED = r"(\d[\d,]*(?:\.\d+)?)"


class Source(Protocol):
    """Where a number comes from: `value()` is the number, `str()` of the source says where it stands."""

    def value(self) -> float: ...


@cache
def document(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


@dataclass(frozen=True)
class Result:
    """A number of a result file: keys and positions from its top; a name picks the row of that name."""

    file: str
    keys: tuple[str | int, ...]
    unit: float = 1.0

    def value(self) -> float:
        found = document(self.file)
        for key in self.keys:
            if isinstance(found, list) and isinstance(key, str):
                (found,) = [row for row in found if row["name"] == key]
            else:
                found = found[key]
        return found / self.unit

    def __str__(self) -> str:
        return f"benchmarks/results/{self.file}: {' / '.join(map(str, self.keys))}"


@dataclass(frozen=True)
class Derived:
    """A number computed from others; `formula` says how."""

    formula: str
    compute: Callable[..., float]
    sources: tuple[Source, ...] = ()

    def value(self) -> float:
        return self.compute(*(source.value() for source in self.sources))

    def __str__(self) -> str:
        return "; ".join([self.formula, *map(str, self.sources)])


@dataclass(frozen=True)
class Claim:
    """A piece of a page with `{}` in the place of its numbers, and their sources in that order."""

    page: str
    text: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Found:
    """A number of a page, where it stands, and its source; None where no claim covers it."""

    page: str
    line: int
    printed: str
    sentence: str
    source: Source | None

    @property
    def fault(self) -> str | None:
        """What is wrong with the number; None if its source bears it out, rounded as it is printed."""
        if self.source is None:
            return "no claim in benchmarks/pages/claims.py covers it"
        decimals = len(self.printed.partition(".")[2])
        value = self.source.value()
        if abs(value - float(self.printed.replace(",", ""))) > 0.5000001 * 10**-decimals:
            return f"expected {value:,.{decimals}f} ({self.source})"
        return None


def pages(root: Path = ROOT) -> dict[str, str]:
    """The text of each page, with what is left out blanked, so that places stay."""
    paths = (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    return {
        str(path.relative_to(root)): LEFT_OUT.sub(
            lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text()
        )
        for path in paths
    }


def numbers(claims: tuple[Claim, ...], texts: dict[str, str]) -> Iterator[Found]:
    """Every measured number of the pages, in their order."""
    for page, text in texts.items():
        covered: dict[int, Source] = {}
        for claim in claims:
            if claim.page == page:
                covered |= places(claim, text)
        found = {match.start(): match[0] for match in NUMBER.finditer(text)}
        found |= {start: re.match(PRINTED, text[start:])[0] for start in covered}
        for start, printed in sorted(found.items()):
            line = text.count("\n", 0, start) + 1
            sentence = " ".join(text[max(0, start - 60) : start + 40].split())
            yield Found(page, line, printed, sentence, covered.get(start))


def places(claim: Claim, text: str) -> dict[int, Source]:
    """Where the numbers of a claim stand in its page.

    Raises:
        ValueError: the page has no such sentence, or the claim has too few or too many sources.
    """
    pattern = PRINTED.join(re.escape(part) for part in claim.text.split("{}"))
    pattern = re.sub(r"(?:\\ |\s)+", r"\\s+", pattern)
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(
            f"{claim.page}: expected the sentence {claim.text!r} of benchmarks/pages/claims.py, got none."
        )
    if len(found.groups()) != len(claim.sources):
        raise ValueError(
            f"{claim.text!r}: expected a source for each number, got {len(claim.sources)} for "
            f"{len(found.groups())}."
        )
    return {found.start(number): source for number, source in enumerate(claim.sources, 1)}
