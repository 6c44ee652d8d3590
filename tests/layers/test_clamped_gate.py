"""The clamped SwiGLU of experts, in halves and interleaved, against fp64 and against what models do."""

import itertools

import pytest
import torch
from torch import Tensor

from logitless.layers.clamped_gate import clamped_gated
from tests.kernels.support import DEVICE
from tests.layers.layer_support import assert_as_good, outcome, randn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Of x; rows of 1408 columns are tiles of several rows, and 4,100 are more than one block.
SHAPES = {"14": (14,), "3x40": (3, 40), "2x3x2816": (2, 3, 2816), "5x1536": (5, 1536), "1x8200": (1, 8200)}
MODELS = {
    "gpt-oss": {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True},
    "MiniMax-M3": {"limit": 7.0, "alpha": 1.702, "offset": 1.0},
    "DeepSeek-V4": {"limit": 10.0},
}

models = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def operand(*shape: int, dtype: torch.dtype) -> Tensor:
    """Of which a tenth is beyond the limits."""
    return 5 * randn(*shape, seed=0, dtype=dtype)


def stock(
    x: Tensor,
    limit: float,
    alpha: float | None = None,
    offset: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """As GptOssExperts and DeepseekV4Experts compute it."""
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    if alpha is None:
        return torch.nn.functional.silu(gate) * up
    return (up + offset) * (gate * torch.sigmoid(gate * alpha))


@models
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_and_gradients(shape, dtype, options):
    given = {"x": operand(*shape, dtype=dtype)}
    truth = outcome(lambda x: stock(x, **options), given, dtype=FP64)
    stocks = outcome(lambda x: stock(x, **options), given)
    assert_as_good(outcome(lambda x: clamped_gated(x, **options), given), truth, stocks)


@models
def test_at_the_limits_and_beyond(options):
    """On a limit the gradient passes, as in PyTorch; infinity is clamped, and NaN stays."""
    limit = options["limit"]
    values = [-torch.inf, -1e4, -limit, -1.0, 0.0, limit, limit + 1, 1e4, torch.inf, torch.nan]
    pairs = torch.tensor(list(itertools.product(values, values)), device=DEVICE)
    x = pairs.reshape(1, -1) if options.get("interleaved") else pairs.T.reshape(1, -1)
    x = x.contiguous().requires_grad_()
    out, expected = clamped_gated(x, **options), stock(x, **options)
    torch.testing.assert_close(out, expected, equal_nan=True)
    numbers = expected.isfinite()
    assert numbers.sum() > 60
    actual, wanted = (torch.autograd.grad(y[numbers].sum(), x)[0] for y in (out, expected))
    is_number = torch.isfinite(wanted)
    torch.testing.assert_close(actual[is_number], wanted[is_number])


def test_without_a_limit_it_is_swiglu():
    x = operand(3, 40, dtype=FP32)
    torch.testing.assert_close(clamped_gated(x, limit=torch.inf), stock(x, torch.inf))


def test_bad_operands():
    with pytest.raises(ValueError, match=r"x: expected an even last dimension, got shape \(3, 5\)"):
        clamped_gated(torch.zeros(3, 5), limit=7.0)
    with pytest.raises(ValueError, match="limit: expected a number above 0, got -1.0"):
        clamped_gated(torch.ones(2, 4), limit=-1.0)
    with pytest.raises(TypeError, match="x: expected a floating-point tensor"):
        clamped_gated(torch.zeros(3, 4, dtype=torch.int64), limit=7.0)


def test_under_the_compiler_it_is_plain_pytorch():
    x = operand(3, 40, dtype=FP32).requires_grad_()
    compiled = torch.compile(clamped_gated, backend="aot_eager", fullgraph=True)
    for options in MODELS.values():
        actual, expected = compiled(x, **options), clamped_gated(x, **options)
        torch.testing.assert_close(actual, expected)
        actual, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected))
        torch.testing.assert_close(actual, expected)
