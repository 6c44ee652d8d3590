"""The loss and gradients of patched models are their own: one class for each way to treat the head in
`make test`, every class in `make test-all`."""

import gc
import re

import pytest
import torch

from logitless.models import fit_activations

from .every import TABLE, VERDICTS, classes, compare, gradients, labelled, tiny

# By what is done between the backbone and the loss.
HEADS = {
    "nothing": "LlamaForCausalLM",
    "tied": "GemmaForCausalLM",
    "bias": "PhiForCausalLM",
    "scaled logits": "CohereForCausalLM",
    "divided logits": "GraniteForCausalLM",
    "divided hidden states": "MiniCPM3ForCausalLM",
    "divided hidden states, padded vocabulary": "InklingForCausalLM",
    "scale held by the backbone": "FalconH1ForCausalLM",
    "softcap": "Gemma2ForCausalLM",
    "softcap under another name": "RecurrentGemmaForCausalLM",
    "softcap of a function": "xLSTMForCausalLM",
    "z-loss": "BambaForCausalLM",
    "router loss of num_local_experts": "MixtralForCausalLM",
    "router loss of a coefficient under another name": "JetMoeForCausalLM",
    "router loss and divided logits": "GraniteMoeForCausalLM",
    "router loss of nested configs": "DbrxForCausalLM",
    "router loss of another function": "DogeForCausalLM",
    "labels that are not shifted": "BartForCausalLM",
    "layers in front of the head": "BertLMHeadModel",
    "layers in the head": "RobertaForCausalLM",
    "loss in a module of the head": "XLMWithLMHeadModel",
    "logits in fp32": "MambaForCausalLM",
    "wrapper of a vision model": "Gemma3ForConditionalGeneration",
    "wrapper that does not scale": "AyaVisionForConditionalGeneration",
}


@pytest.mark.parametrize("name", HEADS.values(), ids=HEADS)
def test_head(name):
    result = compare(name)
    assert result.verdict == "equal" and result.detail == "checked at attach", result


def test_what_is_no_cross_entropy_of_the_logits_is_refused():
    result = compare("ProphetNetForCausalLM")
    assert (
        result.verdict == "refused" and "logits: expected a loss that is their cross-entropy" in result.detail
    )


def test_the_strong_options_are_noticed():
    """A comparison of models in which nothing is scaled would show nothing."""
    for name, field in (
        ("Gemma2ForCausalLM", "final_logit_softcapping"),
        ("BambaForCausalLM", "z_loss_coefficient"),
    ):
        assert getattr(tiny(name).config, field) in (0.5, 0.1)


def test_the_table_names_every_class():
    words = set(re.findall(r"\w+", TABLE.read_text()))
    assert classes().keys() <= words


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in classes() if name not in HEADS.values()])
def test_every_model(name):
    """Its verdict is the table's, so that a class that is no longer equal does not pass as refused."""
    result = compare(name)
    sections = TABLE.read_text().split("\n## ")[1:]
    expected = next(section for section in sections if re.search(rf"\b{name}\b", section)).splitlines()[0]
    assert VERDICTS[result.verdict] == expected, result


def check_budget(name):
    """With an activation budget the gradients are the model's own, and nothing is held after the step."""

    def computed():
        torch.manual_seed(1)
        return gradients(model, **inputs)[1]

    try:
        model = tiny(name).train()
        inputs = labelled(model)
        computed()  # BigBird changes its attention in the first call
        truth = computed()
        fitted = fit_activations(model, 10**9)
    except Exception as error:
        pytest.skip(f"{name}: {error}")

    def held_bytes():
        for module in model.modules():
            # RecurrentGemma keeps the last state, and so its graph, without a budget too.
            if hasattr(module, "recurrent_states"):
                module.recurrent_states = None
        return fitted.held_bytes

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):  # all layers recomputed, then all kept
            grads = computed()
            assert held_bytes() == 0, fitted.last_plan
            assert grads.keys() == truth.keys() and all(torch.equal(grads[n], x) for n, x in truth.items())
            fitted._needs_count = fitted.last_plan.levels[0] == "full"
            model(**inputs)  # a batch that is skipped
            assert held_bytes() == 0, fitted.last_plan
    finally:
        gc.enable()


SHARED_KEYS = ("Gemma3nForCausalLM", "Gemma4ForCausalLM")


@pytest.mark.parametrize("name", SHARED_KEYS)
def test_activation_budget_with_shared_keys_and_values(name):
    check_budget(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in classes() if name not in SHARED_KEYS])
def test_activation_budget_of_every_model(name):
    check_budget(name)
