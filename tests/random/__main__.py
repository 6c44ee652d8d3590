"""`python -m tests.random --seed 1 --minutes 20`: random calls and trainers for as long as one likes.

Each find is printed once, shrunk, with a line that runs it again. Ends with 1 where there was one.
"""

import os

# As in tests/conftest.py.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools  # noqa: E402
import itertools  # noqa: E402
import re  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402
from enum import Enum  # noqa: E402
from typing import Annotated  # noqa: E402

import typer  # noqa: E402

from tests.random import known  # noqa: E402
from tests.random.search import SEARCHED, search  # noqa: E402

# Of one search, before the next kind has its turn.
EXAMPLES = {"losses": 100, "trainers": 5}


class Part(Enum):
    LOSSES = "losses"
    TRAINERS = "trainers"


def main(
    seed: Annotated[int, typer.Option(help="Another seed draws other examples.")] = 1,
    minutes: Annotated[float, typer.Option(help="When to stop.")] = 20.0,
    only: Annotated[Part | None, typer.Option(help="Losses or trainers alone.")] = None,
    name: Annotated[str, typer.Option(help="What to search, by a part of its name.")] = "",
    with_known: Annotated[bool, typer.Option("--known", help="Also what meets a known fault.")] = False,
) -> None:
    if with_known:
        for faults in known.KNOWN.values():
            faults.clear()
    warnings.simplefilter("ignore")
    searches = []
    if only is not Part.TRAINERS:
        from tests.random import test_losses, test_replayed

        both = test_losses.SEARCHES | test_replayed.SEARCHES
        searches += [("losses", *item) for item in both.items()]
    if only is not Part.LOSSES:
        from tests.random.test_trainers import SEARCHES

        searches += [("trainers", *item) for item in SEARCHES.items()]
    searches = [item for item in searches if name in item[1]]
    end, finds, runs, examples = time.monotonic() + 60 * minutes, set(), 0, itertools.count()
    for turn in itertools.count():
        for part, title, (cases, check) in searches:
            if time.monotonic() > end:
                print(f"seed {seed}: {runs} searches, {next(examples)} examples, {len(finds)} finds")
                raise typer.Exit(1 if finds else 0)
            runs += 1

            @functools.wraps(check)
            def counted(case, check=check):
                next(examples)
                check(case)

            try:
                search(cases, counted, SEARCHED, max_examples=EXAMPLES[part], seed=seed * 1_000_000 + turn)
            except Exception as error:  # whatever a call may end in
                for one in getattr(error, "exceptions", [error]):
                    report(title, one, finds)


def report(title: str, error: Exception, finds: set[tuple[str, str]]) -> None:
    """Prints a find, unless one like it was printed before."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    key = title, re.sub(r"[\d.e+-]+", "#", f"{place.name} {error}")[:80]
    if key in finds:
        return
    finds.add(key)
    again = [note for note in getattr(error, "__notes__", ()) if note.startswith("import ")]
    print(f"== {title}\n{type(error).__name__}: {error}", *again, sep="\n", end="\n\n", flush=True)


typer.run(main)
