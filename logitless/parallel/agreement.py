"""LOGITLESS_DEBUG=1: compare a call between the ranks of a group, before its first collective.

The ranks exchange text through the store of the default process group, with a timeout. Therefore an error
names a rank that does not make the call, whereas a collective would hang.
"""

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from logitless.errors import value_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Timeout in seconds within which every rank must make the same call.
PATIENCE = 30.0
REMEDY = "every rank must make the same calls (compared because of LOGITLESS_DEBUG=1)"
# Ranks of a group -> counter of its calls.
_CALLS: defaultdict[str, itertools.count] = defaultdict(itertools.count)


def debugging() -> bool:
    """Whether LOGITLESS_DEBUG=1 is set."""
    return os.environ.get("LOGITLESS_DEBUG") == "1"


def gather_facts(name: str, group: "ProcessGroup", facts: Mapping[str, object]) -> dict[int, dict]:
    """Exchange facts about this call in a group, by rank.

    Raises ValueError if a rank does not make the call.
    """
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group)
    place = f"logitless/{','.join(map(str, members))}"
    number = next(_CALLS[place])
    rank = dist.get_rank()
    store.set(f"{place}/{number}/{rank}", json.dumps(facts))
    reports = {}
    for member in members:
        key = f"{place}/{number}/{member}"
        try:
            store.wait([key], timedelta(seconds=PATIENCE))
        except RuntimeError:
            expected = f"call number {number + 1} from all ranks {members} of {name}"
            got = f"none from rank {member} within {PATIENCE:.0f} s"
            raise value_error(name, expected, got, REMEDY) from None
        reports[member] = json.loads(store.get(key))
    if number > 1:  # every rank that made call n - 1 has read the facts of call n - 2
        store.delete_key(f"{place}/{number - 2}/{rank}")
    return reports


def expect_alike(name: str, reports: Mapping[int, Mapping[str, object]]) -> None:
    """Raise ValueError unless the facts of all ranks are equal."""
    first = next(iter(reports.values()))
    for fact in dict.fromkeys(itertools.chain(*reports.values())):
        values = {rank: facts.get(fact) for rank, facts in reports.items()}
        alike = all(value == first.get(fact) for value in values.values())
        if not alike:
            got = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
            raise value_error(fact, f"the same on all ranks of {name}", got, REMEDY)


def expect_different(name: str, fact: str, parts: Mapping[int, object], remedy: str) -> None:
    """Raise ValueError if two ranks have the same part of a tensor. A part of None is not compared."""
    rank_of_part: dict = {}
    for rank, part in parts.items():
        got = f"the same numbers on ranks {rank_of_part.get(str(part))} and {rank}"
        fresh = part is None or str(part) not in rank_of_part
        if not fresh:
            raise value_error(fact, f"another part on every rank of {name}", got, remedy)
        rank_of_part[str(part)] = rank
