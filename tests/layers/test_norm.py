"""RMSNorm and LayerNorm with the residual addition around them, against fp64 and the stock modules."""

import pytest
import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from logitless.layers import norm
from logitless.layers.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_add
from tests.cases import covering_array
from tests.kernels.support import DEVICE, INTERPRETED
from tests.layers.layer_support import EPS, assert_as_good, outcome, plain_rms_norm, randn

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


def operands(shape, dtypes, *, residual=True, weight=True, bias=False) -> dict[str, Tensor | None]:
    x_dtype, residual_dtype, weight_dtype = dtypes
    actual = {"x": 2 * randn(*shape, seed=0, dtype=x_dtype)}
    if residual:
        actual["residual"] = randn(*shape, seed=1, dtype=residual_dtype)
    if weight:
        actual["weight"] = 1 + randn(shape[-1], seed=2, dtype=weight_dtype) / 2
    if bias:
        actual["bias"] = randn(shape[-1], seed=3, dtype=weight_dtype)
    return actual


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


def plain_layer_norm(h: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + EPS)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def functional(module: torch.nn.Module, weight: Tensor | None):
    vectors = {} if weight is None else {"weight": weight}
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
        return placed(position, lambda h: plain_rms_norm(h, weight, rounding), x, residual)

    def stocks(x, residual=None, weight=None):
        return placed(position, functional(stock, weight), x, residual)

    return ours, plain, stocks


@pytest.mark.parametrize(
    "case",
    covering_array(
        {"shape": list(SHAPES), "dtypes": list(DTYPES), "module": list(MODULES), "position": list(POSITIONS)},
        has_effect=lambda case: True,
        repeats=True,
    ),
)
def test_rms_norm_is_as_good_as_the_stock_module(case):
    shape, dtypes = SHAPES[case["shape"]], DTYPES[case["dtypes"]]
    module, position = case["module"], case["position"]
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
        has_effect=lambda case: True,
        repeats=True,
    ),
)
def test_layer_norm_is_as_good_as_torch(case):
    shape, dtypes, position = SHAPES[case["shape"]], DTYPES[case["dtypes"]], case["position"]
    weight, bias = case["vectors"] != "neither", case["vectors"] == "weight and bias"
    given = operands(shape, dtypes, residual=position != "alone", weight=weight, bias=bias)

    def ours(x, residual=None, weight=None, bias=None):
        if position == "alone":
            return layer_norm(x, weight, bias, eps=EPS)
        multiplier = 0.22 if position == "scaled before" else 1.0
        return add_layer_norm(x, residual, weight, bias, eps=EPS, multiplier=multiplier)

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
    actual, expected = outcome(ours, given), outcome(stock, given)
    for name in actual:
        if name.startswith("result"):
            assert (actual[name] == expected[name]).double().mean() > 0.99, name


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
    assert layer_norm(given["x"], out_dtype=FP32).dtype == FP32


def test_leaves_do_not_share_their_gradients():
    """x and residual get one gradient. As `.grad` of two leaves it must be two tensors."""
    leaves = {name: x.requires_grad_() for name, x in operands((6, 40), DTYPES["fp32"]).items()}
    y, h = add_rms_norm(**leaves)
    torch.autograd.backward((y, h), (torch.ones_like(y), torch.ones_like(h)))
    x, residual = leaves["x"].grad, leaves["residual"].grad
    assert torch.equal(x, residual) and x.data_ptr() != residual.data_ptr()


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


@pytest.mark.skipif(not (INTERPRETED or DEVICE.type == "cuda"), reason="needs a GPU, or the interpreter")
@pytest.mark.parametrize("shape", [(1, 5), (256, 16), (300, 33), (1025, 3)], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_column_sum(dtype, shape):
    from logitless.layers.norm_triton import column_sum

    shares = randn(*shape, seed=0)
    torch.testing.assert_close(column_sum(shares, dtype), shares.double().sum(0).to(dtype))
