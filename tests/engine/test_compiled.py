"""The compiled part of a LogitsLoss: only errors of the compiler leave it uncompiled, it alone."""

import warnings
from dataclasses import dataclass

import pytest
import torch

from logitless import LogitsLoss, Term
from logitless.engine import compiled
from tests.support import DEVICE, NEW_DYNAMO

H, V = 8, 40


@dataclass(frozen=True, kw_only=True)
class Squares(LogitsLoss):
    factor: float = 1.0

    def terms(self, logits, batch):
        return {"squares": Term(self.factor * logits.square().sum(-1))}, {}


def head(rows: int = 6):
    generator = torch.Generator("cpu").manual_seed(0)
    hidden, weight = (
        torch.randn(*size, generator=generator, device="cpu").to(DEVICE) for size in ((rows, H), (V, H))
    )
    return hidden.requires_grad_(), weight, torch.zeros(rows, dtype=torch.int64, device=DEVICE)


def truth(hidden, weight, factor: float = 1.0):
    return factor * (hidden @ weight.T).square().sum(-1).mean()


class Compiler:
    """Stands in for torch.compile: raises what it is told when a function that it "compiled" is called."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls: list[str] = []

    def __call__(self, function, **options):
        def run(*args):
            self.calls.append("compiled")
            if self.error is not None:
                raise self.error
            return function(*args)

        return run


@pytest.fixture
def compiler(monkeypatch):
    compiled._compiled.cache_clear()
    stand_in = Compiler()
    monkeypatch.setattr(compiled.torch, "compile", stand_in)
    yield stand_in
    compiled._compiled.cache_clear()


def backend_failure() -> Exception:
    return torch._dynamo.exc.BackendCompilerFailed(lambda: None, ValueError("no code for this"), None)


def inductor_failure() -> Exception:
    from torch._inductor.exc import InductorError

    return InductorError(RuntimeError("no code for this"), None)


COMPILER_ERRORS = {
    "backend": backend_failure,
    "inductor": inductor_failure,
    "dynamo": lambda: torch._dynamo.exc.Unsupported("cannot trace this"),
    "internal": lambda: torch._dynamo.exc.InternalTorchDynamoError("cannot trace this"),
}
OWN_ERRORS = {
    "out of memory": torch.OutOfMemoryError("CUDA out of memory"),
    "runtime": RuntimeError("device-side assert triggered"),
    "value": ValueError("mine"),
    "type": TypeError("mine"),
    "interrupt": KeyboardInterrupt(),
    # Inductor runs kernels to choose among them, and wraps what they raise.
    "out of memory while compiling": torch._dynamo.exc.BackendCompilerFailed(
        lambda: None, torch.OutOfMemoryError("out of memory"), None
    ),
}


@pytest.mark.parametrize("make", COMPILER_ERRORS.values(), ids=COMPILER_ERRORS)
def test_a_failure_of_the_compiler(make, compiler):
    """One warning, at the caller's line, and the loss runs uncompiled from then on."""
    loss, (hidden, weight, targets) = Squares(), head()
    compiler.error = make()
    with pytest.warns(UserWarning, match="^Squares runs uncompiled") as caught:
        actual = loss(hidden, weight, targets).loss
    told = [one.filename for one in caught if "uncompiled" in str(one.message)]
    # On a GPU also by the run that measures the memory of `terms`.
    assert told == [__file__] or (hidden.is_cuda and set(told) == {__file__})
    torch.testing.assert_close(actual, truth(hidden, weight))
    tries = len(compiler.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = loss(hidden, weight, targets).loss
    assert len(compiler.calls) == tries, "the compiler is not asked again"
    torch.testing.assert_close(
        torch.autograd.grad(again, hidden), torch.autograd.grad(truth(hidden, weight), hidden)
    )


def test_a_failure_of_the_compiler_is_of_one_loss(compiler):
    hidden, weight, targets = head()
    compiler.error = backend_failure()
    with pytest.warns(UserWarning, match="uncompiled"):
        Squares()(hidden, weight, targets)
    compiler.error = None
    compiler.calls.clear()
    other = Squares(factor=2.0)(hidden, weight, targets).loss
    assert compiler.calls, "another loss is compiled"
    torch.testing.assert_close(other, truth(hidden, weight, 2.0))
    compiler.calls.clear()
    Squares()(hidden, weight, targets)
    assert not compiler.calls, "the one that failed is not"


@pytest.mark.parametrize("error", OWN_ERRORS.values(), ids=OWN_ERRORS)
def test_an_error_of_the_call_itself(error, compiler):
    """It propagates, and the loss stays compiled."""
    loss, (hidden, weight, targets) = Squares(), head()
    loss(hidden, weight, targets)
    compiler.error = error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(error)) as caught:
            loss(hidden, weight, targets)
        assert caught.value is error
        compiler.error = None
        compiler.calls.clear()
        torch.testing.assert_close(loss(hidden, weight, targets).loss, truth(hidden, weight))
    assert compiler.calls


FAILING: list[Exception] = []


@dataclass(frozen=True, kw_only=True)
class Failing(LogitsLoss):
    def terms(self, logits, batch):
        if FAILING and logits.device.type != "meta":
            raise FAILING[0]
        return {"squares": Term(logits.square().sum(-1))}, {}


@pytest.mark.parametrize(
    "stance",
    [
        "force_eager",
        # The real compiler: what `terms` raises while it is traced is no failure of the compiler.
        pytest.param(
            "default",
            marks=pytest.mark.skipif(
                not NEW_DYNAMO, reason="torch 2.11 tells of a failed trace and not of what was raised"
            ),
        ),
    ],
)
def test_out_of_memory_in_terms(stance):
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    loss, (hidden, weight, targets) = Failing(), head()
    with warnings.catch_warnings(), torch.compiler.set_stance(stance):
        warnings.simplefilter("ignore")
        FAILING.append(torch.OutOfMemoryError("CUDA out of memory"))
        try:
            with pytest.raises(torch.OutOfMemoryError):
                loss(hidden, weight, targets)
        finally:
            FAILING.clear()
        torch.testing.assert_close(loss(hidden, weight, targets).loss, truth(hidden, weight))
