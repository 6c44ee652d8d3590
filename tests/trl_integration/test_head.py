"""The fused head on a model: the loss is the model's own, and every other call runs as before."""

import inspect
import types
from contextlib import ExitStack

import pytest
import torch
import transformers

from logitless.trl_integration.head import attach_fused_head, attach_gatherable_logits
from logitless.trl_integration.per_token import make_per_token_fields

from ..models.every import gradients
from .compare import chunked_loss
from .tiny import IDS, INPUTS, LABELS, VOCAB, partition, tiny_model

CHUNKED = chunked_loss()


def full_logits_fields(hidden, head, labels, shift):
    """Fields from full logits: these tests are about the code around the computation of the fields."""
    if shift:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    mask, cap = labels != -100, head.softcap
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.logit_scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * mask
    return {"log_probs": logps, "label_mask": mask}


@pytest.fixture
def attach():
    """attach(model, compute_fields): attach a fused head with these fields until the end of the test."""
    with ExitStack() as stack:

        def attached(model, compute_fields=full_logits_fields):
            stack.enter_context(attach_fused_head(lambda session: compute_fields)(CHUNKED)(model))
            return stack

        yield attached


def test_every_other_call_runs_as_before(attach):
    plain, patched = tiny_model().eval(), tiny_model().eval()
    attach(patched)
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
def test_loss_is_the_models_own(attach, family, options, num_items):
    """TRL reads this field under sequence parallelism, the router loss included."""
    model = tiny_model(family, **options).eval()
    expected = model(IDS, labels=LABELS, num_items_in_batch=num_items)
    attach(model)
    got = model(IDS, labels=LABELS, fused_lm_head=True, num_items_in_batch=num_items)
    torch.testing.assert_close(got.loss, expected.loss)
    if family == "llama":
        assert got.aux_loss is None
    else:
        torch.testing.assert_close(got.aux_loss, expected.aux_loss)
        assert got.aux_loss > 0


def test_fp32_head_on_a_half_precision_backbone(attach):
    """TRL casts the hidden states, where the model's own head could not take them."""
    model = tiny_model().bfloat16().eval()
    model.lm_head.float()
    attach(model)
    hidden = model.model(IDS).last_hidden_state.float()
    expected = model.lm_head(hidden)[:, :-1].log_softmax(-1)
    got = model(IDS, labels=LABELS, fused_lm_head=True).log_probs
    mask = LABELS[:, 1:] != -100
    picked = expected.gather(-1, LABELS[:, 1:].clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(got, picked * mask)


def test_the_inner_of_two_heads_is_used_and_both_leave_the_model_as_it_was(attach):
    model = tiny_model().eval()
    before = dict(vars(model))
    attach(model, lambda *args: {})
    with attach_fused_head(lambda session: full_logits_fields)(CHUNKED)(model):
        assert model(IDS, labels=LABELS, fused_lm_head=True).log_probs is not None
    with pytest.raises(KeyError, match="label_mask"):
        model(IDS, labels=LABELS, fused_lm_head=True)
    attach(model, lambda *args: {}).close()
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is torch.nn.Linear
    assert vars(model) == before


def test_aligned_labels_are_not_shifted(attach):
    model = tiny_model().eval()
    attach(model)
    aligned = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    shifted = model(IDS, labels=LABELS, fused_lm_head=True).log_probs
    given = model(IDS, shift_labels=aligned, fused_lm_head=True).log_probs
    torch.testing.assert_close(given[:, :-1], shifted)
    assert given.shape == IDS.shape and (given[:, -1] == 0).all()


def test_head_is_looked_up_on_every_call(attach):
    model = tiny_model().eval()
    attach(model)
    before = model(IDS, labels=LABELS, fused_lm_head=True).loss
    model.set_output_embeddings(torch.nn.Linear(32, VOCAB, bias=True))
    after = model(IDS, labels=LABELS, fused_lm_head=True).loss
    assert after != before
    torch.testing.assert_close(after, model(IDS, labels=LABELS).loss)


# --- DeepSpeed ZeRO-3, whose log-probabilities read the head in the backward pass too


def test_zero_3_with_a_fused_head():
    model = tiny_model()
    _, expected = gradients(model, **INPUTS)
    partition(model.lm_head)
    with attach_fused_head(make_per_token_fields)(CHUNKED)(model):
        _, actual = gradients(model, **INPUTS, fused_lm_head=True)
    assert model.lm_head.weight.numel() == 0
    torch.testing.assert_close(actual, expected)


def test_zero_3_with_gatherable_logits():
    model = tiny_model()
    _, expected = gradients(model, **INPUTS)
    model.zero_grad()
    partition(model.lm_head)
    session = chunked_loss(is_fsdp_enabled=False, last_plan=None)
    session.returns_gatherable_logits = True
    with attach_gatherable_logits(session)(model):
        logits = model(IDS).logits
    assert model.lm_head.weight.numel() == 0
    targets = LABELS[:, 1:]
    logps = logits[:, :-1].statistics(targets)["logps"]
    (-logps.sum() / (targets != -100).sum()).backward()
    assert model.lm_head.weight.numel() == 0
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
