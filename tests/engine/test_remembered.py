"""What the library keeps between calls is bounded, and holds no process group."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from logitless import CrossEntropyLoss, GRPOLoss, JSDLoss, LogitsLoss, SimPOLoss, Term, linear_cross_entropy
from logitless.engine import budget, choose, compiled, early_projection, graph_names, remembered, terms
from logitless.engine.call import Signature
from logitless.losses import declarations
from logitless.losses.base import LinearLoss
from tests.ranks import in_processes
from tests.support import DEVICE

H, V = 4, 11
MANY = 400


@dataclass(frozen=True, kw_only=True)
class Powers(LogitsLoss):
    power: float = 2.0

    vocab_parallel: ClassVar = True

    def terms(self, logits, batch):
        return {"powers": Term(batch.summed((logits.abs() + 1).pow(self.power).sum(-1)))}, {}


@pytest.fixture(autouse=True)
def uncompiled():
    with torch.compiler.set_stance("force_eager"):
        yield


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, H, requires_grad=True), torch.randn(V, H), torch.arange(12).view(4, 3) % V


def of_a_model(i: int) -> None:
    hidden, _, targets = operands()
    head = nn.Linear(H, V)
    CrossEntropyLoss(z_loss=i / MANY)(hidden, head, targets)


SMALL = (
    torch.randn(1, H, device=DEVICE),
    torch.randn(V, H, device=DEVICE),
    torch.zeros(1, dtype=torch.int64, device=DEVICE),
)
KINDS: dict[str, Callable[[int], object]] = {
    "of tokens": lambda i: CrossEntropyLoss(z_loss=i / MANY, logits_budget=1)(*SMALL),
    "of pairs": lambda i: SimPOLoss(beta=1 + i / MANY)(*operands()),
    "of logits": lambda i: Powers(power=1 + i / MANY)(*operands()),
    "with a head": of_a_model,
    "as a function": lambda i: linear_cross_entropy(*operands(), label_smoothing=i / MANY),
}


def kept() -> int:
    """Losses that are alive."""
    gc.collect()
    return sum(isinstance(x, LinearLoss) for x in gc.get_objects())


@pytest.mark.filterwarnings("ignore::logitless.BudgetWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_many_losses(kind, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 100)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    registries = (terms._CHECKED, budget._WARNED, budget._MEASURED, early_projection._STREAKS, choose._SIZES)
    for registry in registries:
        registry.clear()
    compiled._compiled.cache_clear()
    declarations._made.cache_clear()
    before, graphs = kept(), len(graph_names._SIGNATURES)
    with torch.no_grad():
        for i in range(MANY):
            KINDS[kind](i)
    assert all(len(registry) <= 100 for registry in registries)
    assert kept() - before <= 256 and len(graph_names._SIGNATURES) == graphs


def test_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 3)
    actual = remembered.Remembered()
    for i in (1, 2, 3, 2, 4):
        actual[i] = -i
    assert actual == {2: -2, 3: -3, 4: -4}


def test_a_class_is_not_kept():
    def made() -> weakref.ref:
        @dataclass(frozen=True, kw_only=True)
        class Own(LogitsLoss):
            def terms(self, logits, batch):
                return {"own": Term(logits.sum(-1))}, {}

        Own()
        return weakref.ref(Own)

    reference = made()
    gc.collect()
    assert reference() is None


def test_each_loss_of_logits_has_graphs_of_its_own(monkeypatch):
    """Dynamo compiles a code object eight times, and then runs it uncompiled."""
    codes = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: codes.append(function.__code__) or function
    )
    compiled._compiled.cache_clear()
    for i in range(10):
        Powers(power=1 + i / 7)(*operands())
    compiled._compiled.cache_clear()
    assert len(set(map(id, codes))) == 10


def use(group) -> None:
    """Every way in which a loss may hold a group."""
    hidden, weight, targets = operands()
    head = nn.Linear(H, V)
    for loss in (CrossEntropyLoss(tp_group=group), Powers(tp_group=group), JSDLoss(tp_group=group)):
        distills = type(loss) is JSDLoss
        teacher = {"teacher_hidden": hidden.detach(), "teacher_weight": weight} if distills else {}
        loss(hidden, weight, targets, **teacher).loss.backward()
        loss(hidden, head, targets, **teacher).loss.backward()
    GRPOLoss(cp_group=group)(hidden, weight, targets, advantages=torch.randn(4)).loss.backward()
    linear_cross_entropy(hidden, weight, targets, tp_group=group).backward()


def destroyed() -> bool:
    """Whether a group is gone once it is destroyed."""
    group = dist.new_group([0])
    reference = weakref.ref(group)
    use(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return reference() is None


@pytest.mark.ranks
def test_a_destroyed_group_is_gone():
    assert in_processes(1, destroyed) == [True]


def compiled_with_a_group() -> list[bool]:
    group, x = dist.new_group([0]), operands()
    loss = CrossEntropyLoss(tp_group=group)
    torch.compile(lambda *x: loss(*x).loss, backend="aot_eager", fullgraph=True)(*x)
    (known,) = graph_names._SIGNATURES.values()
    return [known.signature.loss.tp_group is None, known.complete().loss == loss]


@pytest.mark.ranks
def test_a_compiled_call_keeps_no_group():
    """torch 2.13's own graph does."""
    assert in_processes(1, compiled_with_a_group) == [[True, True]]


def test_a_group_that_is_gone_when_a_graph_runs():
    signature = Signature(CrossEntropyLoss(), torch.float32, (), (), False, None)
    group = nn.Module()
    known = graph_names.Registered(signature, {"tp_group": weakref.ref(group)})
    assert known.complete().loss.tp_group is group
    del group
    with pytest.raises(
        ValueError, match="^tp_group: expected the group that a graph was compiled with, got none; "
    ):
        known.complete()
