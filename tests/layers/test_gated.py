"""Gated activations, packed and not, against fp64 and against what the models of transformers do."""

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from logitless.layers.gated import ACTIVATIONS, gated
from tests.kernels.support import DEVICE, INTERPRETED
from tests.layers.layer_support import (
    STRIDES,
    assert_as_good,
    hardware_rounding,  # noqa: F401
    outcome,
    randn,
    strided,
)

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


@activations
@dtypes
@shapes
def test_two_tensors(shape, dtypes, activation):
    """LlamaMLP, GemmaMLP: `act_fn(gate_proj(x)) * up_proj(x)`."""
    given = operands(shape, dtypes)
    assert_as_good(
        outcome(lambda a, b: gated(a, b, activation=activation), given),
        outcome(lambda a, b: plain(a, b, activation), given, dtype=FP64),
        outcome(lambda a, b: ACT2FN[STOCK[activation]](a) * b, given),
    )


@activations
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@shapes
def test_packed(shape, dtype, activation):
    """Phi3MLP: `gate, up = gate_up.chunk(2, -1)`, `up * act(gate)`."""
    given = {"packed": torch.cat(tuple(operands(shape, (dtype, dtype)).values()), -1)}

    def stock(packed):
        gate, up = packed.chunk(2, dim=-1)
        return up * ACT2FN[STOCK[activation]](gate)

    assert_as_good(
        outcome(lambda packed: gated(packed, activation=activation), given),
        outcome(lambda packed: plain(*packed.chunk(2, -1), activation), given, dtype=FP64),
        outcome(stock, given),
    )


@activations
def test_far_from_zero(activation):
    """Saturated on both sides; nothing overflows on the way."""
    a = torch.tensor(
        [-1e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e4], device=DEVICE
    ).requires_grad_()
    b = torch.full_like(a, 3.0).requires_grad_()
    out = gated(a, b, activation=activation)
    expected = ACT2FN[STOCK[activation]](a) * b
    torch.testing.assert_close(out, expected)
    upstream = torch.ones_like(a)
    for found, wanted in zip(
        torch.autograd.grad(out, (a, b), upstream), torch.autograd.grad(expected, (a, b), upstream)
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtypes", [DTYPES["fp32"], DTYPES["bf16"]], ids=str)
@pytest.mark.parametrize("kind", STRIDES)
def test_strided_operands_and_gradients(kind, dtypes):
    given = operands((4, 3, 24), dtypes)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    expected = outcome(gated, given)
    out = gated(**{name: strided(x, kind) for name, x in leaves.items()})
    upstream = strided(randn(*out.shape, seed=100, dtype=out.dtype), kind)
    torch.testing.assert_close(out, expected["result 0"])
    for name, gradient in zip("ab", torch.autograd.grad(out, list(leaves.values()), upstream)):
        torch.testing.assert_close(gradient, expected[f"d_{name}"])

    packed = torch.cat(tuple(given.values()), -1).detach().requires_grad_()
    found = gated(strided(packed, kind))
    torch.testing.assert_close(found, expected["result 0"])
    (gradient,) = torch.autograd.grad(found, packed, upstream)
    torch.testing.assert_close(gradient, torch.cat([expected["d_a"], expected["d_b"]], -1))


@pytest.mark.parametrize("only", ["a", "b"])
def test_one_strided_operand(only):
    given = operands((4, 3, 24), DTYPES["fp32"])
    expected = outcome(gated, given)
    found = outcome(lambda **leaves: gated(**leaves | {only: strided(leaves[only], "sliced")}), given)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name])


@activations
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rounds_where_the_model_does(dtype, activation):
    """Nearly every number has the model's bits; with act(a) unrounded, a quarter of them would not."""
    given = operands((8, 512), (dtype, dtype))
    found = outcome(lambda a, b: gated(a, b, activation=activation), given)
    expected = outcome(lambda a, b: ACT2FN[STOCK[activation]](a) * b, given)
    for name in ("result 0", "d_b"):
        assert (found[name] == expected[name]).double().mean() > 0.95, name


def test_expanded_gradient():
    given = operands((4, 24), DTYPES["fp32"])
    leaves = [x.requires_grad_() for x in given.values()]
    found = torch.autograd.grad(gated(*leaves).sum(), leaves)
    out = gated(*leaves)
    expected = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("packed", [False, True], ids=["two tensors", "packed"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_again_is_the_same_and_nothing_is_overwritten(dtype, packed):
    given = operands((5, 2048), (dtype, dtype))
    leaves = [x.requires_grad_() for x in given.values()][: 1 if packed else 2]
    out = gated(*leaves)
    upstream = randn(*out.shape, seed=7, dtype=dtype)
    everything = [*leaves, out, upstream]
    kept = [x.detach().clone() for x in everything]
    first = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    assert all(torch.equal(x, before) for x, before in zip(everything, kept))
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, copies, second))
    assert torch.equal(gated(*leaves), out)


def test_saves_nothing_of_its_own():
    given = [x.requires_grad_() for x in operands((5, 16), DTYPES["bf16"]).values()]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        gated(*given)
    assert sorted(saved) == sorted(x.data_ptr() for x in given)


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_frozen_operands(frozen):
    given = operands((5, 16), DTYPES["fp32"])
    expected = outcome(gated, given)
    found = outcome(gated, given, frozen=(frozen,))
    assert set(found) == set(expected) - {f"d_{frozen}"}
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_no_elements(shape):
    found = outcome(gated, operands(shape, DTYPES["bf16"]))
    assert all(x.shape == shape for x in found.values())
    packed = outcome(lambda a: gated(a), {"a": operands(shape, DTYPES["bf16"])["a"]})
    assert packed["result 0"].shape == (*shape[:-1], shape[-1] // 2) and packed["d_a"].shape == shape


@activations
def test_gradcheck(activation):
    a, b = (x.requires_grad_() for x in operands((2, 5), (FP64, FP64)).values())
    assert torch.autograd.gradcheck(lambda a, b: gated(a, b, activation=activation), (a, b))
    packed = randn(3, 6, seed=1, dtype=FP64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: gated(a, activation=activation), packed)


def test_no_second_derivative():
    a, b = (x.requires_grad_() for x in operands((2, 5), DTYPES["fp32"]).values())
    (gradient,) = torch.autograd.grad(gated(a, b).square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("packed", [False, True], ids=["two tensors", "packed"])
@activations
def test_compiles_into_one_graph(activation, packed):
    given = dict(list(operands((4, 24), DTYPES["bf16"]).items())[: 1 if packed else 2])

    def function(a, b=None):
        return gated(a, b, activation=activation)

    expected = outcome(function, given)
    found = outcome(torch.compile(function, backend="aot_eager", fullgraph=True), given)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], atol=0.05, rtol=0.02)


def test_addresses_in_64_bits():
    """The third row lies more than 2^31 numbers behind the first. Memory is used only where it is touched."""
    stride = 2**30 + 64
    far = torch.empty(2 * stride + 64, dtype=BF16, device=DEVICE).as_strided((3, 64), (stride, 1))
    given = operands((3, 64), DTYPES["bf16"])
    expected = outcome(gated, given)
    for name in given:
        far.copy_(given[name])
        assert torch.equal(gated(**given | {name: far}), expected["result 0"])
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    out = gated(**leaves)
    far.copy_(randn(3, 64, seed=100, dtype=BF16))
    found = torch.autograd.grad(out, list(leaves.values()), far)
    assert all(torch.equal(g, expected[f"d_{name}"]) for name, g in zip(leaves, found))


@pytest.mark.skipif(not (INTERPRETED or DEVICE.type == "cuda"), reason="the kernels' grid")
def test_any_length_fits_the_grid(monkeypatch):
    """CUDA allows 2^31 - 1 blocks along the first dimension and 65,535 along the others."""
    from logitless.layers import gated_triton

    found = []

    class Grid:
        def __getitem__(self, grid):
            found.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(gated_triton, "gated_kernel", Grid())
    for shape in ((1, 2**40), (2**20, 2**20), (2**30, 64)):
        x = torch.empty(shape, device="meta")
        gated_triton.forward(x, x, "silu")
        gated_triton.forward(x[..., : shape[1] // 2], x[..., shape[1] // 2 :], "silu")
    assert all(len(grid) == 1 and grid[0] < 2**31 for grid in found), found


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (
            ValueError,
            r"activation: expected one of 'silu', 'gelu_tanh', 'gelu_erf', got 'relu'; ",
            {"activation": "relu"},
        ),
        (ValueError, r"b: expected a's shape \(4, 24\), got \(4, 1\); ", {"b": randn(4, 1, seed=0)}),
        (
            ValueError,
            r"b: expected a's device .*, got meta; move b there",
            {"b": torch.empty(4, 24, device="meta")},
        ),
        (
            TypeError,
            r"b: expected a floating-point tensor, got torch.int64; ",
            {"b": torch.ones(4, 24).long()},
        ),
        (TypeError, r"a: expected a floating-point tensor, got NoneType; ", {"a": None}),
        (
            ValueError,
            r"a: expected an even last dimension without b, got \(4, 23\); ",
            {"a": randn(4, 23, seed=0), "b": None},
        ),
        (ValueError, r"a: expected shape \(..., I\), got \(\); ", {"a": torch.tensor(1.0)}),
    ],
)
def test_refused(error, message, change):
    with pytest.raises(error, match=message):
        gated(**operands((4, 24), DTYPES["fp32"]) | change)


def test_names_are_the_kernels_names():
    if not INTERPRETED and DEVICE.type != "cuda":
        pytest.importorskip("triton")
    from logitless.layers import gated_triton

    assert list(ACTIVATIONS) == list(gated_triton.KINDS)
