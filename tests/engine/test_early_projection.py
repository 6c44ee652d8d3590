"""A pass over every row of a call, before the host knows that every row counts, changes no number, and costs
no second one where the guess is right."""

import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    Term,
    TokenLoss,
    linear_cross_entropy,
    linear_logprobs,
    linear_topk,
)
from logitless.engine import base, early_projection, remembered, static_rows
from logitless.engine.choose import resolve_rows
from logitless.engine.early_projection import LIKELY, PATIENCE
from logitless.engine.projection import Projection
from logitless.engine.readers.gathered import GatheredProjection
from logitless.losses.logprobs import TokenStatistics
from tests.engine.calls import call
from tests.support import DEVICE

# A LogitsLoss has the same numbers uncompiled.
pytestmark = pytest.mark.usefixtures("uncompiled")

N, H, V, K = 60, 8, 30, 3


@pytest.fixture(autouse=True)
def guessing(monkeypatch):
    """As on a GPU, and with nothing learned from other tests."""
    monkeypatch.setattr(early_projection, "_runs_on_gpu", lambda x: x.shape[0] > 0)
    monkeypatch.setattr(early_projection, "_STREAKS", remembered.Remembered())
    monkeypatch.setattr(static_rows, "SIZE", 0)


@pytest.fixture
def begun(monkeypatch):
    """One entry for each pass that was begun early: its rows."""
    begun, assume = [], early_projection.with_clamped_targets

    def spy(call, rows):
        begun.append(rows)
        return assume(call, rows)

    monkeypatch.setattr(early_projection, "with_clamped_targets", spy)
    return begun


class Operands:
    def __init__(self, seed=0):
        made = torch.Generator(DEVICE).manual_seed(seed)
        self.hidden = torch.randn(N, H, generator=made).requires_grad_()
        self.weight = torch.randn(V, H, generator=made).requires_grad_()
        self.targets = torch.randint(V, (N,), generator=made)
        self.ids = torch.randint(V, (N, K), generator=made)
        self.values = torch.randn(N, K, generator=made).log_softmax(1)
        self.teacher = torch.randn(N, H, generator=made), torch.randn(V, H, generator=made)

    def gradients(self):
        actual = [x.grad for x in (self.hidden, self.weight)]
        self.hidden.grad = self.weight.grad = None
        return [x for x in actual if x is not None]


# Several chunks, also on a GPU, whose kernels need no temporaries beside the logits.
BUDGET = 8 * V * 4 * 3


def of_targets(x, targets):
    return linear_cross_entropy(x.hidden, x.weight, targets, logits_budget=BUDGET)


def of_lse(x, targets):
    return linear_cross_entropy(x.hidden, x.weight, targets, z_loss=0.1, logits_budget=BUDGET)


def of_a_frozen_head(x, targets):
    return linear_logprobs(x.hidden, x.weight.detach(), targets, logits_budget=BUDGET).logps


def of_one_id(x, targets):
    return linear_logprobs(x.hidden, x.weight, targets, logits_budget=BUDGET).logps


def of_the_best(x, targets):
    return linear_topk(x.hidden, x.weight, K, mask=targets >= 0, logits_budget=4 * BUDGET).logps


def of_logits(x, targets):
    hidden, weight = x.teacher
    loss = DistillationLoss(divergence="jsd", logits_budget=3 * BUDGET)
    return loss(x.hidden, x.weight, targets, teacher_hidden=hidden, teacher_weight=weight).loss


def of_several_ids(x, targets):
    ids = torch.where(targets[:, None] < 0, -100, x.ids)
    actual = linear_logprobs(x.hidden, x.weight, ids, logits_budget=4 * BUDGET).logps
    return torch.where(actual > -torch.inf, actual, 0.0)


def of_pairs(x, targets):
    options = {"ref_logps": torch.linspace(-9.0, -3.0, 4), "num_items": 2.0}
    loss = DPOLoss(logits_budget=BUDGET)
    return loss(x.hidden.view(4, N // 4, H), x.weight, targets.view(4, N // 4), **options).loss


def of_sequences(x, targets):
    given = {"advantages": torch.linspace(-1.0, 1.0, 4), "old_logps": torch.full((4, N // 4), -3.0)}
    loss = GRPOLoss(importance_sampling_level="sequence", logits_budget=BUDGET)
    return loss(x.hidden.view(4, N // 4, H), x.weight, targets.view(4, N // 4), **given).loss


def of_gathered_columns(x, targets):
    options = {"divergence": "forward_kl", "support": "teacher", "topk_mode": "renormalize"}
    loss = DistillationLoss(**options, logits_budget=4096)
    known = {"mask": targets >= 0, "teacher_logprobs_topk": (x.values, x.ids)}
    return loss(x.hidden, x.weight, **known).loss


CALLS = (of_targets, of_lse, of_a_frozen_head, of_one_id, of_the_best, of_logits, of_pairs, of_sequences)


def results(run, x, targets):
    """The value, and the gradients of its sum of squares."""
    value = run(x, targets)
    if value.requires_grad:
        value.square().sum().backward()
    return [value.detach(), *x.gradients()]


@pytest.mark.each_value
@pytest.mark.parametrize("run", CALLS)
@pytest.mark.parametrize("ignores", [False, True], ids=["every row", "the same rows"])
def test_a_right_guess_changes_no_number_and_costs_no_product(run, ignores, begun, monkeypatch):
    rows = []
    for owner in (Projection, GatheredProjection):
        project = owner.project

        def spy(self, chunk, project=project):
            rows.append(len(chunk.logits))
            project(self, chunk)

        monkeypatch.setattr(owner, "project", spy)
    x = Operands()
    targets = torch.where(torch.arange(N) % 5 == 4, -100, x.targets) if ignores else x.targets
    expected = results(run, x, targets)
    walked = list(rows)
    assert len(walked) > 1
    for _ in range(LIKELY - 1):
        results(run, x, targets)
    assert not begun
    for time in (1, 2):
        rows.clear()
        actual = results(run, x, targets)
        assert len(begun) == time and rows == walked
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("run", CALLS)
def test_no_number_depends_on_a_wrong_guess(run, begun):
    x = Operands()
    some = torch.where(torch.arange(N) % 3 == 0, -100, x.targets)
    expected = results(run, x, some)
    for _ in range(LIKELY):
        results(run, x, x.targets)
    for _ in range(2):  # and the second time nobody guesses
        actual = results(run, x, some)
        assert len(begun) == 1
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_wrong_guess_makes_the_next_one_later(begun):
    x = Operands()
    some = torch.where(torch.arange(N) % 3 == 0, -100, x.targets)
    for _ in range(LIKELY):
        of_targets(x, x.targets)
    of_targets(x, some)
    assert len(begun) == 1
    for _ in range(PATIENCE * LIKELY):
        of_targets(x, x.targets)
    assert len(begun) == 1
    of_targets(x, x.targets)
    assert len(begun) == 2


def test_other_rows_of_the_same_number(begun):
    x = Operands()
    first, second = (torch.where(torch.arange(N) % 3 == i, -100, x.targets) for i in (0, 1))
    expected = [results(of_targets, x, targets) for targets in (first, second)]
    early_projection._STREAKS.clear()
    for _ in range(3 * LIKELY):  # never the same rows twice in a row
        for targets, numbers in zip((first, second), expected, strict=True):
            actual = results(of_targets, x, targets)
            assert all(torch.equal(a, b) for a, b in zip(actual, numbers, strict=True))
    assert not begun
    for _ in range(LIKELY + 1):
        results(of_targets, x, first)
    assert len(begun) == 1
    actual = results(of_targets, x, second)
    assert len(begun) == 2
    assert all(torch.equal(a, b) for a, b in zip(actual, expected[1], strict=True))


def test_rows_counted_in_inference_mode():
    """Autograd cannot save their tensors."""
    x = Operands()
    targets = torch.where(torch.arange(N) % 3 == 0, -100, x.targets)
    with torch.inference_mode():
        for _ in range(LIKELY + 1):
            of_targets(x, targets)
    for _ in range(LIKELY + 1):
        results(of_targets, x, targets)


def test_rows_of_another_thread(monkeypatch):
    """A call between the comparison of the shapes and the use of the rows does not change the rows."""
    x = Operands()
    expected = results(of_targets, x, x.targets)
    for _ in range(LIKELY):
        results(of_targets, x, x.targets)
    (streak,) = early_projection._STREAKS.values()
    shape_of, calls = early_projection._shape, []

    def spy(given):
        if not calls:
            calls.append(given)
            half = call(CrossEntropyLoss(), x.hidden[: N // 2], x.weight, x.targets[: N // 2])
            streak.add(half, resolve_rows(half)[1])
        return shape_of(given)

    monkeypatch.setattr(early_projection, "_shape", spy)
    actual = results(of_targets, x, x.targets)
    assert calls
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("wrong", [V, -1])
@pytest.mark.parametrize("row", [0, 1], ids=["ignored before", "supervised before"])
def test_wrong_ids_where_rows_are_ignored(wrong, row, begun):
    x = Operands()
    targets = torch.where(torch.arange(N) % 3 == 0, -100, x.targets)
    for _ in range(LIKELY):
        results(of_targets, x, targets)
    targets[row] = wrong
    with pytest.raises(
        ValueError, match=r"^targets: expected ids in \[0, 30\) or ignore_index, got 1 outside"
    ):
        results(of_targets, x, targets)
    assert len(begun) == 1


def test_nothing_is_read_before_the_last_product(monkeypatch):
    order, tolist, add = [], torch.Tensor.tolist, base.Gradients.add
    monkeypatch.setattr(base.Gradients, "add", lambda *x: (order.append("product"), add(*x)))
    x = Operands()
    for _ in range(LIKELY):
        results(of_targets, x, x.targets)
    chunks, order[:] = len(order) // LIKELY, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (order.append("read"), tolist(x))[1])
    results(of_targets, x, x.targets)
    assert chunks > 1 and order[:chunks] == ["product"] * chunks and set(order[chunks:]) == {"read"}


@pytest.mark.parametrize("run", CALLS)
def test_what_is_thrown_away_is_freed_before_anything_takes_its_place(run, monkeypatch):
    buffers, alive = [], []
    for owner in (Projection, GatheredProjection):
        new_buffer = owner.new_buffer

        def spy(self, plan, new_buffer=new_buffer, **options):
            alive.append(sum(x() is not None for x in buffers))
            actual = new_buffer(self, plan, **options)
            buffers.append(weakref.ref(actual[0]))
            return actual

        monkeypatch.setattr(owner, "new_buffer", spy)
    x = Operands()
    for _ in range(LIKELY):
        results(run, x, x.targets)
    alive.clear()
    results(run, x, torch.where(torch.arange(N) % 3 == 0, -100, x.targets))
    assert len(alive) > 1 and not any(alive)


@dataclass(frozen=True, kw_only=True)
class LookedUpLoss(TokenLoss):
    """-u[target] log p: no id outside the table may reach it."""

    shared_inputs: ClassVar = ("table",)

    def terms(self, stats, batch):
        assert 0 <= batch.targets.min() and batch.targets.max() < V
        return {"loss": Term(-batch.table[batch.targets] * stats.logps)}, {}


@pytest.mark.parametrize("wrong", [V, -1])
@pytest.mark.parametrize("run", [of_targets, of_lse, of_logits, of_pairs])
def test_wrong_ids_are_named_as_ever(run, wrong, begun):
    x = Operands()
    for _ in range(LIKELY):
        results(run, x, x.targets)
    targets = x.targets.clone()
    targets[5] = wrong
    with pytest.raises(ValueError, match=rf"1 outside.*{wrong}"):
        run(x, targets)
    assert len(begun) == 1
    results(run, x, x.targets)


def test_a_loss_meets_ids_alone(begun):
    x, loss, table = Operands(), LookedUpLoss(), torch.rand(V)
    some = torch.where(torch.arange(N) % 3 == 0, -100, x.targets)
    expected = loss(x.hidden, x.weight, some, table=table).loss
    for _ in range(LIKELY):
        loss(x.hidden, x.weight, x.targets, table=table)
    assert torch.equal(loss(x.hidden, x.weight, some, table=table).loss, expected)
    assert len(begun) == 1


@dataclass(frozen=True, kw_only=True)
class RefusingLoss(TokenLoss):
    """Refuses a slice whose weights are not all positive."""

    token_inputs: ClassVar = ("weights",)

    def terms(self, stats, batch):
        if batch.weights.min() <= 0:
            raise RuntimeError("a weight that is not positive")
        return {"loss": Term(-batch.weights * stats.logps)}, {}


def test_an_error_of_rows_that_do_not_count_is_none(begun):
    x, loss, weights = Operands(), RefusingLoss(), torch.ones(N)
    for _ in range(LIKELY):
        loss(x.hidden, x.weight, x.targets, weights=weights)
    weights[3] = 0.0
    with pytest.raises(RuntimeError, match="not positive"):
        loss(x.hidden, x.weight, x.targets, weights=weights)
    targets = x.targets.clone()
    targets[3] = -100
    loss(x.hidden, x.weight, targets, weights=weights)
    assert len(begun) == 2


def test_a_normalizer_of_zero_is_named_as_ever(begun):
    x, count = Operands(), torch.tensor(3.0)
    for _ in range(LIKELY + 1):
        linear_cross_entropy(x.hidden, x.weight, x.targets, num_items=count)
    assert len(begun) == 1
    with pytest.raises(ValueError, match="num_items"):
        linear_cross_entropy(x.hidden, x.weight, x.targets, num_items=count * 0)
    assert len(begun) == 2


def test_what_is_not_guessed(begun):
    """Without a sync, with boundaries, integers per token, faults, without rows, and rows that change."""
    x = Operands()
    three, whole, bounds = (
        x.hidden.view(4, N // 4, H),
        x.targets.view(4, N // 4),
        torch.arange(0, N + 1, N // 4),
    )
    for number in range(LIKELY + 1):
        some = torch.where(torch.arange(N).view(4, N // 4) == number, -100, whole)
        linear_cross_entropy(x.hidden, x.weight, x.targets, compact=False)
        DPOLoss()(x.hidden, x.weight, x.targets, ref_logps=torch.zeros(4), cu_seqlens=bounds)
        of_several_ids(x, x.targets)
        of_gathered_columns(x, x.targets)
        linear_cross_entropy(x.hidden[:0], x.weight, x.targets[:0])
        DPOLoss()(three, x.weight, some, ref_logps=torch.zeros(4))
    assert not begun


def test_of_several_heads_none_is_guessed(begun):
    x = Operands()
    several = [call(CrossEntropyLoss(), x.hidden, x.weight, x.targets) for _ in range(2)]
    for _ in range(LIKELY + 1):
        with torch.no_grad():  # as below autograd
            base.solve(several, fixed_dtypes=False)
    assert not begun


def test_losses_that_differ_learn_apart(begun):
    x = Operands()
    for _ in range(LIKELY + 2):
        TokenStatistics().statistics(x.hidden, x.weight, x.targets)
    count = len(begun)
    assert count == 2
    CrossEntropyLoss()(x.hidden, x.weight, x.targets)
    TokenStatistics().statistics(x.hidden, x.weight[:-1], x.targets.clamp(max=V - 2))
    assert len(begun) == count


def test_what_is_learned_is_bounded(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 4)
    x = Operands()
    for rows in range(V - 9, V):
        targets = x.targets.clamp(max=rows - 1)
        linear_cross_entropy(x.hidden, x.weight[:rows], targets)
        assert len(early_projection._STREAKS) <= 4
