"""`compact_rows` against plain Python lists: which tokens are walked, and in which order."""

from typing import NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode

from logitless.engine.rows import Grouping, compact_rows
from logitless.engine.spec import Fault

CPU = torch.device("cpu")


class Case(NamedTuple):
    lengths: list[int]  # tokens of each sequence, in call order
    ignored: list[int]  # positions of unsupervised tokens

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def supervised(self) -> list[bool]:
        return [position not in self.ignored for position in range(self.tokens)]

    @property
    def boundaries(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]


PADDED = {
    "all supervised": Case([3] * 6, []),
    "some ignored": Case([3] * 6, [0, 4, 5, 9, 11, 17]),
    "a sequence without tokens": Case([3] * 6, [6, 7, 8, 1]),
    "a pair without tokens": Case([3] * 6, [0, 1, 2, 9, 10, 11, 16]),
    "nothing supervised": Case([2] * 6, list(range(12))),
    "sequences of no length": Case([0] * 6, []),
    "sequences of one token": Case([1] * 6, [2]),
}
PACKED = PADDED | {
    "ragged": Case([4, 1, 2, 3, 5, 2], [0, 5, 9, 10, 16]),
    "ragged, all supervised": Case([4, 1, 2, 3, 5, 2], []),
    "empty sequences": Case([0, 4, 0, 3, 2, 0], [1, 4, 8]),
    "all but one empty": Case([0, 0, 0, 5, 0, 0], [2]),
}
ROLES = {"single": 1, "pairs": 2, "triples": 3, "everything": 6}
# Where every row of packed sequences is walked, lengths stay on the device: one group of all.
GROUPED = {
    f"{form}, {name}, {group}, {'compact' if compact else 'every row'}": (form, name, roles, compact)
    for form, cases in (("padded", PADDED), ("packed", PACKED))
    for name in cases
    for group, roles in ROLES.items()
    for compact in (True, False)
    if form == "padded" or compact or roles == 6
}

groups_of_sequences = pytest.mark.parametrize(
    ("form", "name", "roles", "compact"), GROUPED.values(), ids=GROUPED
)
both = pytest.mark.parametrize("compact", [True, False], ids=["compact", "every row"])


def in_row_order(case: Case, roles: int) -> list[list[int]]:
    """Positions in the call of each sequence's tokens: group by group, and in a group role by role."""
    bounds, groups = case.boundaries, len(case.lengths) // roles
    order = [role * groups + group for group in range(groups) for role in range(roles)]
    return [list(range(bounds[sequence], bounds[sequence + 1])) for sequence in order]


def select(case: Case, grouping: Grouping, form: str, compact: bool, faults: tuple = ()):
    supervised = torch.tensor(case.supervised, dtype=torch.bool)
    cu_seqlens = torch.tensor(case.boundaries) if form == "packed" else None
    marks = torch.stack((supervised, *(fault.count for fault in faults if fault.count.dim())))
    return compact_rows(marks, faults, grouping, cu_seqlens, compact=compact)


def positions(rows, case: Case, start: int = 0, stop: int | None = None) -> list[int]:
    """Where rows are in the call, through the slice or the index that the loop would use."""
    return torch.arange(case.tokens)[rows.at(start, rows.count if stop is None else stop)].tolist()


@groups_of_sequences
def test_sequences_of_groups(form, name, roles, compact):
    """Grouped: what the host knows, and where everything lies."""
    case = (PADDED if form == "padded" else PACKED)[name]
    rows = select(case, Grouping(6, roles, grouped=True), form, compact)
    sequences = in_row_order(case, roles)
    if compact:
        sequences = [[p for p in sequence if case.supervised[p]] for sequence in sequences]
    flat = [p for sequence in sequences for p in sequence]
    sizes = [len(sequence) for sequence in sequences]
    assert rows.count == len(flat)
    assert positions(rows, case) == flat
    segments = rows.segments(rows.count, 0, len(rows.group_sizes), CPU)
    assert segments.lengths.tolist() == sizes
    assert list(rows.group_sizes) == [sum(sizes[i : i + roles]) for i in range(0, 6, roles)]
    assert int(rows.tokens) == sum(case.supervised)
    half = case.boundaries[3]
    assert int(rows.chosen_tokens) == sum(case.supervised[:half])
    if compact:
        assert type(rows.count) is int and type(rows.tokens) is int and type(rows.chosen_tokens) is int
        assert all(type(size) is int for size in rows.group_sizes)
    # Any run of rows, as a chunk cuts them.
    for start, stop in ((0, 0), (0, rows.count // 2), (rows.count // 2, rows.count)):
        assert positions(rows, case, start, stop) == flat[start:stop]


@groups_of_sequences
def test_sequences_of_a_slice_of_groups(form, name, roles, compact):
    """The numbers in the call, and the lengths, of the sequences of groups first:last."""
    case = (PADDED if form == "padded" else PACKED)[name]
    rows = select(case, Grouping(6, roles, grouped=True), form, compact)
    groups, bounds = 6 // roles, case.boundaries
    for first in range(groups):
        for last in range(first + 1, groups + 1):
            numbers = [role * groups + group for role in range(roles) for group in range(first, last)]
            assert torch.arange(6)[rows.sequences(first, last, CPU)].tolist() == numbers
            count = sum(rows.group_sizes[first:last])
            segments = rows.segments(count, first, last, CPU)
            members = [range(bounds[i], bounds[i + 1]) for i in numbers]
            expected = [sum(case.supervised[p] or not compact for p in member) for member in members]
            assert segments.to_sequence_order(segments.lengths).tolist() == expected
            assert (segments.rows, segments.groups, segments.roles) == (count, last - first, roles)


@both
@pytest.mark.parametrize("ignored", [[], [0, 3], [1, 2, 4], list(range(5))], ids=str)
def test_tokens_that_stand_alone(ignored, compact):
    case = Case([5], ignored)
    rows = select(case, Grouping(), "padded", compact)
    flat = [p for p in range(5) if case.supervised[p] or not compact]
    assert rows.count == len(flat) and positions(rows, case) == flat
    assert int(rows.tokens) == 5 - len(ignored) and int(rows.chosen_tokens) == 0
    assert rows.group_sizes is None and rows.sequence_sizes is None
    assert rows.segments(rows.count, 0, 0, CPU) is None
    # Nothing is gathered where every row is walked in place.
    assert (rows.index is None) == (rows.count == 5)


@both
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_no_sequences(form, compact):
    for grouping in (Grouping(0, 1, grouped=True), Grouping()):
        rows = select(Case([], []), grouping, form, compact)
        assert rows.count == 0 and int(rows.tokens) == 0 and not sum(rows.group_sizes or ())


def test_scattered_is_in_call_order():
    case = Case([4, 1, 2, 3], [0, 5])
    rows = select(case, Grouping(4, 2, grouped=True), "packed", compact=True)
    walked = positions(rows, case)
    values = torch.arange(1.0, rows.count + 1)
    expected = [0.0] * 10
    for value, position in zip(values.tolist(), walked, strict=True):
        expected[position] = value
    assert rows.scattered(values, 10).tolist() == expected
    columns = rows.scattered(torch.stack((values, -values), 1), 10)
    assert columns[:, 0].tolist() == expected and columns[:, 1].tolist() == [-x for x in expected]


# -- faults


def fault(count: int, argument: str = "targets") -> Fault:
    return Fault(torch.tensor(count), argument, "ids below 7", "{count} others", "mask them")


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("grouping", [Grouping(), Grouping(4, 1, True), Grouping(4, 2, True)], ids=str)
def test_a_fault_that_marks_tokens(grouping, form):
    """Counted for each sequence or for the call, beside one that is a number."""
    case, marked = Case([2] * 4, [1, 6]), torch.tensor([0, 0, 0, 1, 1, 0, 0, 1]).bool()
    marks, plain = fault(0)._replace(count=marked), fault(0, "weights")
    with pytest.raises(ValueError, match=r"^targets: expected ids below 7, got 3 others; mask them\.$"):
        select(case, grouping, form, True, (marks, plain))
    right = marks._replace(count=marked & False)
    for faults in ((right, fault(2, "weights")), (fault(0), fault(2, "weights"), fault(3, "second"))):
        with pytest.raises(ValueError, match=r"^weights: expected ids below 7, got 2 others; mask them\.$"):
            select(case, grouping, form, True, faults)
    rows = select(case, grouping, form, True, (right, plain))
    expected = select(case, grouping, form, True)
    assert rows.count == expected.count == 6 and rows.group_sizes == expected.group_sizes
    assert (rows.tokens, rows.chosen_tokens) == (expected.tokens, expected.chosen_tokens)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a device-side assertion ends the process's use of the GPU"
)
def test_a_fault_is_asserted_on_the_device_where_nothing_is_read():
    with pytest.raises(RuntimeError, match="targets: expected ids below 7, got others; mask them"):
        select(Case([2, 2], []), Grouping(), "padded", False, (fault(2),))


@pytest.mark.parametrize(
    "bounds", [[0, 3, 4, 6], [1, 3, 4, 7], [0, 4, 3, 7], [0, 3, 4, 9], [-1, 3, 4, 7]], ids=str
)
@pytest.mark.parametrize("roles", [1, 3])
def test_boundaries_that_do_not_cover_the_tokens(bounds, roles):
    supervised = torch.ones(7, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"^cu_seqlens: expected non-decreasing boundaries from 0 to 7, got .*; .*\.$"
    ):
        compact_rows(supervised[None], (), Grouping(3, roles, True), torch.tensor(bounds), compact=True)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a device-side assertion ends the process's use of the GPU"
)
def test_boundaries_are_asserted_on_the_device_where_nothing_is_read():
    with pytest.raises(RuntimeError, match="cu_seqlens: expected non-decreasing boundaries"):
        supervised, bounds = torch.ones(7, dtype=torch.bool), torch.tensor([0, 3, 6])
        compact_rows(supervised[None], (), Grouping(2, 2, True), bounds, compact=False)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_nothing_is_read_back_where_every_row_is_walked(form):
    """Fake tensors have no numbers to read."""
    with FakeTensorMode():
        supervised, faults = (
            torch.ones(12, dtype=torch.bool),
            (Fault(torch.zeros(()).long(), "a", "b", "c", "d"),),
        )
        cu_seqlens = torch.arange(5) * 3 if form == "packed" else None
        roles = 4 if form == "packed" else 2
        rows = compact_rows(
            supervised[None],
            faults,
            Grouping(4, roles, True),
            cu_seqlens,
            compact=False,
        )
        segments = rows.segments(12, 0, 4 // roles, supervised.device)
        assert rows.count == 12 and segments.lengths.shape == (4,)
        with pytest.raises(Exception, match="(?i)data.dependent|cannot be called|aten._local_scalar_dense"):
            compact_rows(supervised[None], (), Grouping(4, roles, True), cu_seqlens, compact=True)
