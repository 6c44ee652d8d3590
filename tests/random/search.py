"""How hypothesis is run: a fixed set of examples for `make test`, others for every seed."""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

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
    cases: SearchStrategy, check: Callable, how: settings, *, max_examples: int, seed: int | None = None
) -> None:
    """Raises what `check` raises of the simplest case that fails, with a line that runs it again."""

    @settings(how, max_examples=max_examples)
    @hypothesis.given(case=cases)
    def found(case):
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # trainers print much
                check(case)
        except Exception as error:
            error.add_note(f"import torch; from {check.__module__} import *; check({case!r})")
            raise

    (found if seed is None else hypothesis.seed(seed)(found))()
