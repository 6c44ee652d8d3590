"""What is kept between calls, and may be forgotten: the last entries of a dictionary."""

from collections.abc import Hashable

# Entries of each: more than the losses and shapes of a program.
MOST = 1024


class Remembered(dict):
    """A dictionary of the last entries that were set. Keys must hold no process group and no tensor, which
    would live as long."""

    def __setitem__(self, key: Hashable, value: object) -> None:
        if key not in self and len(self) >= MOST:
            del self[next(iter(self))]
        super().__setitem__(key, value)
