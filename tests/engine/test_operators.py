"""Names of losses in compiled graphs: other values are another graph, in every process and thread."""

import copy
import functools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from logitless import CrossEntropyLoss, DPOLoss, LogitsLoss, Term, TokenLoss
from tests.ranks import in_processes
from tests.support import DEVICE, NEW_DYNAMO, EngineCalls, relative_error

H, V = 8, 40


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclass(frozen=True, kw_only=True)
class Focal(TokenLoss):
    gamma: float = 2.0
    weights: tuple[float, ...] = ()
    name: str = ""

    def terms(self, stats, batch):
        factor = sum(self.weights, 1.0)
        return {"focal": Term(factor * (1 - stats.logps.exp()) ** self.gamma * -stats.logps)}, {}


@dataclass(frozen=True, kw_only=True)
class Powers(LogitsLoss):
    power: float = 2.0

    def terms(self, logits, batch):
        return {"powers": Term((logits.abs() + 1).pow(self.power).sum(-1))}, {}


def head(*shape: int):
    generator = torch.Generator("cpu").manual_seed(0)
    hidden, weight = (
        torch.randn(*size, H, generator=generator, device="cpu").to(DEVICE) for size in (shape, (V,))
    )
    targets = torch.randint(0, V, shape, generator=generator, device="cpu").to(DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def focal(hidden: Tensor, weight: Tensor, targets: Tensor, loss: Focal) -> Tensor:
    """In plain PyTorch."""
    logps = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return (sum(loss.weights, 1.0) * (1 - logps.exp()) ** loss.gamma * -logps).mean()


def powers(hidden: Tensor, weight: Tensor, targets: Tensor, loss: Powers) -> Tensor:
    return ((hidden @ weight.T).abs() + 1).pow(loss.power).sum(-1).mean()


VALUES = [0.5, 1.0, 2.0, 0.5000001]


def compile_call() -> Callable:
    return torch.compile(lambda loss, *x: loss(*x).loss, backend="aot_eager", fullgraph=True)


def with_middle(middle: float) -> Focal:
    """Their texts must not be abbreviated."""
    return Focal(weights=(*[0.0] * 2000, middle, *[0.0] * 1999))


DIFFERING = {
    # Dynamo takes a float that changes for a variable.
    "one float": [Focal(gamma=gamma) for gamma in VALUES + VALUES[::-1]],
    "the middle of a long tuple": [with_middle(middle) for middle in (0.0, 1.0, -3.0)],
}


@pytest.mark.parametrize("losses", DIFFERING.values(), ids=DIFFERING)
def test_losses_that_differ(losses):
    compiled, arguments = compile_call(), head(6)
    for loss in losses:
        ours, expected = compiled(loss, *arguments), focal(*arguments, loss)
        torch.testing.assert_close(ours, expected)
        grads = [torch.autograd.grad(x.sum(), arguments[:2]) for x in (ours, expected)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", [True, False], ids=["in a graph", "its own compiled function"])
def test_a_logits_loss_that_differs_in_one_float(compiled):
    arguments, graph = head(6), compile_call()
    for loss in (Powers(power=2.0), Powers(power=3.0), Powers(power=2.0)):
        with EngineCalls(uncompiled=True) if compiled else nullcontext():
            actual = graph(loss, *arguments) if compiled else loss(*arguments).loss
            (grad,) = torch.autograd.grad(actual, arguments[:1])
        truth = powers(*arguments, loss)
        torch.testing.assert_close(actual, truth, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, *torch.autograd.grad(truth, arguments[:1]), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not NEW_DYNAMO, reason="torch 2.11 traces the float as a symbol, and fails with an error")
def test_a_loss_that_is_made_inside_a_graph():
    """From a float that changes from call to call."""

    def model(hidden, weight, targets, gamma):
        return Focal(gamma=gamma)(hidden, weight, targets).loss

    compiled = torch.compile(model, backend="aot_eager")
    arguments = head(6)
    for gamma in VALUES:
        torch.testing.assert_close(compiled(*arguments, gamma), focal(*arguments, Focal(gamma=gamma)))


def test_classes_of_one_name():
    compiled, arguments = compile_call(), head(6)
    for factor in (1.0, 2.0):

        def terms(self, stats, batch, factor=factor):
            return {"nll": Term(-factor * stats.logps)}, {}

        loss = type("Own", (TokenLoss,), {"terms": terms})()
        torch.testing.assert_close(compiled(loss, *arguments), factor * CrossEntropyLoss()(*arguments).loss)


@pytest.mark.parametrize(
    "field",
    [torch.nn.Parameter(torch.ones(3, device="cpu")), ("a", (1, torch.ones(3, device="cpu")))],
    ids=["parameter", "in tuples"],
)
def test_a_tensor_as_a_field_is_refused(field):
    @dataclass(frozen=True, kw_only=True)
    class Tabled(TokenLoss):
        table: object = None

        def terms(self, stats, batch):
            return {"nll": Term(-stats.logps)}, {}

    message = r"^table: expected .*, got .*tensor.*; .*shared_inputs.*\.$"
    with pytest.raises(TypeError, match=message):
        Tabled(table=field)
    with pytest.raises(TypeError, match=message):
        replace(Tabled(), table=field)


def test_a_tensor_that_is_declared_changes_without_a_new_graph():
    @dataclass(frozen=True, kw_only=True)
    class Tabled(TokenLoss):
        shared_inputs: ClassVar = ("table",)

        def terms(self, stats, batch):
            return {"nll": Term(-stats.logps * batch.table[batch.targets])}, {}

    hidden, weight, targets = head(6)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    loss = Tabled()
    compiled = torch.compile(lambda *x, table: loss(*x, table=table).loss, backend=counter, fullgraph=True)
    for seed in range(3):
        table = torch.rand(V, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)
        actual = compiled(hidden, weight, targets, table=table)
        torch.testing.assert_close(actual, loss(hidden, weight, targets, table=table).loss)
    assert counter.frame_count == 1


# -- copies, processes, threads

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss: pickle.loads(pickle.dumps(loss)),
    "replace and back": lambda loss: replace(replace(loss, gamma=9.0), gamma=loss.gamma),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies(make):
    loss, arguments = Focal(gamma=0.7), head(6)
    compiled = compile_call()
    torch.testing.assert_close(compiled(loss, *arguments), focal(*arguments, loss))
    again = make(loss)
    assert again == loss and hash(again) == hash(loss)
    torch.testing.assert_close(compiled(again, *arguments), focal(*arguments, loss))
    torch.testing.assert_close(again(*arguments).loss, focal(*arguments, loss))
    other = replace(again, gamma=2.5)
    torch.testing.assert_close(compiled(other, *arguments), focal(*arguments, other))


def in_another_process(loss: Focal, arguments: list) -> list[float]:
    """Compiles and calls a loss that came from another process."""
    hidden, weight, targets = (torch.tensor(x) for x in arguments)
    compiled = torch.compile(lambda *x: loss(*x).loss, backend="aot_eager", fullgraph=True)
    other = torch.compile(lambda *x: replace(loss, gamma=3.0)(*x).loss, backend="aot_eager")
    return [compiled(hidden, weight, targets).item(), other(hidden, weight, targets).item()]


def test_a_loss_goes_to_another_process():
    """One that was compiled here, and has a name here."""
    loss, arguments = Focal(gamma=0.7), [x.detach().cpu() for x in head(6)]
    torch.compile(lambda *x: loss(*x).loss, backend="aot_eager", fullgraph=True)(*arguments)
    (actual,) = in_processes(1, in_another_process, loss, [x.tolist() for x in arguments])
    expected = [focal(*arguments, loss).item(), focal(*arguments, replace(loss, gamma=3.0)).item()]
    assert actual == pytest.approx(expected, rel=1e-5)


def test_four_threads_compile_and_call_at_once():
    arguments = head(6)
    losses = [Focal(gamma=gamma) for gamma in (0.5, 1.0, 2.0, 3.0)]
    barrier = threading.Barrier(4)

    def work(loss: Focal) -> list[float]:
        if DEVICE.type != "cpu":
            torch.set_default_device(DEVICE)
        compiled = torch.compile(lambda *x: loss(*x).loss, backend="aot_eager", fullgraph=True)
        barrier.wait(60)
        with tolerant():
            return [compiled(*arguments).item() for _ in range(3)]

    # torch has one flag for all threads that a graph is being traced, and by default raises if a compiled
    # function is called meanwhile. An option is a thread's own in some versions of torch. In others it is one
    # for all, and the first thread that is done must not set it back.
    tolerant = functools.partial(torch._dynamo.config.patch, error_on_nested_fx_trace=False)
    with tolerant(), ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(work, losses))
    for loss, values in zip(losses, actual, strict=True):
        assert values == pytest.approx([focal(*arguments, loss).item()] * 3, rel=1e-5)


# -- the default backend, which believes the shapes that an operator promises

UNREDUCED = {
    "CE": (CrossEntropyLoss(reduction="none", label_smoothing=0.1, z_loss=0.1), {}),
    "DPO": (DPOLoss(reduction="none"), {"ref_logps": (4,)}),
}


@pytest.mark.repeats
@pytest.mark.parametrize(("loss", "inputs"), UNREDUCED.values(), ids=UNREDUCED)
def test_inductor_of_unreduced_losses(loss, inputs):
    hidden, weight, targets = head(4, 5)
    generator = torch.Generator("cpu").manual_seed(1)
    inputs = {
        name: -torch.rand(*shape, generator=generator, device="cpu").to(DEVICE)
        for name, shape in inputs.items()
    }

    def model(hidden, weight):
        out = loss(hidden * 1.5, weight, targets, **inputs)
        return out.loss, out.metrics

    compiled = torch.compile(model, fullgraph=True)
    results = []
    for function in (compiled, model):
        values, metrics = function(hidden, weight)
        upstream = torch.arange(1.0, values.numel() + 1, device=DEVICE).view(values.shape)
        results.append((values.detach(), metrics, torch.autograd.grad(values, (hidden, weight), upstream)))
    (ours, our_metrics, our_grads), (eager, metrics, grads) = results
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_metrics, metrics, rtol=1e-4, atol=1e-5)
    for a, b in zip(our_grads, grads, strict=True):
        assert b.norm() > 0 and relative_error(a, b) < 1e-4


IMPORTED_AGAIN = """
import importlib
import sys

import torch

import logitless.engine.operators


def use():
    from logitless import linear_cross_entropy

    torch._dynamo.reset()
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    step = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    step(hidden, weight, torch.arange(6)).backward()


importlib.reload(logitless.engine.operators)
use()
for name in [name for name in sys.modules if name.startswith("logitless")]:
    del sys.modules[name]
use()
"""


def test_the_library_may_be_imported_again():
    """As notebooks do whose modules are reloaded."""
    subprocess.run([sys.executable, "-c", IMPORTED_AGAIN], check=True)
