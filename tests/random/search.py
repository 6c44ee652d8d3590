"""How hypothesis is run: a fixed set of examples for `make test`, others for every seed."""

from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

SEARCHED = settings(
    database=None,
    deadline=None,
    print_blob=False,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
REPEATED = settings(SEARCHED, derandomize=True)


def search(
    cases: SearchStrategy, check: Callable, base: settings, *, max_examples: int, seed: int | None = None
) -> None:
    """Raises what `check` raises of the simplest of the cases that fail."""

    @settings(base, max_examples=max_examples)
    @hypothesis.given(case=cases)
    def found(case):
        check(case)

    (found if seed is None else hypothesis.seed(seed)(found))()
