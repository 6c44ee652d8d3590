"""Fused layers over two processes: FSDP2, and a tensor-parallel plan of transformers."""

import peft
import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from logitless.models import fuse_layers
from tests.layers.tiny import Step, assert_same, counted, step, tiny
from tests.ranks import in_processes


def whole(actual: Step) -> Step:
    gradients = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in actual.gradients.items()}
    return Step(actual.loss, gradients)


def sharded(folder: str) -> dict:
    """FSDP2: fused before and after, one norm wrapped by itself; and undone while it is sharded."""
    actual = {}
    for order in ("stock", "fused before", "fused after"):
        model = tiny("Qwen3")
        undo = fuse_layers(model) if order == "fused before" else None
        fully_shard(model.model.layers[0].post_attention_layernorm)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if order == "fused after":
            undo = fuse_layers(model)
        with counted() as calls:
            actual[order] = whole(step(model))
        actual[f"{order}, names"] = {type(module).__name__ for module in model.modules()}
        actual[f"{order}, calls"] = calls
        if undo is not None:
            undo()
            actual[f"{order}, undone"] = whole(step(model))
    return actual


def parallel(folder: str) -> dict:
    """A plan of transformers: q_norm's gradient is summed over the ranks, inside its instance's forward."""
    actual = {}
    for kind in ("stock", "fused"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
        # transformers 5.17 sums in a hook, which ours honour; later ones replace the forward pass.
        actual["in a hook"] = bool(model.model.layers[0].self_attn.q_norm._backward_hooks)
        if kind == "fused":
            actual["report"] = fuse_layers(model).report
        actual[kind] = whole(step(model))
    return actual


def with_adapters() -> torch.nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(tiny("Qwen3"), config)


def lora(folder: str) -> dict:
    """LoRA under FSDP2, with one A that is wrapped by itself, and under DDP."""
    actual = {}
    for order in ("stock", "fused before", "fused after"):
        model = with_adapters()
        handle = fuse_layers(model) if order == "fused before" else None
        layers = model.get_base_model().model.layers
        fully_shard(layers[0].mlp.up_proj.lora_A.default)
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        if order == "fused after":
            handle = fuse_layers(model)
        actual[order] = whole(step(model))
        actual[f"{order}, reasons"] = dict(handle.report.stock_calls) if handle else {}
    model = with_adapters()
    report = fuse_layers(model).report
    actual["DDP"] = step(DistributedDataParallel(model))
    actual["DDP, reasons"] = dict(report.stock_calls)
    return actual


def both(folder: str) -> tuple[dict, dict, dict]:
    return sharded(folder), parallel(folder), lora(folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny("Qwen3").save_pretrained(folder)
    return in_processes(2, both, str(folder))


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("order", ["fused before", "fused after"])
def test_fsdp2(ranks, rank, order):
    actual, expected = ranks[rank][0], step(tiny("Qwen3"))
    assert_same(actual["stock"], expected)
    assert_same(actual[order], expected)
    assert_same(actual[f"{order}, undone"], expected)
    assert actual[f"{order}, names"] == actual["stock, names"] >= {"FSDPQwen3DecoderLayer"}
    # The norm that was wrapped by itself gathers its weight in hooks: nothing goes around them.
    assert actual[f"{order}, calls"] == {"rms_norm": 4, "add_rms_norm": 1, "qk_norm_rope": 2, "gated": 2}


@pytest.mark.parametrize("rank", range(2))
def test_a_tensor_parallel_plan(ranks, rank):
    actual, expected = ranks[rank][1], step(tiny("Qwen3"))
    assert_same(actual["stock"], expected)
    assert_same(actual["fused"], expected)
    report = actual["report"]
    attention = report.fused["model.layers.0.self_attn"]
    if actual["in a hook"]:
        assert not report.skipped and attention == ("q_norm, k_norm and the rotation after them",)
        return
    norms = [f"model.layers.{layer}.self_attn.{norm}" for layer in range(2) for norm in ("q_norm", "k_norm")]
    assert report.skipped == dict.fromkeys(norms, "a forward attribute is set on this instance")
    assert attention == ("apply_rotary_pos_emb",)


@pytest.mark.parametrize("rank", range(2))
def test_lora_layers(ranks, rank):
    actual, expected = ranks[rank][2], step(with_adapters())
    for order in ("stock", "fused before", "fused after"):
        assert_same(actual[order], expected, 1e-5)
    names = {name.removeprefix("module."): x for name, x in actual["DDP"].gradients.items()}
    assert_same(Step(actual["DDP"].loss, names), expected, 1e-5)
    assert actual["DDP, reasons"] == {}
    for order in ("fused before", "fused after"):
        assert sum(actual[f"{order}, reasons"].values()) == 1
