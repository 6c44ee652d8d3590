"""The three products of a chunk against fp64, for the dtypes that meet in them and vocabularies of several
pieces."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from logitless.kernels import matmul
from logitless.kernels.matmul import accumulate, hidden_gradient, project
from tests.cases import DTYPES
from tests.kernels.support import Random, poisoned
from tests.support import assert_close, relative_error

C, H = 13, 24
vocabularies = pytest.mark.parametrize("vocab", [17, 1000, 9001])
# Of the operands and of the result; a sum is as wide as its terms, or wider.
PAIRS = {f"{x} to {out}": (DTYPES[x], DTYPES[out]) for x in DTYPES for out in DTYPES if out in (x, "fp32")}
pairs = pytest.mark.parametrize(
    ("dtype", "out_dtype"), [*PAIRS.values(), (torch.float64, torch.float64)], ids=[*PAIRS, "fp64"]
)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return Random(seed).normal(*shape).to(dtype)


def rounding(truth: torch.Tensor, dtype: torch.dtype) -> float:
    """Error of rounding the result once, and that of fp32 sums."""
    return max(relative_error(truth.to(dtype), truth), 2e-7 if dtype != torch.float64 else 1e-15)


@vocabularies
@pairs
def test_project(dtype, out_dtype, vocab):
    hidden, weight = random(C, H, dtype=dtype, seed=0), random(vocab, H, dtype=dtype, seed=1)
    out = poisoned(C, vocab, dtype=out_dtype)
    project(hidden, weight, out)
    truth = hidden.double() @ weight.double().t()
    assert_close(out, truth, rounding(truth, out_dtype), name="logits")


@vocabularies
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float64], ids=[*DTYPES, "fp64"])
def test_hidden_gradient(dtype, vocab):
    d_logits, weight = random(C, vocab, dtype=dtype, seed=0), random(vocab, H, dtype=dtype, seed=1)
    out = poisoned(C, H, dtype=dtype)
    hidden_gradient(d_logits, weight, out)
    truth = d_logits.double() @ weight.double()
    assert_close(out, truth, rounding(truth, dtype), name="d_hidden")


@vocabularies
@pairs
def test_accumulate(dtype, out_dtype, vocab):
    total, truth, naive = poisoned(vocab, H, dtype=out_dtype), 0, 0
    for chunk in range(3):
        # A view into a wider buffer, as an overlaid gradient is.
        d_logits = random(C, 2 * vocab, dtype=dtype, seed=chunk)[:, :vocab]
        hidden = random(C, H, dtype=dtype, seed=chunk + 10)
        accumulate(total, d_logits, hidden, first=chunk == 0)
        truth = truth + d_logits.double().t() @ hidden.double()
        naive = (
            (truth if chunk == 0 else naive + d_logits.double().t() @ hidden.double()).to(out_dtype).double()
        )
        assert_close(
            total,
            truth,
            max(relative_error(naive, truth), rounding(truth, out_dtype)),
            name=f"d_weight after {chunk + 1}",
        )


def test_a_fake_product_says_nothing_of_the_device():
    """A call on fake tensors may be the first to ask whether a device has a product."""
    matmul.has_out_dtype.cache_clear()

    def projected() -> torch.Tensor:
        hidden, weight = torch.ones(3, 4, dtype=torch.float16), torch.ones(5, 4, dtype=torch.float16)
        return project(hidden, weight, torch.empty(3, 5, dtype=torch.float32))

    with FakeTensorMode():
        assert projected().shape == (3, 5)
    assert projected().unique().tolist() == [4.0]
