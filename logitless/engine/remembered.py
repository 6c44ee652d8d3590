"""`Remembered`: a bounded dictionary for values that are kept between calls."""

from collections.abc import Hashable

# Entries of each dictionary: more than a program has losses and shapes.
MOST = 1024


class Remembered(dict):
    """A dictionary that drops its oldest entry when full. Keys must not hold a process group or a tensor,
    which the dictionary would keep alive."""

    def __setitem__(self, key: Hashable, value: object) -> None:
        if key not in self and len(self) >= MOST:
            del self[next(iter(self))]
        super().__setitem__(key, value)
