"""`Remembered`: a bounded dictionary for values that are kept between calls."""

from collections.abc import Hashable

# Maximum number of entries: more than the losses and shapes of a program.
MOST = 1024


class Remembered(dict):
    """A dictionary that drops its oldest entry when it is full.

    Keys must not hold a process group or a tensor, because the dictionary would keep it alive.
    """

    def __setitem__(self, key: Hashable, value: object) -> None:
        if key not in self and len(self) >= MOST:
            del self[next(iter(self))]
        super().__setitem__(key, value)
