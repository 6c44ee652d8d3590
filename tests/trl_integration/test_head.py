"""What we rely on in transformers: where the backbone and the head are, what the head does, and how a forward
may be replaced."""

import inspect
import types
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers

from logitless.trl_integration.head import attach_chunked_head, head_options, head_parameters

from ..models.every import tiny
from .tiny import FAMILIES, VOCAB, tiny_model

IDS = torch.arange(3, 33).view(2, 15)
LABELS = torch.where(IDS % 4 == 0, -100, IDS)


def full_logits_score(hidden, weight, bias, labels, shift):
    """A score as plain as can be: what is tested here is what surrounds it."""
    if shift:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    mask = labels != -100
    logps = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
    logps = logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    return {"log_probs": logps, "label_mask": mask}


def scaled(model, score):
    """The score of a model that scales its logits."""
    scale = head_options(model.config)["logit_scale"]
    return lambda hidden, *args, **kwargs: score(hidden * scale, *args, **kwargs)


# --- the head
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_backbone_head_and_options_give_the_logits(family):
    model = tiny_model(family).eval()
    options = head_options(model.config)
    weight, bias = head_parameters(model)
    logits = (
        torch.nn.functional.linear(model.base_model(IDS).last_hidden_state, weight, bias)
        * options["logit_scale"]
    )
    if options["softcap"]:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    torch.testing.assert_close(logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1.0),
        ({"logit_scale": None, "output_multiplier": 3.0}, 3.0),
        ({"logit_scale": 0.0, "output_multiplier": 3.0}, 0.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
        ({"logits_scaling": 8.0, "model_type": "granite"}, 0.125),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0),
    ],
    ids=["none", "muse", "zero", "falcon_h1", "granite", "hyperclovax"],
)
def test_names_of_the_logit_scale(fields, expected):
    text = SimpleNamespace(**fields)
    assert head_options(SimpleNamespace(get_text_config=lambda: text)) == {
        "softcap": None,
        "logit_scale": expected,
    }


def test_adapter_on_the_head_is_refused():
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="model: expected an LM head without an adapter, got LoRA"):
        head_parameters(model.get_base_model())


# --- the forward
# ---------------------------------------------------------------------------------------------------------


def test_every_other_call_runs_as_before():
    plain, patched = tiny_model().eval(), tiny_model().eval()
    attach_chunked_head(patched, full_logits_score)
    assert isinstance(patched.forward, types.MethodType) and patched.forward.__self__ is patched
    assert inspect.signature(patched.forward) == inspect.signature(plain.forward)

    a, b = plain(IDS, labels=LABELS), patched(IDS, labels=LABELS)
    assert torch.equal(a.logits, b.logits) and torch.equal(a.loss, b.loss)
    generated = [
        model.generate(IDS, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(IDS))
        for model in (plain, patched)
    ]
    assert torch.equal(*generated)


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("mixtral", {"output_router_logits": True})])
@pytest.mark.parametrize("num_items", [None, 50])
def test_loss_is_the_models_own(family, options, num_items):
    """TRL reads this field under sequence parallelism, the router loss included."""
    model = tiny_model(family, **options).eval()
    expected = model(IDS, labels=LABELS, num_items_in_batch=num_items)
    attach_chunked_head(model, full_logits_score)
    got = model(IDS, labels=LABELS, fused_lm_head=True, num_items_in_batch=num_items)
    torch.testing.assert_close(got.loss, expected.loss)
    assert (got.aux_loss is None) is (family == "llama")


@pytest.mark.parametrize(
    "name", ["JetMoeForCausalLM", "GraniteMoeForCausalLM", "PhimoeForCausalLM", "DbrxForCausalLM"]
)
def test_router_loss_of_families_that_name_it_otherwise(name):
    model = tiny(name)
    expected = model(IDS, labels=LABELS)
    attach_chunked_head(model, scaled(model, full_logits_score))
    got = model(IDS, labels=LABELS, fused_lm_head=True)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.aux_loss, expected.aux_loss)
    assert got.aux_loss > 0


@pytest.mark.parametrize("name", ["RecurrentGemmaForCausalLM", "MiniCPM3ForCausalLM"])
def test_options_that_the_configuration_does_not_tell_are_refused(name):
    """The losses of the trainers take softcap and scale from the configuration."""
    model = tiny(name)
    attach_chunked_head(model, full_logits_score)
    with pytest.raises(ValueError, match="model: expected logits with .*, as its config.* got {"):
        model(IDS, labels=LABELS, fused_lm_head=True)


def test_fp32_head_on_a_half_precision_backbone():
    """TRL casts the hidden states, where the model's own head could not take them."""
    model = tiny_model().bfloat16().eval()
    model.lm_head.float()
    attach_chunked_head(model, full_logits_score)
    hidden = model.model(IDS).last_hidden_state.float()
    expected = model.lm_head(hidden)[:, :-1].log_softmax(-1)
    got = model(IDS, labels=LABELS, fused_lm_head=True).log_probs
    mask = LABELS[:, 1:] != -100
    picked = expected.gather(-1, LABELS[:, 1:].clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(got, picked * mask)


def test_a_second_trainer_takes_the_model_over_and_the_first_undo_leaves_it():
    model = tiny_model().eval()
    first = attach_chunked_head(model, lambda *args, **kwargs: {})
    second = attach_chunked_head(model, full_logits_score)
    first()
    assert model(IDS, labels=LABELS, fused_lm_head=True).log_probs is not None
    second()
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is torch.nn.Linear


def test_aligned_labels_are_not_shifted():
    model = tiny_model().eval()
    attach_chunked_head(model, full_logits_score)
    aligned = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    shifted = model(IDS, labels=LABELS, fused_lm_head=True).log_probs
    given = model(IDS, shift_labels=aligned, fused_lm_head=True).log_probs
    torch.testing.assert_close(given[:, :-1], shifted)
    assert given.shape == IDS.shape and (given[:, -1] == 0).all()


def test_head_is_looked_up_on_every_call():
    model = tiny_model().eval()
    attach_chunked_head(model, full_logits_score)
    before = model(IDS, labels=LABELS, fused_lm_head=True).loss
    model.set_output_embeddings(torch.nn.Linear(32, VOCAB, bias=True))
    after = model(IDS, labels=LABELS, fused_lm_head=True).loss
    assert after != before
    torch.testing.assert_close(after, model(IDS, labels=LABELS).loss)
