"""A loss of logits runs uncompiled where the compiler fails, and nowhere else: other errors are the call's own."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.exc import Unsupported

from logitless import LogitsLoss, Term
from logitless.engine import compiled
from logitless.engine.compiled import ChunkInputs
from logitless.engine.terms import UNITS, UnitFactors


@dataclass(frozen=True, kw_only=True)
class SumOfSquares(LogitsLoss):
    def terms(self, logits, batch):
        return {"squares": Term(logits.square().sum(-1))}, {}


def given(rows: int) -> ChunkInputs:
    units = dict.fromkeys((*UNITS, None), torch.ones(()))
    return ChunkInputs(None, torch.zeros(rows, dtype=torch.int64), {}, UnitFactors(units, units), None)


ERRORS = {
    "the compiler's": (Unsupported("a graph break"), True),
    "a wrong value": (ValueError("terms: expected X, got Y; Z."), False),
    "of a kernel": (RuntimeError("shapes do not match"), False),
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory"), False),
}


@pytest.fixture
def failing(monkeypatch):
    """A chunk's function for whose compiled form an error can be chosen, and how often that form was called."""

    def make(error: Exception):
        calls = []

        def fail(*_):
            calls.append(error)
            raise error

        monkeypatch.setattr(torch, "compile", lambda function, **_: fail)
        return compiled.compiled_chunk_function.__wrapped__(SumOfSquares(), True), calls

    return make


@pytest.mark.parametrize(("error", "is_of_the_compiler"), ERRORS.values(), ids=ERRORS)
def test_what_is_taken_for_an_error_of_the_compiler(failing, error, is_of_the_compiler):
    (evaluate, calls), z = failing(error), torch.randn(3, 5)
    if not is_of_the_compiler:
        with warnings.catch_warnings(), pytest.raises(type(error)):
            warnings.simplefilter("error")
            evaluate(z, given(3))
        return
    with pytest.warns(UserWarning, match=f"SumOfSquares runs uncompiled.*{type(error).__name__}"):
        gradient, found = evaluate(z, given(3))
    torch.testing.assert_close(gradient, 2 * z)
    torch.testing.assert_close(found.total, z.square().sum())
    evaluate(z, given(3))
    assert len(calls) == 1, "it is not tried again"
