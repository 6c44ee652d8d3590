"""Gated RMSNorm, in both orders of norm and gate, against fp64 and against the modules of transformers."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from logitless.layers import gated_norm
from logitless.layers.gated_norm import gated_rms_norm
from tests.cases import covering_array
from tests.kernels.support import DEVICE
from tests.layers.layer_support import EPS, assert_as_good, outcome, randn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Dtypes of x, gate and weight.
DTYPES = {
    "fp32": (FP32, FP32, FP32),
    "bf16": (BF16, BF16, BF16),
    "fp16": (FP16, FP16, FP16),
    "fp32 weight": (BF16, BF16, FP32),
    "fp32 x": (FP32, BF16, BF16),
    "fp32 gate": (BF16, FP32, BF16),
}
# Shape and number of groups.
SHAPES = {
    "3x40": ((3, 40), 1),
    "2x3x128": ((2, 3, 128), 4),
    "1x3": ((1, 3), 1),
    "2x999": ((2, 999), 3),
    "19x64": ((19, 64), 1),
    "2x3x5x48": ((2, 3, 5, 48), 2),
    "2x5000": ((2, 5000), 1),
    "40x96": ((40, 96), 2),  # several programs for each group
}


class KimiRMSNormGated(nn.Module):
    """What Kimi Linear's module computes, which the oldest transformers that is supported does not have."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x, gate):
        h = x.float()
        h = self.weight.float() * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps))
        return (h * torch.sigmoid(gate.float())).to(x.dtype)


# Stock module, and options of the operator.
MODULES = {
    "qwen3.5": (Qwen3_5RMSNormGated, {}),
    "kimi": (KimiRMSNormGated, {"rounding": "single", "activation": "sigmoid"}),
    "zamba2": (Zamba2RMSNormGated, {"gate_first": True}),
}
modules = pytest.mark.parametrize("module", MODULES)


def operands(shape, dtypes) -> dict[str, Tensor]:
    x, gate = (2 * randn(*shape, seed=i, dtype=dtypes[i]) for i in range(2))
    return {"x": x, "gate": gate, "weight": 1 + randn(shape[-1], seed=2, dtype=dtypes[2]) / 2}


def plain(x: Tensor, gate: Tensor, weight: Tensor, options: dict) -> Tensor:
    """From the papers' formulas."""
    act = 1 / (1 + torch.exp(-gate))
    act = act if options.get("activation") == "sigmoid" else gate * act
    h = x * act if options.get("gate_first") else x
    groups = h.reshape(*h.shape[:-1], -1, options["group_size"])
    y = weight * (groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + EPS)).reshape(h.shape)
    return y if options.get("gate_first") else y * act


def variants(module: str, H: int, groups: int):
    """Ours, the plain computation and the stock module, each as a function of x, gate and weight."""
    cls, options = MODULES[module]
    sizes = {"group_size": H // groups} if cls is Zamba2RMSNormGated else {}
    stock = cls(H, eps=EPS, **sizes)
    options = options | {"group_size": sizes.get("group_size", H)}

    def ours(x, gate, weight):
        return gated_rms_norm(x, gate, weight, eps=EPS, **options)

    def stocks(x, gate, weight):
        return torch.func.functional_call(stock, {"weight": weight}, (x, gate))

    return ours, lambda x, gate, weight: plain(x, gate, weight, options), stocks


@pytest.mark.parametrize(
    "case",
    covering_array(
        {"shape": list(SHAPES), "dtypes": list(DTYPES), "module": list(MODULES)},
        has_effect=lambda case: True,
        repeats=True,
    ),
)
def test_as_good_as_the_stock_module(case):
    shape, groups = SHAPES[case["shape"]]
    given = operands(shape, DTYPES[case["dtypes"]])
    ours, truth, stock = variants(case["module"], shape[-1], groups)
    assert_as_good(outcome(ours, given), outcome(truth, given, dtype=FP64), outcome(stock, given))


@modules
@pytest.mark.parametrize("dtypes", ["bf16", "fp16", "fp32 weight"])
def test_rounds_where_the_model_does(module, dtypes):
    """Nearly every number has the model's bits; rounded once more or less, a quarter would not."""
    given = operands((16, 512), DTYPES[dtypes])
    ours, _, stock = variants(module, 512, 4)
    actual, expected = outcome(ours, given), outcome(stock, given)
    assert actual["result 0"].dtype == expected["result 0"].dtype
    assert (actual["result 0"] == expected["result 0"]).double().mean() > 0.99


@modules
def test_a_gate_that_is_part_of_a_projection(module):
    """Mamba's mixer splits the gate, x and more from one product: rows with gaps, and one gradient of all."""
    projected = {"projected": 2 * randn(2, 5, 2 * 96 + 7, seed=0), "weight": 1 + randn(96, seed=1) / 2}

    def split(function):
        def run(projected, weight):
            gate, x, _ = projected.split([96, 96, 7], dim=-1)
            return function(x, gate, weight)

        return run

    ours, truth, stock = map(split, variants(module, 96, 3))
    assert_as_good(outcome(ours, projected), outcome(truth, projected, dtype=FP64), outcome(stock, projected))


@modules
def test_far_from_zero(module):
    """Saturated gates on both sides; nothing overflows on the way."""
    values = [-1e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e4]
    gate = torch.tensor(values, device=DEVICE)
    given = {"x": randn(10, seed=0), "gate": gate, "weight": randn(10, seed=1)}
    ours, _, stock = variants(module, 10, 1)
    actual, expected = outcome(ours, given), outcome(stock, given)
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name])


def test_wide_groups_take_the_twin():
    H = gated_norm.MAX_COLUMNS + 8
    given = operands((2, H), DTYPES["fp32"])
    ours, truth, stock = variants("qwen3.5", H, 1)
    assert_as_good(outcome(ours, given), outcome(truth, given, dtype=FP64), outcome(stock, given))


def test_without_a_weight():
    given = {name: x for name, x in operands((4, 7, 24), DTYPES["fp32"]).items() if name != "weight"}
    ones = torch.ones(24, device=DEVICE)
    for options in ({}, {"gate_first": True, "group_size": 8}):
        actual = outcome(lambda **x: gated_rms_norm(**x, **options), given)
        expected = outcome(lambda **x: gated_rms_norm(**x, weight=ones, **options), given)
        assert actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in actual)
