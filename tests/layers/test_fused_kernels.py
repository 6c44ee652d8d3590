"""Models with fused layers through the Triton kernels, on a GPU or interpreted, with the strides that models
make."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from logitless.layers import norm
from logitless.models import fuse_layers
from tests.kernels.support import DEVICE, INTERPRETED
from tests.layers.tiny import IDS, assert_same, disturb, error, step, tiny
from tests.models import every

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED, reason="test_fused_models.py tests the twins"
)
BF16 = torch.bfloat16


OFTEN = ("Qwen3", "Cohere", "Gemma4")
FAMILIES = [
    *OFTEN,
    *(pytest.param(x, marks=pytest.mark.repeats) for x in ("Gemma3", "Mixtral", "Phi3", "Granite")),
]


# Between them: every operator, both orders of norm and addition, packed halves, both orders of norm and
# transposition, interleaved rotation, LayerNorm, rotation of one tensor, gates of experts.
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_in_fp32(family):
    model, ids = tiny(family, num_hidden_layers=1).to(DEVICE), IDS.to(DEVICE)
    expected = step(model, ids)
    fuse_layers(model)
    assert norm._runs_triton(torch.zeros(2, 2, device=DEVICE))
    assert_same(step(model, ids), expected, 1e-5)


def test_a_gated_norm_in_fp32():
    """Its gate is a part of a wider tensor."""
    model, ids = every.tiny("BambaForCausalLM").to(DEVICE), IDS.to(DEVICE)
    disturb(model)
    expected = step(model, ids)
    assert "gated norm" in {part for parts in fuse_layers(model).report.fused.values() for part in parts}
    assert_same(step(model, ids), expected, 1e-5)


def test_a_clamped_gate_in_fp32():
    model, ids = every.tiny("GptOssForCausalLM").to(DEVICE), IDS.to(DEVICE)
    disturb(model)
    expected = step(model, ids)
    fused = {part for parts in fuse_layers(model).report.fused.values() for part in parts}
    assert "clamped expert gate" in fused
    assert_same(step(model, ids), expected, 1e-5)


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.repeats), "fp32 under autocast"])
def test_the_error_in_bf16(kind):
    ids, ratios = IDS.to(DEVICE), []
    for family in ("Qwen3", "Gemma3", "Phi3"):
        model = tiny(family, BF16 if kind == "bf16" else torch.float32, num_hidden_layers=1).to(DEVICE)
        truth = step(copy.deepcopy(model).double(), ids)
        with torch.autocast(DEVICE.type, BF16, enabled=kind != "bf16"):
            stock = error(step(model, ids), truth)
            fuse_layers(model)
            ratios.append(error(step(model, ids), truth) / stock)
    assert max(ratios) < 1.3 and torch.tensor(ratios).log().mean() < 0.1, ratios
