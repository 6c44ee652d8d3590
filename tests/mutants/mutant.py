"""One small way to break the library."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below logitless/
    old: str  # occurs exactly once
    new: str
    tests: str  # arguments of pytest

    @property
    def path(self) -> str:
        return f"logitless/{self.file}"

    @property
    def interpreted(self) -> bool:
        return "triton" in self.file and not torch.cuda.is_available()

    def applied(self, text: str) -> str:
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"mutant {self.name!r}: `old` occurs {count} times in {self.path}, expected once; bring it up to date.")
        return text.replace(self.old, self.new)
