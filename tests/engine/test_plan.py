"""`make_plan` and `chunk_rows`: every row once for each purpose, and within the budget."""

import itertools
from typing import NamedTuple

import pytest
import torch

from logitless import CrossEntropyLoss
from logitless.engine.budget import plan_for
from logitless.engine.choose import resolve_rows
from logitless.engine.plan import Facts, Pass, Plan, Write, chunk_rows, make_plan
from tests.engine.calls import call

ROW = 10  # bytes


class Case(NamedTuple):
    purpose: Pass
    groups: tuple[int, ...] | None
    rows: int
    differentiable: bool
    trainable_head: bool
    linear: bool
    rereads: bool
    capacity: int  # rows within the budget; 0: not even one

    def plan(self) -> Plan:
        facts = Facts(
            self.rows, self.groups, self.differentiable, self.trainable_head, self.linear, self.rereads
        )
        return make_plan(self.purpose, facts, row_bytes=ROW, budget=max(1, self.capacity * ROW + ROW // 2))


GROUPS = {
    "tokens": (None, 23),
    "no tokens": (None, 0),
    "no groups": ((), 0),
    "one group": ((23,), 23),
    "even groups": ((4,) * 6, 24),
    "ragged groups": ((3, 1, 12, 2, 5, 9, 1), 33),
    "empty groups": ((0, 3, 0, 0, 12, 0, 2, 0), 17),
    "groups without tokens": ((0, 0, 0), 0),
}
# Every combination; what trains a head needs something to differentiate.
CASES = [
    Case(purpose, groups, rows, differentiable, head, linear, rereads, capacity)
    for purpose, (groups, rows) in itertools.product(Pass, GROUPS.values())
    for differentiable, head, linear, rereads in itertools.product((True, False), repeat=4)
    for capacity in (0, 1, 3, 5, 11, 1000)
    if differentiable or not head
]


def expected_strategy(case: Case) -> str:
    """The table at the top of the module."""
    if case.purpose is not Pass.GRADIENTS and not case.differentiable:
        return "loss_only"
    frozen_linear = case.linear and not case.trainable_head
    if case.purpose is Pass.SOLVE:
        if case.groups is None:
            return "fused"
        if frozen_linear:
            return "cached_grad"
        capacity = max(1, case.capacity)
        kinds = {"recompute" if size > capacity else "resident" for size in case.groups if size} or {
            "resident"
        }
        return kinds.pop() if len(kinds) == 1 else "mixed"
    return "cached_grad" if case.purpose is Pass.STATISTICS and frozen_linear else "recompute"


def check_coverage(case: Case, plan: Plan) -> None:
    """The chunks of the spans contain every row once; what the pass does with them is what it is for."""
    chunked = [row for span in plan.spans for chunk in span.chunks for row in range(chunk.start, chunk.stop)]
    assert chunked == list(range(case.rows))
    for span in plan.spans:
        assert sum(chunk.count for chunk in span.chunks) == span.stop - span.start
        assert all(chunk.count for chunk in span.chunks)
    frozen = plan.strategy == "cached_grad"
    if case.purpose is Pass.GRADIENTS:
        assert (plan.reads, plan.writes, plan.evaluates) == (case.rereads, Write.BEFORE_LOSS, False)
    elif case.purpose is Pass.STATISTICS:
        writes = Write.BEFORE_LOSS if frozen else Write.NEVER
        assert (plan.reads, plan.writes, plan.evaluates) == (True, writes, False)
    elif plan.strategy == "loss_only":
        assert (plan.reads, plan.writes, plan.evaluates) == (True, Write.NEVER, True)
    else:
        writes = Write.BEFORE_LOSS if frozen else Write.AFTER_LOSS
        assert (plan.reads, plan.writes, plan.evaluates) == (True, writes, True)


def check_spans(case: Case, plan: Plan) -> None:
    """The spans contain the groups and the rows once, in order."""
    assert plan.spans, "without rows the loss is evaluated as well"
    groups = case.groups or ()
    assert [row for span in plan.spans for row in range(span.start, span.stop)] == list(range(case.rows))
    assert [x for span in plan.spans for x in range(span.first, span.last)] == list(range(len(groups)))
    for span in plan.spans if case.groups is not None else ():
        bounds = sum(groups[: span.first]), sum(groups[: span.last])
        assert bounds == (span.start, span.stop) or span.start == span.stop
    for span in plan.spans if plan.writes is Write.AFTER_LOSS else ():
        over_budget = span.stop - span.start > max(1, case.capacity)
        assert plan.recomputes(span) == (len(span.chunks) > 1) == over_budget


@pytest.mark.parametrize("purpose", Pass, ids=lambda purpose: purpose.name)
@pytest.mark.parametrize("groups", GROUPS)
def test_every_plan(purpose, groups):
    mine = [case for case in CASES if case.purpose is purpose and (case.groups, case.rows) == GROUPS[groups]]
    assert len(mine) == 72
    for case in mine:
        plan = case.plan()
        assert plan.strategy == expected_strategy(case), case
        check_coverage(case, plan)
        check_spans(case, plan)
        sizes = [chunk.count for span in plan.spans for chunk in span.chunks]
        twice = [chunk for span in plan.spans if plan.recomputes(span) for chunk in span.chunks]
        assert all(size <= max(1, case.capacity) for size in sizes), case
        assert (plan.chunks, plan.token_chunk) == (len(sizes) + len(twice), max(sizes, default=0))
        assert plan.rows == case.rows and plan.chunk_bytes == plan.token_chunk * ROW


def test_mixed():
    plan = Case(Pass.SOLVE, (3, 12, 2, 2), 19, True, True, True, False, 5).plan()
    assert [(*span[:4], [chunk[:2] for chunk in span.chunks]) for span in plan.spans] == [
        (0, 3, 0, 1, [(0, 3)]),
        (3, 15, 1, 2, [(3, 8), (8, 13), (13, 15)]),
        (15, 19, 2, 4, [(15, 19)]),
    ]
    assert [plan.recomputes(span) for span in plan.spans] == [False, True, False]
    assert plan.projected == (19, 12) and plan.chunks == 8
    assert plan.strategy == "mixed" and set(plan.parts) == {"resident", "recompute"}
    text = plan.describe()
    assert "mixed" in text and "resident" in text and "recompute" in text and "19 projected tokens" in text


def test_one_of_a_kind_is_singular():
    one, three = (
        Case(Pass.SOLVE, None, rows, True, True, True, False, 1).plan().describe() for rows in (1, 3)
    )
    assert "1 projected token in 1 chunk of 1, " in one
    assert "3 projected tokens in 3 chunks of up to 1, " in three


# -- rows of a chunk


@pytest.mark.parametrize(
    ("rows", "capacity", "expected"),
    [
        # All of them, where they fit below a good size.
        (0, 100, 1),
        (1, 100, 1),
        (100, 10_000, 100),
        # The largest good size that fits.
        (8 * 12_288, 4096, 4096),
        (8 * 12_288, 1_000_000, 4096),
        (8 * 12_288, 4095, 2048),
        # What fits, evened out.
        (100_000, 511, 511),
        (1000, 511, 500),
        (512, 511, 256),
        (10, 9, 5),
        (7, 2, 2),
        (7, 0, 1),  # not even a row
        # A few rows more in every chunk, in whole tiles, where the last one would be small.
        (4 * 4096 + 64, 100_000, 4224),
        (4 * 4096 + 512, 100_000, 4224),
        (4096 + 100, 4608, 4224),
        (4096 + 512, 4608, 4608),
        (4096 + 513, 5000, 4096),  # more than an eighth
        (4 * 4096 + 64, 4200, 4096),  # beyond the budget
        (2 * 512 + 10, 600, 512),  # 517 rows are 640 in whole tiles: too many more
    ],
)
def test_chunk_rows(rows, capacity, expected):
    assert chunk_rows(rows, 7, capacity * 7 + 3) == expected


@pytest.mark.parametrize(
    ("rows", "sum_rows", "chunks"), [(10_000, 5904, 1), (10_000, 5903, 3), (10_001, 9000, 3)]
)
def test_one_chunk_in_the_place_of_a_sum(rows, sum_rows, chunks):
    """Where the budget holds all rows, and the sum of d_weight would take as much memory."""
    known = {"differentiable": True, "trainable_head": True, "allows_cached_grad": False}
    facts = Facts(rows, None, **known, spared_bytes=sum_rows * ROW)
    for purpose in (Pass.SOLVE, Pass.GRADIENTS):
        assert make_plan(purpose, facts, row_bytes=ROW, budget=10_000 * ROW).chunks == chunks
    # Of pairs too, which are seen together.
    pairs = facts._replace(groups=(rows // 2, rows - rows // 2))
    assert make_plan(Pass.SOLVE, pairs, row_bytes=ROW, budget=10_000 * ROW).chunks == min(chunks, 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_sums_d_weight(frozen):
    """Several chunks, in a dtype of its own that one does without."""
    hidden = torch.zeros(1, 4000).expand(4700, -1).requires_grad_()
    weight, targets = torch.zeros(30, 4000, requires_grad=not frozen), torch.randint(30, (4700,))
    for dtype, accum_dtype, wide in itertools.product(
        (torch.bfloat16, torch.float32), (None, torch.float32), (False, True)
    ):
        h, w = hidden.to(dtype), weight.detach().to(dtype).requires_grad_(not frozen)
        made, rows = resolve_rows(call(CrossEntropyLoss(accum_dtype=accum_dtype), h, w, targets))
        own_sum = dtype == torch.bfloat16 and accum_dtype is None and not wide
        assert plan_for(made, rows, Pass.SOLVE, wide_d_weight=wide).chunks == (
            1 if own_sum and not frozen else 2
        )
        first, then = (
            plan_for(made, rows, purpose, wide_d_weight=wide) for purpose in (Pass.STATISTICS, Pass.GRADIENTS)
        )
        assert [span.chunks for span in first.spans] == [span.chunks for span in then.spans]


def test_a_main_gradient_is_summed_in_chunks():
    hidden = torch.zeros(1, 4000, dtype=torch.bfloat16).expand(4700, -1).requires_grad_()
    weight = torch.zeros(30, 4000, dtype=torch.bfloat16, requires_grad=True)
    operands = hidden, weight, torch.randint(30, (4700,))
    assert CrossEntropyLoss()(*operands).plan.chunks == 1
    plan = CrossEntropyLoss()(*operands, accumulate_into=torch.zeros(30, 4000)).plan
    assert (plan.chunks, plan.in_backward.chunks) == (2, 2)
