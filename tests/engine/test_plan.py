"""`make_plan` and `chunk_rows`: every row once for each purpose, and within the budget."""

import itertools
from typing import NamedTuple

import pytest
import torch

from logitless import CrossEntropyLoss
from logitless.engine.choose import resolve_rows
from logitless.engine.passes import plan_for
from logitless.engine.plan import Facts, Pass, Plan, Step, chunk_rows, make_plan
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


def rows_where(steps: tuple[Step, ...], name: str) -> list[int]:
    return [row for step in steps if getattr(step, name) for row in range(step.start, step.stop)]


def check_coverage(case: Case, plan: Plan) -> None:
    everything, nothing = list(range(case.rows)), []
    reads, writes = everything, everything
    if case.purpose is Pass.GRADIENTS:
        reads = everything if case.rereads else nothing
    elif plan.strategy == "loss_only" or (case.purpose is Pass.STATISTICS and plan.strategy == "recompute"):
        writes = nothing
    assert rows_where(plan.steps, "read") == reads
    assert rows_where(plan.steps, "write") == writes
    idle = [step for step in plan.steps if step.stop > step.start and not (step.read or step.write)]
    assert not idle, "a chunk is projected for nothing"


def check_evaluation(case: Case, plan: Plan) -> None:
    """Groups and rows once, in order; after they were read, and before the loss's gradient is written."""
    spans = [(at, step.evaluate) for at, step in enumerate(plan.steps) if step.evaluate is not None]
    if case.purpose is not Pass.SOLVE:
        assert not spans
        return
    assert spans, "no loss without an evaluation, though there be no rows"
    groups = case.groups or ()
    assert [row for _, span in spans for row in range(span.start, span.stop)] == list(range(case.rows))
    assert [group for _, span in spans for group in range(span.first, span.last)] == list(range(len(groups)))
    for at, span in spans:
        if case.groups is not None:
            bounds = sum(groups[: span.first]), sum(groups[: span.last])
            assert bounds == (span.start, span.stop) or span.start == span.stop
        of_span = set(range(span.start, span.stop))
        assert of_span <= set(rows_where(plan.steps[: at + 1], "read"))
        if plan.strategy != "cached_grad":
            assert not of_span & set(rows_where(plan.steps[:at], "write"))


@pytest.mark.parametrize("purpose", Pass, ids=lambda purpose: purpose.name)
@pytest.mark.parametrize("groups", GROUPS)
def test_every_plan(purpose, groups):
    mine = [case for case in CASES if case.purpose is purpose and (case.groups, case.rows) == GROUPS[groups]]
    assert len(mine) == 72
    for case in mine:
        plan = case.plan()
        assert plan.strategy == expected_strategy(case), case
        check_coverage(case, plan)
        check_evaluation(case, plan)
        sizes = [step.stop - step.start for step in plan.steps if step.stop > step.start]
        assert all(size <= max(1, case.capacity) for size in sizes), case
        assert (plan.chunks, plan.token_chunk) == (len(sizes), max(sizes, default=0))
        assert plan.rows == case.rows and plan.chunk_bytes == plan.token_chunk * ROW


def test_mixed():
    plan = Case(Pass.SOLVE, (3, 12, 2, 2), 19, True, True, True, False, 5).plan()
    steps = [(step.start, step.stop, step.read, step.write, step.evaluate) for step in plan.steps]
    assert steps == [
        (0, 3, True, True, (0, 3, 0, 1)),
        (3, 8, True, False, None),
        (8, 13, True, False, None),
        (13, 15, True, False, (3, 15, 1, 2)),
        (3, 8, False, True, None),
        (8, 13, False, True, None),
        (13, 15, False, True, None),
        (15, 19, True, True, (15, 19, 2, 4)),
    ]
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
    known = {"differentiable": True, "trainable_head": True, "linear_in_logps": False}
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
        assert plan_for(made, rows, Pass.SOLVE, d_weight_in_stat_dtype=wide).chunks == (
            1 if own_sum and not frozen else 2
        )
        first, then = (
            plan_for(made, rows, purpose, d_weight_in_stat_dtype=wide)
            for purpose in (Pass.STATISTICS, Pass.GRADIENTS)
        )
        assert [step[:2] for step in first.steps] == [step[:2] for step in then.steps]


def test_a_main_gradient_is_summed_in_chunks():
    hidden = torch.zeros(1, 4000, dtype=torch.bfloat16).expand(4700, -1).requires_grad_()
    weight = torch.zeros(30, 4000, dtype=torch.bfloat16, requires_grad=True)
    operands = hidden, weight, torch.randint(30, (4700,))
    assert CrossEntropyLoss()(*operands).plan.chunks == 1
    main = torch.zeros(30, 4000)
    options = {"accumulate_into": main, "accumulate_now": True}
    assert CrossEntropyLoss()(*operands, **options).plan.chunks == 2
