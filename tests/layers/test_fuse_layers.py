"""`fuse_layers` on every family: what is fused, and that loss and gradients stay what they were."""

import copy
import math

import pytest
import torch
import transformers

from logitless.models import fuse_layers
from tests.cases import usually
from tests.layers.tiny import (
    ADD_NORM,
    FAMILIES,
    ROPE,
    SIZES,
    assert_same,
    counted,
    disturb,
    error,
    step,
    tiny,
)
from tests.models import every

families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_all_that_is_known_is_fused(family):
    expected, model = FAMILIES[family], tiny(family)
    report = fuse_layers(model).report
    fused = {report.classes[name].removesuffix("RMSNorm"): what for name, what in report.fused.items()}
    attention = expected.attention
    kinds = {
        "Attention": attention if isinstance(attention, tuple) else (attention,),
        "DecoderLayer": expected.layer,
        "MLP": (expected.mlp,),
        "Experts": (expected.experts,),
    }
    for suffix, what in kinds.items():
        actual = [each for cls, each in fused.items() if cls.endswith(suffix)]
        assert actual == ([what] if any(what) else []), suffix
    norms = [name for name, module in model.named_modules() if "Norm" in type(module).__name__]
    assert norms and all(report.fused[name] == ("norm",) for name in norms)
    # What is left has a reason: Cohere's layers, which add attention and MLP at once.
    left = {report.classes[name] for name in report.skipped}
    assert left <= {"CohereDecoderLayer"}, left


@families
def test_loss_and_gradients_in_fp32_are_those_of_the_stock_model(family):
    model = tiny(family)
    expected = step(model)
    fuse_layers(model)
    assert_same(step(model), expected)


@pytest.mark.parametrize("kind", usually(["bf16"], ["bf16", "fp32 under autocast", "fp16"]))
def test_the_error_against_fp64_is_that_of_the_stock_models(kind):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    # More tokens than in the other tests: of a few, the error is a lottery.
    ids = torch.randint(3, SIZES["vocab_size"], (8, 16), generator=torch.Generator().manual_seed(0))
    ratios = {}
    for family in FAMILIES:
        model = tiny(family, dtype)
        # transformers' experts have no fp64.
        has_experts = any("Experts" in type(module).__name__ for module in model.modules())
        truth = step(copy.deepcopy(model).to(torch.float32 if has_experts else torch.float64), ids)
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in kind):
            stock = error(step(model, ids), truth)
            fuse_layers(model)
            ratios[family] = error(step(model, ids), truth) / stock
        assert stock > 1e-4
    assert max(ratios.values()) < 1.25, ratios
    assert math.prod(ratios.values()) ** (1 / len(ratios)) < 1.02, ratios


def test_the_language_tower_of_a_vision_model():
    sizes = {
        **SIZES,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=sizes, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    disturb(model)
    expected = step(model)
    report = fuse_layers(model).report
    layer = "model.language_model.layers.1"
    assert report.fused[layer] == (ADD_NORM,) and report.fused[f"{layer}.self_attn"] == (ROPE,)
    assert report.fused[f"{layer}.mlp"] == ("gate act_fn",)
    assert_same(step(model), expected)


def test_a_rotation_that_stores_neighbours_in_halves():
    model = every.tiny("DeepseekV3ForCausalLM")
    disturb(model)
    expected = step(model)
    undo = fuse_layers(model)
    attention = [name for name, what in undo.report.fused.items() if "self_attn" in name.split(".")[-1]]
    assert [undo.report.fused[name] for name in attention] == [
        ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
    ] * 2
    with counted() as calls:
        assert_same(step(model), expected, 1e-5)
    assert calls["rope"] == 2
    undo()
    actual = step(model)
    assert all(torch.equal(actual.gradients[name], x) for name, x in expected.gradients.items())


def test_one_line_in_the_log_says_what_was_fused(caplog):
    with caplog.at_level("INFO", logger="logitless"):
        fuse_layers(tiny("Llama"))
    (record,) = caplog.records
    model, _, fused = record.getMessage().partition(": fuse_layers fused ")
    assert model == "LlamaForCausalLM"
    assert set(fused.split(", ")) == {
        "5 LlamaRMSNorm",
        "2 LlamaAttention",
        "2 LlamaMLP",
        "2 LlamaDecoderLayer",
    }
