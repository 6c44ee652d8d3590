"""Bytes: the default budget, what a row of a user's own loss takes, and where the warnings point."""

import inspect
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from logitless import BudgetWarning, CrossEntropyLoss, JSDLoss, LogitsLoss, SimPOLoss, Term
from logitless.engine import budget, compiled
from logitless.engine.budget import _WARNED, default_budget, measured_row_bytes
from logitless.engine.plan import MIB
from tests.engine.calls import call
from tests.support import DEVICE

H, V = 8, 1000


def test_default_budget():
    assert default_budget(torch.device("cpu")) == 256 * MIB
    assert default_budget(torch.device("meta")) == 512 * MIB  # nothing is known of its memory


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_default_budget_of_a_gpu():
    memory = torch.cuda.get_device_properties(DEVICE).total_memory
    large = memory >= 60 * 1024 * MIB  # cards of 64 GiB show a little less
    assert default_budget(DEVICE) == (2560 * MIB if large else min(1024 * MIB, memory // 32))


# -- a loss of logits is measured


@dataclass(frozen=True, kw_only=True)
class Squares(LogitsLoss):
    """One temporary of the logits' size, and one of its gradient's."""

    def terms(self, logits, batch):
        return {"squares": Term(logits.square().sum(-1))}, {}


@dataclass(frozen=True, kw_only=True)
class Tabled(LogitsLoss):
    """Reads a tensor that is shared by all tokens."""

    shared_inputs: ClassVar = ("table",)
    token_inputs: ClassVar = ("weights",)
    sequence_inputs: ClassVar = ()

    def terms(self, logits, batch):
        own = batch.table[batch.targets].sum(-1)
        return {"own": Term(batch.weights * own * logits.logsumexp(-1))}, {}


def numbers(*shape: int, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def row_bytes(loss, vocab: int = V, dtype=torch.float32, trainable: bool = True, **inputs) -> int:
    targets = torch.randint(0, vocab, (5,), device=DEVICE)
    hidden = numbers(5, H, dtype=dtype).requires_grad_(trainable)
    return measured_row_bytes(call(loss, hidden, numbers(vocab, H, dtype=dtype), targets, **inputs))


TEACHER = {"teacher_hidden": (5, H), "teacher_weight": (V, H)}


@pytest.fixture
def no_default_device():
    """Dynamo guards on the default device, and the thread in which autograd runs on a GPU has none."""
    before = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(None if before.type == "cpu" else before)


@pytest.mark.each_value
@pytest.mark.usefixtures("no_default_device")
@pytest.mark.parametrize("by_running", [True, False])
@pytest.mark.parametrize(
    ("loss", "inputs"),
    [
        (Squares(), {"bias": (V,)}),
        (Squares(compact=False), {"num_items": ()}),
        (Squares(reduction="none"), {}),
        (Squares(logits_budget=20_000), {}),
        (Tabled(compact=False), {"table": (V, 2), "weights": (5,)}),
        (JSDLoss(hard_loss_weight=0.2), TEACHER | {"teacher_bias": (V,)}),
        (JSDLoss(divergence="reverse_kl", reduction="sum"), TEACHER),
    ],
)
def test_one_graph_measures_and_evaluates(loss, inputs, by_running, monkeypatch):
    """Batches of other dimensions and lengths, measured as on a GPU or as on a CPU."""
    torch.compiler.reset()
    counter = CompileCounter()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compile_(f, dynamic=dynamic, backend=counter))
    measured = []

    def measure(loss, example, differentiate, vocabulary):
        if by_running:
            evaluate = compiled.compiled_chunk_function(loss, differentiate)
            evaluate(*example._replace(device=DEVICE).arguments(loss))
        return measured.append(loss) or 1000

    monkeypatch.setattr(budget, "_measure", measure)
    monkeypatch.setattr(budget, "_MEASURED", {})
    # The CPU's reader.
    monkeypatch.setattr(type(loss), "has_kernel", lambda *given: False)
    compiled._compiled.cache_clear()
    numbers_of = {name: torch.rand(shape, device=DEVICE) for name, shape in inputs.items()}
    if "bias" in numbers_of:
        numbers_of["bias"].requires_grad_()
    weight = numbers(V, H).requires_grad_()
    for shape in ((3, 4, 5), (2, 5), (5,)):
        more = {
            name: x if inputs[name][:1] != (5,) else x.expand(*shape, *x.shape[1:])
            for name, x in numbers_of.items()
        }
        hidden = numbers(*shape, H).requires_grad_()
        targets = torch.randint(V, shape, device=DEVICE)
        out = loss(hidden, weight, targets, **more).loss
        (out * torch.rand_like(out)).sum().backward()
        out = loss(hidden, weight, targets, **more).loss
        out.sum().backward()
    compiled._compiled.cache_clear()
    passes = 2 if loss.reduction == "none" else 1
    assert measured == [loss] and counter.frame_count == passes


def test_a_row_takes_what_its_temporaries_take():
    actual = row_bytes(Squares())
    # At least the gradient; at most a handful of arrays of the logits' size, in fp32.
    assert 4 * V <= actual <= 6 * 4 * V + 64
    assert abs(row_bytes(Squares(), 4 * V) - 4 * actual) <= 256
    assert row_bytes(Squares(), trainable=False) < actual or DEVICE.type == "cuda"
    if DEVICE.type == "cpu":
        assert row_bytes(Squares(), dtype=torch.float64) > 1.5 * actual


@pytest.mark.parametrize("columns", [1, 3000])
def test_shared_tensors_are_not_a_rows_memory(columns):
    """They are there once, however many rows a chunk has: a row reads its own part of them."""
    shared = {"table": numbers(V, columns), "weights": numbers(5)}
    actual = row_bytes(Tabled(), **shared)
    assert 4 * V <= actual <= 8 * 4 * V + 4 * 4 * columns


def test_the_measuring_leaves_nothing_behind():
    table = numbers(V, 4)
    before = table.clone()
    row_bytes(Tabled(), table=table, weights=numbers(5))
    assert torch.equal(table, before)


# -- warnings


def warned(caught: list) -> warnings.WarningMessage:
    (actual,) = [warning for warning in caught if issubclass(warning.category, BudgetWarning)]
    return actual


def line() -> int:
    """The line of the caller."""
    return inspect.currentframe().f_back.f_lineno


class Model(torch.nn.Module):
    """Calls the loss itself: the warning belongs to its line, and not to what calls it."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, *args):
        return self.loss(*args), line()


LOSSES = {
    "below one row": (CrossEntropyLoss(logits_budget=1), (6,)),
    "below a pair": (SimPOLoss(logits_budget=200_000), (2, 40)),
}
warning_losses = pytest.mark.parametrize(("loss", "shape"), LOSSES.values(), ids=LOSSES)


def operands(*shape: int, vocab: int = V) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = numbers(*shape, H).requires_grad_(), numbers(vocab, H).requires_grad_()
    return hidden, weight, torch.zeros(shape, dtype=torch.int64, device=DEVICE)


@pytest.fixture
def caught():
    _WARNED.clear()
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        yield actual


@warning_losses
@pytest.mark.parametrize("in_module", [False, True], ids=["", "in a module"])
def test_a_warning_points_at_the_callers_line(loss, shape, in_module, caught):
    """torch's own frames lie between the caller of a module and its `forward`, whose line it is there."""
    given = operands(*shape)
    if in_module:
        out, expected_line = Model(loss)(*given)
    else:
        out, expected_line = loss(*given), line()
    actual = warned(caught)
    assert (actual.filename, actual.lineno) == (__file__, expected_line)
    out.loss.sum().backward()
    warned(caught)  # no second one in the backward pass


@warning_losses
def test_a_warning_comes_once_for_batches_of_other_sizes(loss, shape, caught):
    """Its numbers differ from step to step, as lengths do."""
    *first, tokens = shape
    for longer in (0, 0, 1, 2, 3):
        loss(*operands(*first, tokens + longer, vocab=V + longer))
    assert "bytes" in str(warned(caught).message)
    replace(loss, logits_budget=loss.logits_budget + 1)(*operands(*shape))
    assert len(caught) == 2  # another loss is another warning


def test_a_warning_points_at_a_project_in_a_folder_called_torch(caught):
    source, file = "loss(hidden, weight, targets)", "/home/someone/torch/train.py"
    names = dict(zip(("hidden", "weight", "targets"), operands(6)), loss=CrossEntropyLoss(logits_budget=1))
    exec(compile(source, file, "exec"), names)
    assert warned(caught).filename == file
