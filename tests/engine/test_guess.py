"""`Guess`: a first product that is begun before the rows are counted changes no number, and costs no second
one where the guess is right."""

import weakref

import pytest
import torch

from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    linear_cross_entropy,
    linear_logprobs,
    linear_topk,
)
from logitless.engine import guess, passes, remembered
from logitless.engine.guess import LIKELY
from logitless.engine.objectives.gathered import GatheredProjection
from logitless.engine.projection import Projection
from logitless.losses.logprobs import TokenNumbers
from tests.engine.calls import call

# A LogitsLoss has the same numbers uncompiled.
pytestmark = pytest.mark.usefixtures("uncompiled")

N, H, V, K = 40, 8, 30, 3


@pytest.fixture(autouse=True)
def guessing(monkeypatch):
    """As on a GPU, and with nothing learned from other tests."""
    monkeypatch.setattr(guess, "_waits", lambda x: x.shape[0] > 0)
    monkeypatch.setattr(guess, "_STREAKS", remembered.Remembered())


@pytest.fixture
def begun(monkeypatch):
    """One entry for each product that was begun early."""
    plans, init = [], guess.Begun.__init__

    def spy(self, head, plan):
        plans.append(plan)
        init(self, head, plan)

    monkeypatch.setattr(guess.Begun, "__init__", spy)
    return plans


class Operands:
    def __init__(self, seed=0):
        made = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(N, H, generator=made).requires_grad_()
        self.weight = torch.randn(V, H, generator=made).requires_grad_()
        self.targets = torch.randint(V, (N,), generator=made)
        self.ids = torch.randint(V, (N, K), generator=made)
        self.values = torch.randn(N, K, generator=made).log_softmax(1)
        self.teacher = torch.randn(N, H, generator=made), torch.randn(V, H, generator=made)

    def gradients(self):
        found = [x.grad for x in (self.hidden, self.weight)]
        self.hidden.grad = self.weight.grad = None
        return [x for x in found if x is not None]


BUDGET = 16 * V * 4 * 3  # a few chunks


def of_targets(x, targets):
    loss = linear_cross_entropy(x.hidden, x.weight, targets, logits_budget=BUDGET)
    loss.backward()
    return loss


def of_lse(x, targets):
    loss = linear_cross_entropy(x.hidden, x.weight, targets, z_loss=0.1, logits_budget=BUDGET)
    loss.backward()
    return loss


def of_a_frozen_head(x, targets):
    found = linear_logprobs(x.hidden, x.weight.detach(), targets, logits_budget=BUDGET).logps
    found.sum().backward()
    return found


def of_one_id(x, targets):
    found = linear_logprobs(x.hidden, x.weight, targets, logits_budget=BUDGET).logps
    found.square().sum().backward()
    return found


def of_several_ids(x, targets):
    ids = torch.where(targets[:, None] < 0, -100, x.ids)
    found = linear_logprobs(x.hidden, x.weight, ids, logits_budget=4 * BUDGET).logps
    torch.where(found > -torch.inf, found, 0.0).square().sum().backward()
    return found


def of_the_best(x, targets):
    return linear_topk(x.hidden, x.weight, K, mask=targets >= 0, logits_budget=4 * BUDGET).logps


def of_logits(x, targets):
    hidden, weight = x.teacher
    own = {"teacher_hidden": hidden, "teacher_weight": weight}
    loss = DistillationLoss(divergence="jsd", logits_budget=4 * BUDGET)
    value = loss(x.hidden, x.weight, targets, **own).loss
    value.backward()
    return value


def of_gathered_columns(x, targets):
    options = {"divergence": "forward_kl", "support": "teacher", "topk_mode": "renormalize"}
    loss = DistillationLoss(**options, logits_budget=4096)
    given = {"mask": targets >= 0, "teacher_logprobs_topk": (x.values, x.ids)}
    value = loss(x.hidden, x.weight, **given).loss
    value.backward()
    return value


CALLS = (
    of_targets,
    of_lse,
    of_a_frozen_head,
    of_one_id,
    of_several_ids,
    of_the_best,
    of_logits,
    of_gathered_columns,
)


def results(run, x, targets):
    return [run(x, targets).detach(), *x.gradients()]


@pytest.mark.parametrize("run", CALLS)
def test_no_number_depends_on_a_right_guess(run, begun):
    x = Operands()
    expected = results(run, x, x.targets)
    for _ in range(LIKELY - 1):
        results(run, x, x.targets)
    assert not begun
    for time in (1, 2):
        found = results(run, x, x.targets)
        assert len(begun) == time
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("run", CALLS)
def test_no_number_depends_on_a_wrong_guess(run, begun):
    x = Operands()
    some = torch.where(torch.arange(N) % 3 == 0, -100, x.targets)
    expected = results(run, x, some)
    for _ in range(LIKELY):
        results(run, x, x.targets)
    for _ in range(2):  # and the second time nobody guesses
        found = results(run, x, some)
        assert len(begun) == 1
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("run", CALLS)
def test_a_right_guess_costs_no_product(run, begun, monkeypatch):
    """Nor is a chunk's first part multiplied twice."""
    rows = []
    for owner in (Projection, GatheredProjection):
        project = owner.project

        def spy(self, chunk, project=project):
            rows.append(len(chunk.logits))
            project(self, chunk)

        monkeypatch.setattr(owner, "project", spy)
    x = Operands()
    results(run, x, x.targets)
    walked, rows[:] = list(rows), []
    assert len(walked) > 1
    for _ in range(LIKELY - 1):
        results(run, x, x.targets)
    rows.clear()
    results(run, x, x.targets)
    assert begun and rows == walked


def test_the_product_comes_before_the_counts_are_read(monkeypatch):
    order, tolist, project = [], torch.Tensor.tolist, Projection.project
    monkeypatch.setattr(Projection, "project", lambda *x: (order.append("product"), project(*x)))
    x = Operands()
    for _ in range(LIKELY):
        results(of_targets, x, x.targets)
    order.clear()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (order.append("read"), tolist(x))[1])
    results(of_targets, x, x.targets)
    assert order[:2] == ["product", "read"]


@pytest.mark.parametrize("run", CALLS)
def test_what_is_thrown_away_is_freed_before_anything_takes_its_place(run, monkeypatch):
    buffers, alive = [], []
    for owner in (Projection, GatheredProjection):
        new_buffer = owner.new_buffer

        def spy(self, plan, new_buffer=new_buffer, **options):
            alive.append(sum(x() is not None for x in buffers))
            found = new_buffer(self, plan, **options)
            buffers.append(weakref.ref(found[0]))
            return found

        monkeypatch.setattr(owner, "new_buffer", spy)
    x = Operands()
    for _ in range(LIKELY):
        results(run, x, x.targets)
    alive.clear()
    results(run, x, torch.where(torch.arange(N) % 3 == 0, -100, x.targets))
    assert len(alive) > 1 and not any(alive)


@pytest.mark.parametrize("run", [of_targets, of_several_ids, of_gathered_columns])
def test_wrong_ids_are_named_as_ever(run, begun):
    x = Operands()
    for _ in range(LIKELY):
        results(run, x, x.targets)
    ids, x.ids = x.ids, x.ids.clone()
    x.ids[5, 0] = V
    wrong = x.targets.clone()
    wrong[5] = V
    with pytest.raises(ValueError, match="outside"):
        run(x, wrong)
    assert len(begun) == 1
    x.ids = ids
    results(run, x, x.targets)


def test_what_is_not_begun(begun):
    """Without a sync, in groups, with a reference through the same buffer, and without rows."""
    x = Operands()
    three, whole = x.hidden.view(4, 10, H), x.targets.view(4, 10)
    reference = {"ref_hidden": three.detach(), "ref_weight": x.weight.detach()}
    policy, sequences = GRPOLoss(loss_type="dapo", beta=0.1), GRPOLoss(importance_sampling_level="sequence")

    for _ in range(LIKELY + 1):
        linear_cross_entropy(x.hidden, x.weight, x.targets, compact=False)
        DPOLoss()(three, x.weight, whole, ref_logps=torch.zeros(4))
        policy(three, x.weight, whole, advantages=torch.ones(4), **reference)
        sequences(three, x.weight, whole, advantages=torch.ones(4))
        linear_cross_entropy(x.hidden[:0], x.weight, x.targets[:0])
    assert policy.scope == "token" and sequences.scope == "group"
    assert not begun


def test_of_several_heads_none_is_begun(begun):
    x = Operands()
    several = [call(CrossEntropyLoss(), x.hidden, x.weight, x.targets) for _ in range(2)]
    for _ in range(LIKELY + 1):
        with torch.no_grad():  # as below autograd
            passes.solve(several, static=False)
    assert not begun


def test_losses_that_differ_learn_apart(begun):
    x = Operands()
    for _ in range(LIKELY + 2):
        TokenNumbers().numbers(x.hidden, x.weight, x.targets)
    count = len(begun)
    assert count == 2
    CrossEntropyLoss()(x.hidden, x.weight, x.targets)
    TokenNumbers().numbers(x.hidden, x.weight[:-1], x.targets.clamp(max=V - 2))
    assert len(begun) == count


def test_what_is_learned_is_bounded(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 4)
    x = Operands()
    for rows in range(V - 9, V):
        targets = x.targets.clamp(max=rows - 1)
        linear_cross_entropy(x.hidden, x.weight[:rows], targets)
        assert len(guess._STREAKS) <= 4
