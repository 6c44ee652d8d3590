"""Gated activations, packed and not, against fp64 and against what the models of transformers do."""

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from logitless.layers.gated import ACTIVATIONS, gated
from tests.kernels.support import DEVICE, INTERPRETED
from tests.layers.layer_support import assert_as_good, outcome, randn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Dtypes of a and b.
DTYPES = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "fp16": (FP16, FP16), "mixed": (BF16, FP32)}
SHAPES = {"7": (7,), "3x40": (3, 40), "2x3x1000": (2, 3, 1000), "2x1024": (2, 1024), "1x1500": (1, 1500)}
STOCK = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu_erf": "gelu"}

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
dtypes = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def operands(shape, dtypes) -> dict[str, Tensor]:
    return {name: 2 * randn(*shape, seed=i, dtype=dtypes[i]) for i, name in enumerate("ab")}


def plain(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """From the papers' formulas."""
    if activation == "silu":
        return a / (1 + torch.exp(-a)) * b
    if activation == "gelu_tanh":
        return a / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3))) * b
    return a / 2 * (1 + torch.erf(a / 2**0.5)) * b


def stock(a: Tensor, b: Tensor, activation: str) -> Tensor:
    return ACT2FN[STOCK[activation]](a) * b


@activations
@dtypes
@shapes
def test_two_tensors(shape, dtypes, activation):
    """LlamaMLP, GemmaMLP: `act_fn(gate_proj(x)) * up_proj(x)`; and Phi3MLP's one tensor of both halves."""
    given = operands(shape, dtypes)
    expected = outcome(lambda a, b: plain(a, b, activation), given, dtype=FP64)
    stocks = outcome(lambda a, b: stock(a, b, activation), given)
    assert_as_good(outcome(lambda a, b: gated(a, b, activation=activation), given), expected, stocks)
    if dtypes[0] == dtypes[1]:
        packed = outcome(lambda a, b: gated(torch.cat((a, b), -1), activation=activation), given)
        assert_as_good(packed, expected, stocks)


@activations
def test_far_from_zero(activation):
    """Saturated on both sides; nothing overflows on the way."""
    values = [-1e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e4]
    a = torch.tensor(values, device=DEVICE).requires_grad_()
    b = torch.full_like(a, 3.0).requires_grad_()
    out, expected = gated(a, b, activation=activation), stock(a, b, activation)
    torch.testing.assert_close(out, expected)
    actual, wanted = (torch.autograd.grad(y.sum(), (a, b)) for y in (out, expected))
    torch.testing.assert_close(actual, wanted)


@activations
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rounds_where_the_model_does(dtype, activation):
    """Nearly every number has the model's bits; with act(a) unrounded, a quarter of them would not."""
    given = operands((8, 512), (dtype, dtype))
    actual = outcome(lambda a, b: gated(a, b, activation=activation), given)
    expected = outcome(lambda a, b: stock(a, b, activation), given)
    for name in ("result 0", "d_b"):
        assert (actual[name] == expected[name]).double().mean() > 0.95, name


@pytest.mark.skipif(not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU, or the interpreter")
def test_any_length_fits_the_grid(monkeypatch):
    """CUDA allows 2^31 - 1 blocks along the first dimension and 65,535 along the others."""
    from logitless.layers import gated_triton

    actual = []

    class Grid:
        def __getitem__(self, grid):
            actual.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(gated_triton, "gated_kernel", Grid())
    for shape in ((1, 2**40), (2**20, 2**20), (2**30, 64)):
        x = torch.empty(shape, device="meta")
        gated_triton.forward(x, x, "silu")
        gated_triton.forward(x[..., : shape[1] // 2], x[..., shape[1] // 2 :], "silu")
    assert all(len(grid) == 1 and grid[0] < 2**31 for grid in actual), actual
