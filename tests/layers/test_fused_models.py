"""What goes on working in a model with fused layers: undoing, copies, files, checkpointing, adapters,
compilers, generation, hooks."""

import copy
import pickle
import sys

import pytest
import torch
import transformers
from torch import nn

from logitless import exchange
from logitless.exchange import state_of
from logitless.layers import fuse, fused_forwards
from logitless.models import fuse_layers, patch_model
from tests.layers.tiny import IDS, assert_same, counted, step, tiny


def classes_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_the_operators_run(training):
    model = tiny("Qwen3").train(training)
    with torch.set_grad_enabled(training):
        expected = model(IDS, use_cache=False).logits
        fuse_layers(model)
        with counted() as calls:
            torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)
    # Two layers, and the norm behind them.
    assert calls == {"rms_norm": 3, "add_rms_norm": 2, "qk_norm_rope": 2, "gated": 2}


def test_undo_restores_the_model_to_the_bit():
    model, stock = tiny("Gemma3"), tiny("Gemma3")
    fuse_layers(model)()
    assert classes_of(model) == classes_of(stock)
    with counted() as calls:
        actual, expected = step(model), step(stock)
    assert not calls
    assert all(torch.equal(actual.gradients[name], expected.gradients[name]) for name in expected.gradients)
    fuse_layers(model)
    assert_same(step(model), expected)


def test_a_fused_model_is_not_fused_again():
    model = tiny("Llama")
    undo = fuse_layers(model)
    with pytest.raises(ValueError, match="model: expected one that is not fused, got 11 fused modules"):
        fuse_layers(model)
    undo()
    fuse_layers(model)


def test_copies_and_files(tmp_path):
    model, stock = tiny("Qwen3"), tiny("Qwen3")
    undo = fuse_layers(model)
    expected = step(stock)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.layers[0].input_layernorm.weight.mul_(3)
    assert_same(step(model), expected)
    assert not torch.allclose(step(copied).loss, expected.loss)
    assert model.state_dict().keys() == stock.state_dict().keys()
    stock.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    from_files = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for restored in (pickle.loads(pickle.dumps(model)), from_files):
        assert not any(state_of(module, fused_forwards.KEY) for module in restored.modules())
        assert classes_of(restored) == classes_of(stock)
        assert_same(step(restored), expected)
    undo()
    assert_same(step(model), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_still_checkpoints(monkeypatch, reentrant):
    model = tiny("Qwen3")
    expected = step(model)
    attention, ran = transformers.models.qwen3.modeling_qwen3.ALL_ATTENTION_FUNCTIONS, []
    name = model.config._attn_implementation
    monkeypatch.setitem(attention, name, lambda *a, f=attention[name], **kw: ran.append(1) or f(*a, **kw))
    fuse_layers(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    with counted() as calls:
        assert_same(step(model), expected)
    assert len(ran) == 4 and calls["add_rms_norm"] == calls["qk_norm_rope"] == 4
    model.gradient_checkpointing_disable()
    ran.clear()
    step(model)
    assert len(ran) == 2


@pytest.mark.parametrize("first", ["adapters", "fusion"])
def test_lora_and_modules_to_save(first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules="all-linear",
        modules_to_save=["post_attention_layernorm"],
        init_lora_weights=False,
    )

    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    stock, model = adapted(tiny("Qwen3")), tiny("Qwen3")
    if first == "fusion":
        fuse_layers(model)
        model = adapted(model)
    else:
        model = adapted(model)
        fuse_layers(model)
    expected = step(stock)
    assert len(expected.gradients) == 2 * (7 * 2 + 1)
    with counted() as calls:
        assert_same(step(model), expected)
    # The copy is fused; the wrapper around it is not one of our norms, so that the addition is made before.
    assert calls["rms_norm"] == 2 + 1 + 2 and calls["add_rms_norm"] == 0 and calls["gated"] == 2


def test_compiled_layers_run_the_stock_code_in_one_graph():
    model = tiny("Qwen3", num_hidden_layers=1)
    expected = step(model)
    fuse_layers(model)
    model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
    with counted() as calls:
        assert_same(step(model), expected)
    assert calls == {"rms_norm": 1}


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_generation_with_a_cache_is_that_of_the_stock_model(family):
    model = tiny(family)
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    fuse_layers(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), expected)


def test_hooks_on_norms_see_what_they_saw():
    model, seen = tiny("Qwen3"), []
    norms = [model.model.layers[0].post_attention_layernorm, model.model.layers[1].self_attn.q_norm]

    def scaled(module, args, output):
        seen.append((len(args), tuple(output.shape)))
        return output * 2

    handles = [norm.register_forward_hook(scaled) for norm in norms]
    expected, before = step(model), list(seen)
    seen.clear()
    fuse_layers(model)
    with counted() as calls:
        assert_same(step(model), expected)
    assert seen == before and calls["add_rms_norm"] == calls["qk_norm_rope"] == 1
    for handle in handles:
        handle.remove()
    with counted() as calls:
        assert step(model).loss != expected.loss
    assert calls["add_rms_norm"] == calls["qk_norm_rope"] == 2


def test_a_forward_on_an_instance_is_run():
    model = tiny("Qwen3")
    norm, act = model.model.layers[0].post_attention_layernorm, model.model.layers[1].mlp.act_fn
    ran = []

    def own(module):
        forward = module.forward
        module.forward = lambda *args: ran.append(module) or forward(*args)

    expected = step(model)
    own(norm)
    report = fuse_layers(model).report
    name = "model.layers.0.post_attention_layernorm"
    assert report.skipped[name] == "a forward attribute is set on this instance"
    own(act)
    with counted() as calls:
        assert_same(step(model), expected)
    assert ran == [norm, act] and calls["add_rms_norm"] == 1 and calls["gated"] == 1


def test_hidden_states_and_attentions_are_recorded():
    model = tiny("Qwen3", attn_implementation="eager")
    expected = model(IDS, output_hidden_states=True, output_attentions=True)
    fuse_layers(model)
    actual = model(IDS, output_hidden_states=True, output_attentions=True)
    for name in ("hidden_states", "attentions"):
        assert len(actual[name]) == len(expected[name]) > 1
        torch.testing.assert_close(actual[name], expected[name])


def test_another_dtype_takes_the_stock_path():
    model = tiny("Qwen3", torch.float64)
    expected = step(model)
    fuse_layers(model)
    with counted() as calls:
        assert_same(step(model), expected, 1e-12)
    assert not calls


def test_weights_in_fp32_under_activations_in_bf16():
    """As QLoRA prepares a model."""
    model = tiny("Qwen3", torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model)
        fuse_layers(model)
        with counted() as calls:
            actual = step(model)
    assert calls["add_rms_norm"] == calls["qk_norm_rope"] == 2
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-2, atol=0)
    assert {g.dtype for g in actual.gradients.values()} == {torch.bfloat16, torch.float32}


def test_functional_transformations_take_the_stock_path():
    model = tiny("Llama", attn_implementation="eager")
    fuse_layers(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (IDS,), {"labels": IDS, "use_cache": False}).loss

    with counted() as calls:
        assert torch.func.grad(loss)(parameters)["model.norm.weight"].norm() > 0
    assert not calls


def test_a_model_on_the_meta_device_can_be_fused():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny("Qwen3").config)
    report = fuse_layers(model).report
    assert len(report.fused) == 9 + 3 * 2 and not report.skipped


@pytest.mark.parametrize(
    "attach", [(patch_model, fuse_layers), (fuse_layers, patch_model)], ids=["loss first", "layers first"]
)
def test_beside_a_patched_loss(attach):
    model, stock = tiny("Gemma2"), tiny("Gemma2")
    expected = step(stock)
    undo = [each(model) for each in attach]
    with counted() as calls:
        assert_same(step(model), expected, 1e-5)
    assert calls["rms_norm_add"] == 4 and calls["gated"] == 2
    for each in undo:
        each()
    assert_same(step(model), expected)
    assert classes_of(model) == classes_of(stock)


def test_a_failure_in_between_leaves_the_model_as_it_was(monkeypatch):
    model, done = tiny("Qwen3"), []

    def failing(*args):
        if len(done) == 12:
            raise RuntimeError("in between")
        done.append(exchange.exchange(*args))
        return done[-1]

    monkeypatch.setattr(fuse, "exchange", failing)
    before = classes_of(model)
    with pytest.raises(RuntimeError, match="in between"):
        fuse_layers(model)
    assert classes_of(model) == before


def test_arguments_by_name():
    model, x = tiny("Qwen3"), torch.randn(2, 32)
    norm = model.model.norm
    expected = norm(x)
    fuse_layers(model)
    torch.testing.assert_close(norm(hidden_states=x), expected)
    with pytest.raises(TypeError):
        norm(x, x)


def partition(model):
    """What ZeRO-3 does to parameters: gathered by hooks while their module runs, forward and backward, and
    empty otherwise."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        whole = [parameter.data for parameter in own]
        if not own:
            continue

        def gather(*args, own=own, whole=whole):
            for parameter, data in zip(own, whole):
                parameter.data = data

        def release(*args, own=own):
            for parameter in own:
                parameter.data = parameter.data.new_empty(0)

        for parameter in own:
            parameter.ds_shape = parameter.shape
        release()
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        module.register_full_backward_pre_hook(gather)


def test_partitioned_parameters_are_gathered():
    model = tiny("Qwen3", tie_word_embeddings=False)
    expected = step(model)
    partition(model)
    assert model.model.norm.weight.numel() == 0
    # Nothing to report: the trial needs none of the weights.
    assert not fuse_layers(model).report.skipped
    with counted() as calls:
        assert_same(step(model), expected)
    # Norms by themselves, inside of their hooks.
    assert calls["rms_norm"] == 9 and calls["add_rms_norm"] == calls["qk_norm_rope"] == 0


def test_bad_models():
    with pytest.raises(TypeError, match="model: expected a module, got str; pass a model."):
        fuse_layers("Qwen/Qwen3-0.6B")
    nothing = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    looked_for = "model: expected norms, rotary embeddings, gated MLPs or LoRA layers that are recognized"
    got = "Sequential with none .*1 LayerNorm: torch's LayerNorm"
    with pytest.raises(ValueError, match=f"{looked_for}, got {got}"):
        fuse_layers(nothing)
    assert type(nothing[1]) is nn.LayerNorm


def test_a_weight_on_another_device_is_an_error():
    model = tiny("Llama")
    fuse_layers(model)
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.to("meta"))
    with pytest.raises(ValueError, match="weight: expected x's device cpu, got meta"):
        step(model)


def test_the_report_counts_the_modules_of_a_class():
    report = str(fuse_layers(tiny("Qwen3")).report)
    assert "2 x Qwen3MLP: gate act_fn\n" in report and "not fused: none" in report


def doubled(function):
    """A function whose first result is twice that of `function`."""

    def doubling(*args, **kwargs):
        out = function(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    return doubling


# Part of a model -> (family, class or none for the file of the model, name in it, operators that it stops)
REPLACED = {
    "rotation": ("Qwen3", None, "apply_rotary_pos_emb", {"qk_norm_rope"}),
    "function that the rotation calls": ("Llama", None, "rotate_half", {"rope"}),
    "norm": ("Qwen3", "Qwen3RMSNorm", "forward", {"rms_norm", "add_rms_norm", "qk_norm_rope"}),
    "method that the norm calls": (
        "Gemma3",
        "Gemma3RMSNorm",
        "_norm",
        {"rms_norm", "rms_norm_add", "qk_norm_rope"},
    ),
    "attention": ("Qwen3", "Qwen3Attention", "forward", {"qk_norm_rope"}),
    "decoder layer": ("Gemma3", "Gemma3DecoderLayer", "forward", {"rms_norm_add"}),
    "MLP": ("Qwen3", "Qwen3MLP", "forward", {"gated"}),
    "activation": ("Phi3", "SiLUActivation", "forward", {"gated"}),
}


@pytest.mark.parametrize("part", REPLACED)
def test_code_that_is_replaced_after_fusing_takes_effect(part, monkeypatch, caplog):
    family, cls, name, stopped = REPLACED[part]
    model, stock, later = tiny(family), tiny(family), tiny(family)
    namespace = sys.modules[type(model).__module__]
    if cls is not None:
        namespace = next(type(module) for module in model.modules() if type(module).__name__ == cls)
    before = step(stock)
    undo = fuse_layers(model)
    with counted() as all_calls:
        step(model)
    monkeypatch.setattr(namespace, name, doubled(getattr(namespace, name)))
    expected = step(stock)
    assert expected.loss != before.loss
    caplog.clear()
    with counted() as calls:
        assert_same(step(model), expected)
    assert stopped <= all_calls.keys() and calls and not calls.keys() & stopped
    (record,) = caplog.records
    assert f".{name} was replaced after fuse_layers" in record.getMessage()
    # A model that is fused with the new code in place.
    fuse_layers(later)
    assert_same(step(later), expected)
    monkeypatch.undo()
    with counted() as calls:
        assert_same(step(model), before)
    assert calls == all_calls
    undo()
    assert torch.equal(step(model).loss, before.loss)
