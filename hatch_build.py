"""README.md as a package index shows it: its links and pictures lead to the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or picture whose target is no address, nor a place on the page.
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def absolute(text: str, repository: str) -> str:
    def replaced(found: re.Match) -> str:
        picture, words, target = found.groups()
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{target})"

    return LINK.sub(replaced, text)


class Readme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
