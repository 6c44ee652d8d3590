"""Faults that are known and not fixed yet: calls that are left out, so that the rest is tested.

`python -m tests.random --known` takes them in, and finds them.
"""

from collections.abc import Callable
from typing import Any

from tests.random.calls import Call

# By the name of the fault: which calls, or which trainers' options, meet it. Remove an entry with its fault.
LOSSES: dict[str, Callable[[Call], bool]] = {}

TRAINERS: dict[str, Callable[[Any], bool]] = {}
KNOWN = {"losses": LOSSES, "trainers": TRAINERS}


def unknown(case: Any) -> bool:
    """Whether a case of either kind meets no known fault."""
    known = KNOWN["losses" if isinstance(case, Call) else "trainers"]
    return not any(meets(case) for meets in known.values())
