"""PEFT's adapters on the LM head: the losses and gradients of PEFT's own forward pass, and what is
refused."""

import peft
import pytest
import torch

from logitless.models import head_of
from logitless.trl_integration import patch_model

from ..models.every import gradients
from .compare import assert_same, options, our_pair, side_by_side
from .kinds import needs, preference_dataset
from .tiny import INPUTS, VOCAB, tiny_model, words
from .user_models import HEADS

LORA = {"r": 4, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}


def adapted(model, **changes):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA | changes))


def compare(model, *, rtol=1e-4, atol=1e-6) -> None:
    """Loss and gradients of the model's own forward pass, then of ours."""
    torch.manual_seed(2)  # of the dropout
    stock, expected = gradients(model, **INPUTS)
    patch_model(model, logits_budget=2**14)
    torch.manual_seed(2)
    mine, actual = gradients(model, **INPUTS)
    assert stock.logits is not None and mine.logits is None
    torch.testing.assert_close(mine.loss, stock.loss, rtol=rtol, atol=atol)
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= rtol * grad.norm(), name


@pytest.mark.parametrize("family", ["llama", "tied", "gemma2", "granite", "cohere"])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings")
def test_lora_on_the_head_of_the_family(family):
    model = adapted(tiny_model(family))
    compare(model)
    head = model.get_base_model().get_output_embeddings()
    assert head.lora_B["default"].weight.grad.norm() > 0 and head.lora_A["default"].weight.grad.norm() > 0
    assert head.get_base_layer().weight.grad is None


@pytest.mark.parametrize(
    "changes",
    [{"lora_dropout": 0.5}, {"use_rslora": True, "lora_alpha": 3}, {"lora_bias": True}],
    ids="-".join,
)
def test_options_of_lora(changes):
    model = tiny_model()
    if "lora_bias" in changes:
        model.set_output_embeddings(torch.nn.Linear(32, VOCAB))
    compare(adapted(model, **changes).train())


def test_a_head_that_trains_beside_its_adapter():
    model = adapted(tiny_model())
    head = model.get_base_model().get_output_embeddings()
    head.get_base_layer().weight.requires_grad_()
    compare(model)
    assert head.get_base_layer().weight.grad.norm() > 0


def test_several_adapters_at_once():
    model = adapted(tiny_model())
    model.add_adapter("second", peft.LoraConfig(**LORA | {"r": 2, "lora_alpha": 16}))
    model.base_model.set_adapter(["default", "second"])
    compare(model)


TOKENS = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 40]}


def test_rows_of_tied_embeddings_that_peft_trains():
    model = adapted(tiny_model("tied"), **TOKENS)
    delta = model.get_base_model().model.embed_tokens.token_adapter.trainable_tokens_delta["default"]
    with torch.no_grad():
        delta += 0.3 * torch.randn_like(delta)
    compare(model)
    assert delta.grad.norm() > 0


@torch.no_grad()
def test_rows_of_tied_embeddings_that_are_switched_off():
    model = adapted(tiny_model("tied"), **TOKENS)
    base, hidden = model.get_base_model(), torch.randn(1, 3, 32)
    layer = base.lm_head.token_adapter
    layer.trainable_tokens_delta["default"] += 1.0
    plain = torch.nn.functional.linear(hidden, layer.base_layer.weight)

    def logits():
        actual = hidden @ head_of(base).weight.T
        torch.testing.assert_close(actual, base.lm_head(hidden))
        return actual

    assert not torch.allclose(logits(), plain)
    with model.disable_adapter():
        assert torch.equal(logits(), plain)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast):
    """PEFT keeps the adapters in fp32 beside a bf16 model."""
    model = adapted(tiny_model() if autocast else tiny_model().bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        compare(model, rtol=3e-2)


@torch.no_grad()
def test_only_what_is_switched_on_takes_part():
    """As under `disable_adapter()`, where TRL takes the reference's log-probabilities."""
    model = adapted(tiny_model(), target_modules=["lm_head"])
    base, hidden = model.get_base_model(), torch.randn(1, 3, 32)
    plain = torch.nn.functional.linear(hidden, base.lm_head.get_base_layer().weight)

    def logits():
        wide, weight, _ = head_of(base).operands(hidden)
        weight = weight if isinstance(weight, torch.Tensor) else torch.cat(tuple(weight), dim=1)
        actual = wide @ weight.T
        torch.testing.assert_close(actual, base.lm_head(hidden))
        return actual

    assert not torch.allclose(logits(), plain)
    with model.disable_adapter():
        assert torch.equal(logits(), plain)
    model.merge_adapter()
    assert base.lm_head.merged and not torch.allclose(logits(), plain)
    with model.disable_adapter():
        torch.testing.assert_close(logits(), plain)


@pytest.mark.parametrize(
    "config, actual",
    [
        (peft.LoraConfig(**LORA | {"use_dora": True}), "DoraLinearVariant"),
        (peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]), "ia3.layer.Linear"),
        (peft.LoHaConfig(target_modules=["lm_head"]), "loha.layer"),
    ],
    ids=["dora", "ia3", "loha"],
)
def test_other_adapters_are_refused(config, actual):
    model = peft.get_peft_model(tiny_model(), config)
    message = f"model: expected no adapter but plain LoRA on the LM head, got .*{actual}.*; remove 'lm_head'"
    with pytest.raises(ValueError, match=message):
        patch_model(model)
    base = tiny_model()
    patch_model(base)
    model = peft.get_peft_model(base, config)
    with pytest.raises(ValueError, match=message):
        model(**INPUTS)


def test_zero_3_is_refused():
    model = adapted(tiny_model())
    model.get_base_model().lm_head.get_base_layer().weight.ds_id = 0  # what DeepSpeed puts on each parameter
    message = "model: expected an LM head without an adapter under DeepSpeed ZeRO-3, got LoRA"
    with pytest.raises(ValueError, match=message):
        patch_model(model)


# --- the trainers


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", ["ORPO", "CPO"])
def test_lora_on_the_head(tmp_path, kind, family):
    assert_same(
        *side_by_side(tmp_path, kind, preference_dataset(), family=family, wrap=adapted, max_length=48)
    )


def test_orpo_with_trained_rows_of_tied_embeddings(tmp_path):
    runs = side_by_side(
        tmp_path,
        "ORPO",
        preference_dataset(),
        family="tied",
        wrap=lambda model: adapted(model, **TOKENS),
        max_length=48,
    )
    assert_same(*runs)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize("wrap", HEADS.values(), ids=HEADS)
def test_heads_with_the_forward_pass_of_linear(tmp_path, kind, wrap):
    dataset, settings, given = needs(kind, tmp_path)
    assert_same(*side_by_side(tmp_path, kind, dataset, wrap=wrap, trainer=given, **settings))


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO", "RLOO", "GKD", "Distillation"])
def test_trainers_that_refuse_it(tmp_path, kind):
    """TRL's own constructors raise."""
    dataset, settings, given = needs(kind, tmp_path)
    config, trainer = our_pair(kind).values()
    given |= {"args": config(**options(tmp_path, **settings, use_chunked_loss=True))}
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        trainer(adapted(tiny_model()), train_dataset=dataset, processing_class=words(), **given)
