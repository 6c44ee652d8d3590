"""RMSNorm and LayerNorm with the residual addition around them, against fp64 and the stock modules."""

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from logitless.layers import norm
from logitless.layers.norm import ROUNDINGS, add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_add
from tests.cases import covering_array
from tests.kernels.support import DEVICE, INTERPRETED
from tests.layers.layer_support import (
    STRIDES,
    assert_as_good,
    hardware_rounding,  # noqa: F401
    outcome,
    randn,
    strided,
)

EPS = 1e-3  # large enough that forgetting it shows
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Dtypes of x, residual, weight (and bias).
DTYPES = {
    "fp32": (FP32, FP32, FP32),
    "bf16": (BF16, BF16, BF16),
    "fp16": (FP16, FP16, FP16),
    "fp32 weight": (BF16, BF16, FP32),
    "fp32 residual": (BF16, FP32, FP32),
    "fp32 residual, fp16": (FP16, FP32, FP32),
}
FEW = ("fp32", "bf16", "fp32 residual")
SHAPES = {
    "3x40": (3, 40),
    "2x3x128": (2, 3, 128),
    "1x3": (1, 3),
    "5x1000": (5, 1000),
    "19x64": (19, 64),
    "2x1536": (2, 1536),
    "3x1100": (3, 1100),
    "2x8450": (2, 8450),  # in registers without the weight
}
MODULES = {
    "llama": (LlamaRMSNorm, "llama"),
    "olmo2": (Olmo2RMSNorm, "single"),
    "gemma": (GemmaRMSNorm, "gemma"),
    "gemma3": (Gemma3RMSNorm, "gemma"),
    "llama4": (Llama4TextL2Norm, "llama"),
}
POSITIONS = ("alone", "before", "scaled before", "after")

modules = pytest.mark.parametrize("module", MODULES)
positions = pytest.mark.parametrize("position", POSITIONS)
few_dtypes = pytest.mark.parametrize("dtypes", [DTYPES[name] for name in FEW], ids=FEW)


def operands(shape, dtypes, *, residual=True, weight=True, bias=False) -> dict[str, Tensor | None]:
    x_dtype, residual_dtype, weight_dtype = dtypes
    found = {"x": 2 * randn(*shape, seed=0, dtype=x_dtype)}
    if residual:
        found["residual"] = randn(*shape, seed=1, dtype=residual_dtype)
    if weight:
        found["weight"] = 1 + randn(shape[-1], seed=2, dtype=weight_dtype) / 2
    if bias:
        found["bias"] = randn(shape[-1], seed=3, dtype=weight_dtype)
    return found


def placed(position: str, normalize, x: Tensor, residual: Tensor | None):
    """What a decoder layer does around its norm, in plain PyTorch."""
    match position:
        case "alone":
            return normalize(x)
        case "before":
            h = residual + x
            return normalize(h), h
        case "scaled before":
            h = residual + x * 0.22
            return normalize(h), h
        case "after":
            return residual + normalize(x)


def plain_rms_norm(h: Tensor, weight: Tensor | None, gemma: bool) -> Tensor:
    y = h / torch.sqrt(h.square().mean(-1, keepdim=True) + EPS)
    if weight is None:
        return y
    return y * (1 + weight) if gemma else y * weight


def plain_layer_norm(h: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def functional(module: torch.nn.Module, weight: Tensor | None, bias: Tensor | None = None):
    vectors = {name: x for name, x in (("weight", weight), ("bias", bias)) if x is not None}
    return lambda h: torch.func.functional_call(module, vectors, (h,))


def rms_variants(module: str, position: str, H: int):
    """Ours, the plain computation and the stock module, each as a function of x, residual and weight."""
    kind, rounding = MODULES[module]
    stock = kind(EPS) if kind is Llama4TextL2Norm else kind(H, EPS)
    options = {"eps": EPS, "rounding": rounding}

    def ours(x, residual=None, weight=None):
        match position:
            case "alone":
                return rms_norm(x, weight, **options)
            case "before":
                return add_rms_norm(x, residual, weight, **options)
            case "scaled before":
                return add_rms_norm(x, residual, weight, **options, multiplier=0.22)
            case "after":
                return rms_norm_add(x, residual, weight, **options)

    def plain(x, residual=None, weight=None):
        return placed(position, lambda h: plain_rms_norm(h, weight, rounding == "gemma"), x, residual)

    def stocks(x, residual=None, weight=None):
        return placed(position, functional(stock, weight), x, residual)

    return ours, plain, stocks


@pytest.mark.parametrize(
    "case",
    covering_array(
        {"shape": list(SHAPES), "dtypes": list(DTYPES), "module": list(MODULES), "position": list(POSITIONS)},
        lambda case: True,
    ),
)
def test_rms_norm_is_as_good_as_the_stock_module(case):
    shape, dtypes, module, position = (
        SHAPES[case["shape"]],
        DTYPES[case["dtypes"]],
        case["module"],
        case["position"],
    )
    given = operands(shape, dtypes, residual=position != "alone", weight=module != "llama4")
    ours, plain, stock = rms_variants(module, position, shape[-1])
    assert_as_good(outcome(ours, given), outcome(plain, given, dtype=FP64), outcome(stock, given))


@pytest.mark.parametrize(
    "case",
    covering_array(
        {
            "shape": list(SHAPES),
            "dtypes": list(DTYPES),
            "position": list(POSITIONS[:-1]),
            "vectors": ["weight and bias", "weight", "neither"],
        },
        lambda case: True,
    ),
)
def test_layer_norm_is_as_good_as_torch(case):
    shape, dtypes, position = SHAPES[case["shape"]], DTYPES[case["dtypes"]], case["position"]
    weight, bias = case["vectors"] != "neither", case["vectors"] == "weight and bias"
    given = operands(shape, dtypes, residual=position != "alone", weight=weight, bias=bias)

    def ours(x, residual=None, weight=None, bias=None):
        if position == "alone":
            return layer_norm(x, weight, bias, eps=EPS)
        return add_layer_norm(
            x, residual, weight, bias, eps=EPS, multiplier=0.22 if position == "scaled before" else 1.0
        )

    def plain(x, residual=None, weight=None, bias=None):
        return placed(position, lambda h: plain_layer_norm(h, weight, bias), x, residual)

    def stock(x, residual=None, weight=None, bias=None):
        def normalize(h):
            vectors = [v if v is None else v.to(h.dtype) for v in (weight, bias)]
            return torch.nn.functional.layer_norm(h, h.shape[-1:], *vectors, eps=EPS)

        return placed(position, normalize, x, residual)

    assert_as_good(outcome(ours, given), outcome(plain, given, dtype=FP64), outcome(stock, given))


@pytest.mark.parametrize("position", ["alone", "before"])
@modules
def test_rounds_where_the_model_does(module, position):
    """Nearly every number has the model's bits; rounded once more or less, a quarter would not."""
    given = operands((16, 512), DTYPES["bf16"], residual=position != "alone", weight=module != "llama4")
    ours, _, stock = rms_variants(module, position, 512)
    found, expected = outcome(ours, given), outcome(stock, given)
    for name in found:
        if name.startswith("result"):
            assert (found[name] == expected[name]).double().mean() > 0.99, name


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_layer_norm_is_cohere_s(dtype):
    given = operands((5, 48), (dtype,) * 3, residual=False)
    stock = CohereLayerNorm(48, eps=EPS)
    assert_as_good(
        outcome(lambda x, weight: layer_norm(x, weight, eps=EPS), given),
        outcome(lambda x, weight: plain_layer_norm(x, weight, None), given, dtype=FP64),
        outcome(lambda x, weight: functional(stock, weight)(x), given),
    )


@pytest.mark.parametrize("out_dtype", [BF16, FP16])
@modules
def test_out_dtype(module, out_dtype):
    """An fp32 residual stream under autocast: the product after the norm takes half precision anyway."""
    given = operands((6, 72), (out_dtype, FP32, FP32), weight=module != "llama4")
    rounding = MODULES[module][1]
    _, plain, stock = rms_variants(module, "before", 72)

    def ours(x, residual, weight=None):
        return add_rms_norm(x, residual, weight, eps=EPS, rounding=rounding, out_dtype=out_dtype)

    def rounded(x, residual, weight=None):
        y, h = stock(x, residual, weight)
        return y.to(out_dtype), h

    assert_as_good(outcome(ours, given), outcome(plain, given, dtype=FP64), outcome(rounded, given))
    layer = layer_norm(given["x"], out_dtype=FP32)
    assert layer.dtype == FP32


@few_dtypes
@pytest.mark.parametrize("kind", STRIDES)
@positions
def test_strided_operands_and_gradients(position, kind, dtypes):
    given = operands((4, 5, 24), dtypes, residual=position != "alone")
    ours, _, _ = rms_variants("llama", position, 24)
    expected = outcome(ours, given)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    views = {name: strided(x, "every other" if x.dim() == 1 else kind) for name, x in leaves.items()}
    results = ours(**views)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [strided(randn(*y.shape, seed=i, dtype=y.dtype), kind) for i, y in enumerate(results, 100)]
    found = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), upstream)))
    for i, y in enumerate(results):
        torch.testing.assert_close(y, expected[f"result {i}"])
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[f"d_{name}"])


@pytest.mark.parametrize("only", ["x", "residual"])
def test_one_strided_operand(only):
    given = operands((4, 5, 24), DTYPES["fp32"])
    expected = outcome(add_rms_norm, given)
    found = outcome(lambda **leaves: add_rms_norm(**leaves | {only: strided(leaves[only], "sliced")}), given)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name])


def test_expanded_gradients():
    given = operands((3, 4, 24), DTYPES["fp32"])
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    y, h = add_rms_norm(**leaves)
    found = torch.autograd.grad(y.sum() + 2 * h.sum(), list(leaves.values()))
    y, h = add_rms_norm(**leaves)
    expected = torch.autograd.grad(
        (y, h), list(leaves.values()), (torch.ones_like(y), 2 * torch.ones_like(h))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@few_dtypes
@pytest.mark.parametrize("used", ["y", "h"])
def test_one_of_the_two_results_used(used, dtypes):
    given = operands((6, 40), dtypes)
    which = "yh".index(used)

    def pick(function):
        return lambda **leaves: function(**leaves)[which]

    ours, plain, stock = rms_variants("llama", "scaled before", 40)
    frozen = ("weight",) if used == "h" else ()
    found = [
        outcome(pick(ours), given, frozen=frozen),
        outcome(pick(plain), given, dtype=FP64, frozen=frozen),
        outcome(pick(stock), given, frozen=frozen),
    ]
    assert_as_good(*found)
    if used == "h":
        leaves = {name: x.requires_grad_() for name, x in given.items()}
        assert torch.autograd.grad(ours(**leaves)[1].sum(), leaves["weight"], allow_unused=True) == (None,)


@pytest.mark.parametrize("trainable", ["x", "residual", "weight", "bias"])
def test_frozen_operands(trainable):
    given = operands((6, 40), DTYPES["fp32"], bias=True)
    expected = outcome(add_layer_norm, given)
    frozen = tuple(name for name in given if name != trainable)
    found = outcome(add_layer_norm, given, frozen=frozen)
    assert set(found) == {"result 0", "result 1", f"d_{trainable}"}
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name


@few_dtypes
@positions
def test_again_is_the_same_and_nothing_is_overwritten(position, dtypes):
    given = operands((37, 136), dtypes, residual=position != "alone")
    ours, _, _ = rms_variants("llama", position, 136)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    results = ours(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [randn(*y.shape, seed=i, dtype=y.dtype) for i, y in enumerate(results)]
    everything = [*leaves.values(), *results, *upstream]
    kept = [x.detach().clone() for x in everything]
    first = torch.autograd.grad(results, list(leaves.values()), upstream, retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(results, list(leaves.values()), upstream, retain_graph=True)
    for x, before in zip(everything, kept):
        assert torch.equal(x, before)
    for before, copy, again in zip(first, copies, second):
        assert torch.equal(before, copy) and torch.equal(copy, again)
    once_more = ours(**leaves)
    for a, b in zip(results, once_more if isinstance(once_more, tuple) else (once_more,)):
        assert torch.equal(a, b)


def test_leaves_do_not_share_their_gradients():
    """x and residual get one gradient. As `.grad` of two leaves it must be two tensors."""
    leaves = {name: x.requires_grad_() for name, x in operands((6, 40), DTYPES["fp32"]).items()}
    y, h = add_rms_norm(**leaves)
    torch.autograd.backward((y, h), (torch.ones_like(y), torch.ones_like(h)))
    x, residual = leaves["x"].grad, leaves["residual"].grad
    assert torch.equal(x, residual) and x.data_ptr() != residual.data_ptr()


def test_saves_only_h_and_a_number_a_row():
    given = operands((6, 40), DTYPES["bf16"])
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y, h = add_rms_norm(**leaves)
    assert sorted(x.numel() for x in saved) == [6, 40, 6 * 40]
    assert {x.data_ptr() for x in saved} >= {h.data_ptr(), leaves["weight"].data_ptr()}
    y.sum().backward()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_no_rows(shape):
    given = operands(shape, DTYPES["bf16"], bias=True)
    found = outcome(add_layer_norm, given)
    assert found["result 0"].shape == found["result 1"].shape == found["d_x"].shape == shape
    assert found["d_weight"].shape == (8,) and not found["d_weight"].any() and not found["d_bias"].any()
    found = outcome(add_rms_norm, operands(shape, DTYPES["fp32 residual"]))
    assert found["result 0"].shape == shape and not found["d_weight"].any()


def test_wide_rows_take_the_twin():
    given = operands((2, norm.MAX_COLUMNS + 8), DTYPES["fp32"])
    ours, plain, stock = rms_variants("llama", "before", norm.MAX_COLUMNS + 8)
    assert_as_good(outcome(ours, given), outcome(plain, given, dtype=FP64), outcome(stock, given))


@pytest.mark.parametrize("kind", ["not a number", "infinite"])
def test_not_a_number_stays_in_its_row(kind):
    given = operands((4, 24), DTYPES["fp32"])
    given["x"][1, 3] = float("nan" if kind == "not a number" else "inf")
    y, h = add_rms_norm(**given)
    assert y[1].isnan().any() and y[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gradcheck(rounding):
    x, residual, weight = (t.requires_grad_() for t in operands((2, 3, 5), (FP64,) * 3).values())
    check = torch.autograd.gradcheck
    assert check(
        lambda *a: add_rms_norm(*a, eps=EPS, rounding=rounding, multiplier=0.3), (x, residual, weight)
    )
    assert check(lambda *a: rms_norm_add(*a, eps=EPS, rounding=rounding), (x, residual, weight))
    assert check(lambda *a: rms_norm(*a, eps=EPS, rounding=rounding), (x, weight))
    assert check(lambda *a: rms_norm(*a, eps=EPS, rounding=rounding), (x,))


def test_gradcheck_of_layer_norm():
    given = [t.requires_grad_() for t in operands((2, 3, 5), (FP64,) * 3, bias=True).values()]
    assert torch.autograd.gradcheck(lambda *a: add_layer_norm(*a, eps=EPS, multiplier=0.3), given)
    x, _, weight, bias = given
    assert torch.autograd.gradcheck(lambda *a: layer_norm(*a, eps=EPS), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *a: layer_norm(*a, eps=EPS), (x,))


def test_no_second_derivative():
    x = randn(2, 8, seed=0).requires_grad_()
    (gradient,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@positions
def test_compiles_into_one_graph(position):
    given = operands((4, 24), DTYPES["bf16"], residual=position != "alone")
    ours, _, _ = rms_variants("llama", position, 24)
    expected = outcome(ours, given)
    found = outcome(torch.compile(ours, backend="aot_eager", fullgraph=True), given)
    for name, x in found.items():
        assert x.dtype == expected[name].dtype
        assert torch.allclose(x.float(), expected[name].float(), atol=0.1, rtol=0.02), name


@pytest.mark.skipif(not (INTERPRETED or DEVICE.type == "cuda"), reason="a kernel's own")
@pytest.mark.parametrize("shape", [(1, 5), (256, 16), (300, 33), (1025, 3)], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_column_sum(dtype, shape):
    from logitless.layers.norm_triton import column_sum

    shares = randn(*shape, seed=0)
    torch.testing.assert_close(column_sum(shares, dtype), shares.double().sum(0).to(dtype))


def test_addresses_in_64_bits():
    """The third row lies more than 2^31 numbers behind the first. Memory is used only where it is touched."""
    stride = 2**30 + 64
    buffer = torch.empty(2 * stride + 64, dtype=BF16, device=DEVICE)
    x = buffer.as_strided((3, 64), (stride, 1))
    given = operands((3, 64), DTYPES["bf16"])
    expected = outcome(add_rms_norm, given)
    for far in ("x", "residual"):
        x.copy_(given[far])
        y, h = add_rms_norm(**given | {far: x})
        assert torch.equal(y, expected["result 0"]) and torch.equal(h, expected["result 1"])
    for i, name in enumerate(("y", "h")):
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        results = add_rms_norm(**leaves)
        upstream = [randn(3, 64, seed=100 + j, dtype=BF16) for j in range(2)]
        x.copy_(upstream[i])
        upstream[i] = x
        found = torch.autograd.grad(results, list(leaves.values()), upstream)
        assert all(torch.equal(g, expected[f"d_{n}"]) for n, g in zip(leaves, found)), name


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (
            ValueError,
            r"residual: expected x's shape \(4, 24\), got \(4, 25\); ",
            {"residual": randn(4, 25, seed=0)},
        ),
        (
            ValueError,
            r"residual: expected x's shape \(4, 24\), got \(24,\); ",
            {"residual": randn(24, seed=0)},
        ),
        (
            ValueError,
            r"weight: expected shape \(24,\), one entry per column, got \(23,\); ",
            {"weight": randn(23, seed=0)},
        ),
        (
            ValueError,
            r"weight: expected x's device .*, got meta; move weight there",
            {"weight": torch.empty(24, device="meta")},
        ),
        (
            ValueError,
            r"residual: expected x's device .*, got meta; ",
            {"residual": torch.empty(4, 24, device="meta")},
        ),
        (
            TypeError,
            r"x: expected a floating-point tensor, got torch.int64; ",
            {"x": torch.ones(4, 24, dtype=torch.int64)},
        ),
        (TypeError, r"weight: expected a floating-point tensor, got list; ", {"weight": [1.0] * 24}),
        (
            ValueError,
            r"rounding: expected one of 'llama', 'single', 'gemma', got 'gemma9'; ",
            {"rounding": "gemma9"},
        ),
        (
            ValueError,
            r"x: expected shape \(..., H\), H at least 1, got \(\); ",
            {"x": torch.tensor(1.0)},
        ),
        (
            ValueError,
            r"x: expected shape \(..., H\), H at least 1, got \(4, 0\); ",
            {"x": torch.ones(4, 0)},
        ),
    ],
)
def test_refused(error, message, change):
    given = operands((4, 24), DTYPES["fp32"]) | change
    with pytest.raises(error, match=message):
        add_rms_norm(**given)


def test_refused_bias():
    given = operands((4, 24), DTYPES["fp32"])
    with pytest.raises(ValueError, match=r"bias: expected shape \(24,\), one entry per column, got \(1,\); "):
        add_layer_norm(**given, bias=randn(1, seed=0))
    with pytest.raises(TypeError, match="bias: expected a floating-point tensor, got torch.int64; "):
        layer_norm(given["x"], bias=torch.ones(24, dtype=torch.int64))
