"""Losses that a user would write, of groups and of the whole batch, in every strategy, against plain PyTorch
on full logits. Those of single tokens are in tests/random."""

import gc
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from logitless import LogitsLoss, Term, TokenLoss
from tests.support import DEVICE, relative_error

H, V = 16, 300
ROW = V * 8  # bytes of a row of fp64 logits


# -- the losses


@dataclass(frozen=True, kw_only=True)
class PairLoss(TokenLoss):
    """A margin between chosen and rejected sums, with a weight per sequence, plus NLL on every token: two
    normalizers."""

    scope: ClassVar = "group"
    sequences_per_group: ClassVar = 2
    sequence_inputs: ClassVar = ("offsets",)
    token_inputs: ClassVar = ("weights",)
    metric_names: ClassVar = ("margin",)

    def terms(self, stats, batch):
        chosen, rejected = (batch.sum_by_sequence(stats.logps * batch.weights) - batch.offsets).chunk(2)
        margin = chosen / batch.lengths.chunk(2)[0].clamp(min=1) - rejected
        return {"nll": Term(-stats.logps), "pair": Term(-F.logsigmoid(0.1 * margin), over="pairs")}, {
            "margin": Term(margin, over="pairs")
        }


@dataclass(frozen=True, kw_only=True)
class EntropyPairLoss(PairLoss):
    differentiates: ClassVar = ("logps", "lse", "entropy")

    def terms(self, stats, batch):
        terms, metrics = super().terms(stats, batch)
        return terms | {
            "entropy": Term(stats.entropy.square()),
            "lse": Term(stats.lse.square(), over="sequences", of="tokens"),
        }, metrics


@dataclass(frozen=True, kw_only=True)
class SortedLoss(PairLoss):
    scope: ClassVar = "batch"

    def terms(self, stats, batch):
        chosen, rejected = batch.sum_by_sequence(stats.logps * batch.weights).chunk(2)
        margin = chosen.sort().values - rejected.sort().values
        return {"aot": Term(F.softplus(-margin), over="pairs")}, {"margin": Term(margin, over="pairs")}


@dataclass(frozen=True, kw_only=True)
class TeacherLoss(LogitsLoss):
    teacher: ClassVar = True
    metric_names: ClassVar = ("agreement",)

    def terms(self, logits, batch):
        teacher = batch.teacher_logits.log_softmax(-1)
        kl = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
        return {"kl": Term(kl)}, {"agreement": Term((logits.argmax(-1) == teacher.argmax(-1)).float())}


def full_pair_loss(kind, hidden, weight, bias, targets, offsets, weights, starts):
    """Plain PyTorch, sequence by sequence: `starts` are the boundaries of the flat sequences."""
    log_p = (hidden @ weight.T + bias).log_softmax(-1)
    supervised = targets != -100
    logps = torch.where(supervised, log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    sequences = list(zip(starts[:-1], starts[1:], strict=True))
    sums = torch.stack([(logps[a:b] * weights[a:b]).sum() for a, b in sequences])
    lengths = torch.stack([supervised[a:b].sum() for a, b in sequences])
    tokens, pairs = supervised.sum(), len(sequences) // 2
    if kind is SortedLoss:
        chosen, rejected = sums.chunk(2)
        return F.softplus(rejected.sort().values - chosen.sort().values).sum() / pairs
    chosen, rejected = (sums - offsets).chunk(2)
    margin = chosen / lengths.chunk(2)[0].clamp(min=1) - rejected
    loss = -logps.sum() / tokens - F.logsigmoid(0.1 * margin).sum() / pairs
    if kind is EntropyPairLoss:
        entropy = torch.where(supervised, -(log_p.exp() * log_p).sum(-1), 0.0)
        lse = torch.where(supervised, (hidden @ weight.T + bias).logsumexp(-1), 0.0)
        loss = loss + entropy.square().sum() / tokens + lse.square().sum() / len(sequences)
    return loss


def pair_problem(packed: bool, trainable: bool):
    generator = torch.Generator(DEVICE).manual_seed(0)
    lengths = [9, 3, 14, 6, 9, 5, 30, 8] if packed else [12] * 8
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    N = starts[-1]
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)  # noqa: E731
    hidden, weight, bias = random(N, H), random(V, H), random(V)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::4] = -100
    targets[starts[3] : starts[4]] = -100  # a sequence with nothing supervised
    offsets, weights = random(8), random(N)
    requires = (hidden, weight, bias) if trainable else (hidden,)
    for x in requires:
        x.requires_grad_()
    return hidden, weight, bias, targets.to(DEVICE), offsets, weights, starts


# The budget holds so many rows of logits; groups have 6 to 60 rows.
SCRATCH = 6 * 8 * 2**10
CASES = [
    pytest.param(PairLoss, True, 1000, "resident", id="pairs-resident-one-chunk"),
    pytest.param(PairLoss, True, 60, "resident", id="pairs-resident"),
    pytest.param(PairLoss, True, 2, "recompute", id="pairs-recompute"),
    pytest.param(PairLoss, True, 17, "mixed", id="pairs-mixed"),
    pytest.param(PairLoss, False, 5, "cached_grad", id="pairs-frozen-head"),
    pytest.param(EntropyPairLoss, True, 60, "resident", id="entropy-resident"),
    pytest.param(EntropyPairLoss, True, 2, "recompute", id="entropy-recompute"),
    pytest.param(EntropyPairLoss, False, 2, "recompute", id="entropy-frozen-head"),
    pytest.param(SortedLoss, True, 1000, "resident", id="batch-resident"),
    pytest.param(SortedLoss, True, 10, "recompute", id="batch-recompute"),
    pytest.param(SortedLoss, False, 10, "cached_grad", id="batch-frozen-head"),
]


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all-rows"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind, trainable, rows, strategy", CASES)
def test_groups_in_every_strategy(kind, trainable, rows, strategy, packed, compact):
    hidden, weight, bias, targets, offsets, weights, starts = pair_problem(packed, trainable)
    if strategy == "mixed" and not (packed and compact):
        pytest.skip("only the packed sequences have pairs on both sides of this budget")
    shape = (-1,) if packed else (8, 12)
    loss = kind(logits_budget=SCRATCH + rows * ROW, compact=compact)
    extra = {"offsets": offsets, "weights": weights.view(shape)}
    if packed:
        extra["cu_seqlens"] = torch.tensor(starts, device=DEVICE)
    out = loss(hidden.view(*shape, H), weight, targets.view(shape), bias=bias, **extra)
    truth = full_pair_loss(kind, hidden, weight, bias, targets, offsets, weights, starts)
    inputs = [x for x in (hidden, weight, bias) if x.requires_grad]
    if packed and not compact and strategy == "resident" and rows < len(targets):
        strategy = "recompute"  # the host does not know where the pairs end
    assert out.plan.strategy == strategy, out.plan.describe()
    assert relative_error(out.loss.detach(), truth.detach()) < 1e-12
    for name, ours, expected in zip(
        ("hidden", "weight", "bias"),
        torch.autograd.grad(3 * out.loss, inputs),
        torch.autograd.grad(3 * truth, inputs),
    ):
        assert expected.norm() > 0
        assert relative_error(ours, expected) < 1e-11, name
    with torch.no_grad():
        only = loss(hidden.view(*shape, H), weight, targets.view(shape), bias=bias, **extra)
    assert only.plan.strategy == "loss_only"
    assert relative_error(only.loss, truth.detach()) < 1e-12
    assert relative_error(only.metrics["margin"], out.metrics["margin"]) < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all-rows"])
@pytest.mark.usefixtures("uncompiled")
def test_a_loss_of_the_logits_of_two_models(reduction, compact):
    check_teacher_loss(reduction, compact)


@dataclass(frozen=True, kw_only=True)
class PickedLoss(LogitsLoss):
    """Targets are indices in every row, and so is the row that `table` has for each."""

    vocabulary_inputs: ClassVar = ("table",)

    def terms(self, logits, batch):
        picked = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
        return {"nll": Term(-picked * batch.table[batch.targets])}, {}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all rows"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_targets_are_ids_in_every_row(compact, reduction):
    hidden, weight, table = torch.randn(6, H), torch.randn(V, H), torch.rand(V)
    targets = torch.tensor([3, -100, 299, -100, 0, 1])
    loss = PickedLoss(reduction=reduction, compact=compact)(hidden, weight, targets, table=table).loss
    expected = F.cross_entropy(hidden @ weight.T, targets, weight=table, reduction=reduction)
    torch.testing.assert_close(loss, expected)


def test_a_logits_loss_is_compiled():
    """The real thing, once: the others run the same function uncompiled, for their speed's sake."""
    check_teacher_loss("mean", True)


def check_teacher_loss(reduction, compact):
    generator = torch.Generator(DEVICE).manual_seed(1)
    random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)  # noqa: E731
    hidden, weight, bias = (random(*shape).requires_grad_() for shape in ((5, 11, H), (V, H), (V,)))
    targets = torch.randint(0, V, (5, 11), generator=generator).to(DEVICE)
    targets[:, ::3] = -100
    teacher = {"teacher_hidden": random(5, 11, 6), "teacher_weight": random(V, 6)}
    loss = TeacherLoss(reduction=reduction, compact=compact, softcap=20.0, logits_budget=30 * 6 * ROW)
    out = loss(hidden, weight, targets, bias=bias, **teacher)

    log_p = (20 * torch.tanh((hidden @ weight.T + bias) / 20)).log_softmax(-1)
    t = (teacher["teacher_hidden"] @ teacher["teacher_weight"].T).log_softmax(-1)
    values = (t.exp() * (t - log_p)).sum(-1) * (targets != -100)
    truth = {"none": values, "sum": values.sum(), "mean": values.sum() / (targets != -100).sum()}[reduction]
    assert out.loss.shape == truth.shape
    assert relative_error(out.loss.detach(), truth.detach()) < 1e-10
    upstream = random(*truth.shape)
    ours = torch.autograd.grad(out.loss, (hidden, weight, bias), upstream)
    expected = torch.autograd.grad(truth, (hidden, weight, bias), upstream)
    for name, a, b in zip(("hidden", "weight", "bias"), ours, expected, strict=True):
        assert b.norm() > 0
        assert relative_error(a, b) < 1e-9, name


@dataclass(frozen=True, kw_only=True)
class MedianLoss(TokenLoss):
    scope: ClassVar = "batch"

    def terms(self, stats, batch):
        return {"median": Term(-stats.logps.sort().values[len(stats.logps) // 4], over=None)}, {}


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "all-rows"])
def test_a_loss_of_the_whole_batch_takes_flat_tokens(compact):
    hidden, weight, targets = torch.randn(12, H), torch.randn(V, H), torch.randint(0, V, (12,))
    hidden.requires_grad_()
    truth = -(hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0].sort().values[3]
    loss = MedianLoss(compact=compact)(hidden, weight, targets).loss
    torch.testing.assert_close(loss, truth, rtol=1e-4, atol=1e-5)
    actual, expected = (torch.autograd.grad(value, hidden) for value in (loss, truth))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_undeclared_metrics_and_sequences_too_few_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class Forgetful(TokenLoss):
        def terms(self, stats, batch):
            return {"nll": Term(-stats.logps)}, {"surprise": Term(stats.logps)}

    hidden, weight, targets = torch.randn(4, H), torch.randn(V, H), torch.randint(0, V, (4,))
    with pytest.raises(ValueError, match="metric_names: expected"):
        Forgetful()(hidden, weight, targets)
    with pytest.raises(ValueError, match="hidden: expected a multiple of 2 sequences"):
        PairLoss()(
            torch.randn(3, 4, H), weight, torch.zeros(3, 4, dtype=torch.int64), offsets=None, weights=None
        )


@dataclass(frozen=True, kw_only=True)
class EntropyAlone(TokenLoss):
    differentiates: ClassVar = ("entropy",)

    def terms(self, stats, batch):
        return {"entropy": Term(stats.entropy)}, {}


def test_a_loss_without_a_gradient_of_logps_returns_them():
    """A case of the random tests: the missing gradient of the returned logps was multiplied."""
    hidden, weight = torch.randn(5, H, requires_grad=True), torch.randn(V, H)
    out = EntropyAlone(return_logps=True)(hidden, weight, torch.arange(5))
    out.loss.backward()
    truth = (hidden.detach() @ weight.T).log_softmax(-1)[range(5), range(5)]
    assert torch.allclose(out.tokens["logps"], truth, rtol=1e-5)
    assert out.tokens["d_logps"].eq(0).all() and hidden.grad.norm() > 0


ALIVE: list = []


@dataclass(frozen=True, kw_only=True)
class Watched(TokenLoss):
    """Its metric is no part of its loss, and made by an operation that saves its own output."""

    metric_names: ClassVar = ("probability",)

    def terms(self, stats, batch):
        probability = stats.logps.exp()
        ALIVE.append(weakref.ref(probability))
        return {"nll": Term(-stats.logps)}, {"probability": Term(probability)}


def test_what_nobody_differentiates_is_freed():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    Watched()(hidden, weight, torch.arange(6)).loss.backward()
    gc.collect()
    assert ALIVE and all(alive() is None for alive in ALIVE)


def test_a_model_that_the_terms_cannot_read_is_refused():
    class TaughtByStatistics(TokenLoss):
        teacher: ClassVar = True

        def terms(self, stats, batch):
            return {"loss": Term(-stats.logps)}, {}

    class WithoutTransform(TokenLoss):
        reference: ClassVar = True

        def terms(self, stats, batch):
            return {"loss": Term(batch.ref_logps - stats.logps)}, {}

    class OfLogits(LogitsLoss):
        reference: ClassVar = True

        def terms(self, logits, batch):
            return {"loss": Term(-logits[:, 0])}, {}

    class WithTransform(WithoutTransform):
        @property
        def ref_transform(self):
            return self.logit_transform

    for kind, message in (
        (TaughtByStatistics, "teacher: expected False for a loss of statistics per token"),
        (WithoutTransform, "reference: expected a property ref_transform of WithoutTransform"),
        (OfLogits, "reference: expected False for a LogitsLoss"),
    ):
        with pytest.raises(TypeError, match=message):
            kind()
    hidden, weight, targets = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4), torch.arange(5)
    out = WithTransform()(hidden, weight, targets, ref_hidden=hidden.detach(), ref_weight=weight)
    assert out.loss.abs() < 1e-6
