"""LM heads as modules in the place of a weight: the same losses and gradients as with their tensors."""

import gc
import weakref
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.nn.utils import parametrizations

from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    DPOLoss,
    GRPOLoss,
    KTOLoss,
    MedusaHeads,
    MedusaLoss,
    MultiTokenLoss,
    ORPOLoss,
    linear_cross_entropy,
    linear_logprobs,
    linear_topk,
)
from logitless.engine.head_view import HeadView
from logitless.models import head_of, patch_model
from logitless.models.probes import check_head

from ..trl_integration.tiny import VOCAB, tiny_model
from .every import tiny

B, T, H, V = 4, 5, 8, 23


@pytest.fixture(autouse=True)
def uncompiled(request):
    """A loss of logits would be compiled."""
    with torch.compiler.set_stance("default" if "compiles" in request.node.name else "force_eager"):
        yield


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGETS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([True, False, True, False])


def head(seed=1, *, bias=True):
    linear = nn.Linear(H, V, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for number, x in enumerate(linear.parameters()):
            x.copy_(random(*x.shape, seed=10 * seed + number))
    return linear


def unrelated():
    return {
        "kl_hidden": random(2, T, H, seed=5),
        "kl_targets": TARGETS[:2],
        "ref_hidden": random(2, T, H, seed=6),
    }


def hard(hidden, **given):
    return DistillationLoss(hard_loss_weight=0.5)(
        hidden, targets=TARGETS, teacher_hidden=random(B, T, H), **given
    )


# (call, what stands before the names of its heads)
CALLS = {
    "cross-entropy": (lambda h, **w: CrossEntropyLoss()(h, targets=TARGETS, **w), ("",)),
    "class weights": (
        lambda h, **w: CrossEntropyLoss()(h, targets=TARGETS, class_weights=random(V).abs(), **w),
        ("",),
    ),
    "function": (lambda h, **w: linear_cross_entropy(h, targets=TARGETS, **w), ("",)),
    "logprobs": (lambda h, **w: linear_logprobs(h, targets=TARGETS, **w).logps.square().sum(), ("",)),
    "unreduced": (
        lambda h, **w: CrossEntropyLoss(reduction="none")(h, targets=TARGETS, **w).loss.sum(),
        ("",),
    ),
    "distillation": (hard, ("", "teacher_")),
    "dpo": (lambda h, **w: DPOLoss()(h, targets=TARGETS, ref_hidden=random(B, T, H), **w), ("", "ref_")),
    "kto": (
        lambda h, **w: KTOLoss()(
            h, targets=TARGETS, labels=LABELS, ref_hidden=random(B, T, H), kl=unrelated(), **w
        ),
        ("", "ref_"),
    ),
    "orpo": (lambda h, **w: ORPOLoss(logits_over="position")(h, targets=TARGETS, **w), ("",)),
    "grpo": (lambda h, **w: GRPOLoss()(h, targets=TARGETS, advantages=random(B), **w), ("",)),
    "multi-token": (lambda h, **w: MultiTokenLoss()([h, 2 * h], targets=TARGETS, **w), ("",)),
    "medusa": (
        lambda h, **w: MedusaLoss()(h, MedusaHeads(H, V, 2, shared=True, dtype=h.dtype), TARGETS, **w),
        ("base_",),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_module_and_tensors_are_the_same(name):
    call, prefixes = CALLS[name]
    results = []
    for whole in (False, True):
        torch.manual_seed(0)
        hidden = random(B, T, H, seed=2).requires_grad_()
        heads = {prefix: head(3 + len(prefix)) for prefix in prefixes}
        given = {f"{prefix}weight": x if whole else x.weight for prefix, x in heads.items()}
        given |= {} if whole else {f"{prefix}bias": x.bias for prefix, x in heads.items()}
        out = call(hidden, **given)
        (out if isinstance(out, torch.Tensor) else out.loss).backward()
        metrics = getattr(out, "metrics", {})
        results.append([out if not metrics else out.loss, *metrics.values(), hidden.grad])
        results[-1] += [x.grad for x in heads[prefixes[0]].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[1][-1].norm() > 0


class Projection(nn.Linear):
    """A subclass with the forward pass of nn.Linear."""


def projection():
    module = Projection(H, V, dtype=torch.float64)
    module.load_state_dict(head().state_dict())
    return module


@pytest.mark.parametrize("made", [projection, lambda: parametrizations.weight_norm(head())])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_subclass_of_linear_and_a_parametrized_weight(made, frozen):
    actual = []
    for compute in (stock, lambda h, m: CrossEntropyLoss(logits_budget=1000)(h, m, TARGETS).loss):
        module = made().requires_grad_(not frozen)
        hidden = random(B, T, H, seed=2).requires_grad_()
        (3 * compute(hidden, module)).backward()
        actual.append([hidden.grad, *(x.grad for x in module.parameters())])
    torch.testing.assert_close(actual[1], actual[0])


# --- adapters


def adapted(linear, **changes):
    """The head in a model, under PEFT."""
    holder = nn.Module()
    holder.lm_head, holder.other = linear, nn.Linear(2, 2, dtype=torch.float64)
    config = peft.LoraConfig(**{"r": 3, "target_modules": ["lm_head"], "init_lora_weights": False} | changes)
    torch.manual_seed(0)
    return peft.inject_adapter_in_model(config, holder).lm_head.double()


def stock(hidden, module, bias=None):
    return nn.functional.cross_entropy(module(hidden).flatten(0, 1), TARGETS.flatten())


@pytest.mark.parametrize("frozen", [True, False])
def test_lora_gets_its_gradient(frozen):
    module = adapted(head())
    module.get_base_layer().requires_grad_(not frozen)
    actual = []
    for compute in (stock, lambda h, m: CrossEntropyLoss(logits_budget=1000)(h, m, TARGETS).loss):
        module.zero_grad()
        hidden = random(B, T, H, seed=2).requires_grad_()
        loss = compute(hidden, module)
        loss.backward()
        actual.append(
            [loss.detach(), hidden.grad, *(x.grad for x in module.parameters() if x.grad is not None)]
        )
    assert len(actual[0]) == (4 if frozen else 6)
    torch.testing.assert_close(actual[1], actual[0])


def test_lora_as_a_teacher_and_a_reference():
    module = adapted(head(bias=False))
    plain = nn.Linear(H, V, bias=False, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(module.get_base_layer().weight + module.get_delta_weight("default"))
    hidden = random(B, T, H, seed=2)
    a, b = (hard(hidden, weight=head(7), teacher_weight=x).loss for x in (module, plain))
    torch.testing.assert_close(a, b)
    a, b = (
        KTOLoss()(hidden, x, TARGETS, labels=LABELS, ref_hidden=hidden, ref_weight=x, kl=unrelated()).loss
        for x in (module, plain)
    )
    torch.testing.assert_close(a, b)


def test_heads_of_several_positions_take_no_adapter():
    module, hidden = adapted(head()), random(B, T, H)
    with pytest.raises(ValueError, match="base_weight: expected a head without an adapter, got LoRA on it"):
        MedusaLoss()(hidden, MedusaHeads(H, V, 1, dtype=hidden.dtype), TARGETS, base_weight=module)
    with pytest.raises(ValueError, match="weight: expected a head without an adapter, got LoRA on it"):
        MultiTokenLoss()([hidden], module, TARGETS)


def test_a_head_that_peft_trains_whole():
    model = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    wrapper = model.get_base_model().lm_head
    active = wrapper.modules_to_save["default"]
    with torch.no_grad():
        active.weight.mul_(2)
    hidden, targets = torch.randn(3, 32), torch.tensor([1, 2, 3])
    loss = linear_cross_entropy(hidden, wrapper, targets)
    loss.backward()
    assert (
        torch.equal(loss, linear_cross_entropy(hidden, active.weight, targets))
        and active.weight.grad.norm() > 0
    )
    with model.disable_adapter():
        original = linear_cross_entropy(hidden, wrapper, targets)
    assert torch.equal(original, linear_cross_entropy(hidden, wrapper.original_module.weight, targets))


# --- a model's own softcap and scale


@pytest.mark.parametrize(
    "family, softcap, scale",
    [("llama", None, 1.0), ("gemma2", 3.0, 1.0), ("granite", None, 2.0), ("cohere", None, 1.5)],
)
def test_head_of_a_model_brings_its_options(family, softcap, scale):
    model = tiny_model(family).eval()
    view = head_of(model)
    assert (view.softcap, view.logit_scale) == (softcap, pytest.approx(scale))
    assert type(model.lm_head) is nn.Linear and type(model.model).__dict__.get("exchange_key") is None
    ids = torch.arange(3, 13)[None]
    hidden = model.base_model(ids).last_hidden_state
    expected = nn.functional.cross_entropy(model(ids).logits[0], ids[0])
    torch.testing.assert_close(linear_cross_entropy(hidden, view, ids), expected)
    torch.testing.assert_close(-linear_logprobs(hidden, view, ids).logps.mean(), expected)
    # the loss's own options may say the same, and nothing else
    same = CrossEntropyLoss(softcap=softcap, logit_scale=scale)
    torch.testing.assert_close(same(hidden, view, ids).loss, expected)
    with pytest.raises(ValueError, match="softcap: expected the model's .*, got 7.0; leave it out"):
        CrossEntropyLoss(softcap=7.0)(hidden, view, ids)
    with pytest.raises(ValueError, match="logit_scale: expected the model's .*, got 0.3; leave it out"):
        CrossEntropyLoss(logit_scale=0.3)(hidden, view, ids)


@pytest.mark.parametrize("loss, field", [(DistillationLoss, "teacher"), (DPOLoss, "ref")])
def test_options_of_a_reference_and_a_teacher(loss, field):
    hidden, plain = random(B, T, H), head()
    capped = HeadView(plain.weight, plain.bias, softcap=2.0, logit_scale=0.5, of_model=True)

    def call(loss, second_head):
        given = {f"{field}_hidden": hidden, f"{field}_weight": second_head}
        return loss(hidden, plain, TARGETS, **given).loss

    options = {f"{field}_softcap": 2.0, f"{field}_logit_scale": 0.5}
    actual = call(loss(), capped)
    assert torch.equal(actual, call(loss(**options), plain)) and actual != call(loss(), plain)


def test_head_of_a_module_and_of_layers_in_front():
    linear = head()
    assert head_of(linear) == HeadView(linear.weight, linear.bias)
    with pytest.raises(
        ValueError, match="model: expected a head that takes the backbone's output, got .*patch_model"
    ):
        head_of(tiny("RobertaForCausalLM"))


def test_head_of_reads_again_what_has_changed():
    """In the configuration, of which the model's forward pass asks it, or in the model's own attribute."""
    model = tiny_model("gemma2", final_logit_softcapping=5.0)
    assert head_of(model).softcap == 5
    model.config.final_logit_softcapping = None
    assert head_of(model).softcap is None
    model = tiny_model("cohere", logit_scale=3.0)
    assert head_of(model).logit_scale == 3
    model.logit_scale = 0.5
    assert head_of(model).logit_scale == 0.5
    model.config.logit_scale = 7.0  # which its forward pass does not read
    assert head_of(model).logit_scale == 0.5


def test_head_of_asks_a_model_once():
    model, calls = tiny_model("cohere"), []
    model.register_forward_hook(lambda *args: None)
    forward = model.forward
    model.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    views = [head_of(model.train(mode)) for mode in (True, False, True)]
    assert len(calls) == 1 and views[0] == views[1] == views[2]


class _FabricModule(nn.Module):
    """Hands attributes on and casts what goes through a call, as that of Lightning Fabric does."""

    def __init__(self, module):
        super().__init__()
        self._forward_module = self._original_module = module

    @property
    def module(self):
        return self._original_module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)

    def forward(self, *args, **kwargs):
        raise TypeError("A frozen dataclass was passed to `apply_to_collection` but this is not allowed.")


def test_head_of_a_module_that_fabric_has_set_up():
    model = tiny_model("cohere")
    assert head_of(_FabricModule(model)) == head_of(model)


def test_head_of_an_adapted_model():
    model = peft.get_peft_model(
        tiny_model("granite"), peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    ).eval()
    ids = torch.arange(3, 13)[None]
    loss = linear_cross_entropy(model.get_base_model().model(ids).last_hidden_state, head_of(model), ids)
    loss.backward()
    torch.testing.assert_close(loss, nn.functional.cross_entropy(model(ids).logits[0], ids[0]))
    assert model.get_base_model().lm_head.lora_A["default"].weight.grad.norm() > 0


# --- what is refused


def hooked():
    linear = head()
    linear.register_forward_hook(lambda module, args, out: 2 * out)
    return linear


def backward_hooked(register="register_full_backward_hook"):
    linear = head()
    getattr(linear, register)(lambda *given: None)
    return linear


def parametrised():
    linear = head()
    parametrizations.spectral_norm(linear)
    return linear


def foreign(package):
    def forward(self, x):
        raise NotImplementedError

    return type("QuantLinear", (nn.Linear,), {"__module__": f"{package}.nn", "forward": forward})(H, V)


@pytest.mark.parametrize("wrapped", ["plain", "peft", "ddp"])
def test_a_model_in_the_place_of_its_head(wrapped):
    model = tiny_model()
    hidden, labels = random(2, 3, model.config.hidden_size).float(), torch.ones(2, 3, dtype=torch.int64)
    if wrapped == "peft":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    elif wrapped == "ddp":
        model, model.module = torch.nn.Module(), model
    with pytest.raises(
        TypeError, match=r"^weight: expected .*, got the model \w+; pass its LM head: head_of"
    ):
        linear_cross_entropy(hidden, model, labels)
    if wrapped != "ddp":
        assert linear_cross_entropy(hidden, head_of(model), labels).isfinite()


def test_what_is_no_model_on_a_device():
    with torch.device("meta"):
        unloaded = tiny_model()
    with pytest.raises(ValueError, match="a device, got one on the meta device; load the model first"):
        head_of(unloaded)
    trainer = SimpleNamespace(model=tiny_model())
    with pytest.raises(TypeError, match="model: expected a model, got SimpleNamespace; .* trainer.model"):
        patch_model(trainer)


@pytest.mark.parametrize(
    "made, message",
    [
        (hooked, "a head without forward hooks .*, got a hooked or overridden one; remove"),
        (backward_hooked, "a head without backward hooks, got one with such hooks; remove"),
        (
            lambda: backward_hooked("register_full_backward_pre_hook"),
            "a head without backward hooks, got one with such hooks; remove",
        ),
        (parametrised, "a head whose parametrizations have no buffers, got _SpectralNorm; use one without"),
        (lambda: foreign("mine"), ".*got mine.nn.QuantLinear; pass the weight that it computes"),
        (lambda: nn.Embedding(V, H), "a tensor .V, H., or an LM head.*got torch.nn.*Embedding"),
        (lambda: foreign("bitsandbytes"), ".*got bitsandbytes.nn.QuantLinear; .*llm_int8_skip_modules"),
        (lambda: foreign("gptqmodel"), ".*got gptqmodel.nn.QuantLinear; leave the LM head out"),
        (lambda: foreign("awq"), ".*got awq.nn.QuantLinear; leave the LM head out"),
        (lambda: "lm_head.weight", "a tensor .V, H., or an LM head.*got str"),
    ],
    ids=[
        "hook",
        "backward hook",
        "backward pre-hook",
        "parametrization",
        "own forward",
        "embedding",
        "bitsandbytes",
        "gptq",
        "awq",
        "text",
    ],
)
def test_heads_that_only_their_own_forward_can_read(made, message):
    for call in (CrossEntropyLoss(), linear_cross_entropy, linear_logprobs):
        with pytest.raises((TypeError, ValueError), match=f"^weight: expected {message}"):
            call(random(B, T, H), made(), TARGETS)


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "again"])
def test_head_of_a_model_whose_head_is_hooked_or_overridden(earlier):
    """Also if the model was measured before."""
    model = tiny_model()
    ids = torch.arange(12).view(2, 6)
    if earlier:
        head_of(model)
    hook = model.lm_head.register_forward_hook(lambda module, args, out: 0.5 * out)
    hidden = model.model(ids).last_hidden_state
    actual = CrossEntropyLoss()(hidden, head_of(model), ids, shift=True).loss
    torch.testing.assert_close(actual, model(ids, labels=ids).loss)
    hook.remove()
    assert head_of(model).logit_scale == 1
    head = model.lm_head
    head.forward = lambda x: 0.5 * nn.functional.linear(x, head.weight)
    with pytest.raises(ValueError, match="^model: expected a head with its class's `forward`, got"):
        head_of(model)


def test_head_of_keeps_no_model_alive():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, args, out, owner=model: None)
    head_of(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_head_of_a_dispatched_head_under_autocast():
    model = tiny_model()
    add_hook_to_module(model.lm_head, AlignDevicesHook(execution_device="cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert head_of(model).logit_scale == 1


@pytest.mark.parametrize("package", ["bitsandbytes", "gptqmodel", "awq"])
def test_quantized_heads_of_models_are_refused_by_name(package):
    model = tiny_model()
    model.lm_head.__class__ = type(foreign(package))
    for call in (patch_model, head_of):
        with pytest.raises(
            TypeError, match=f"model: .*got {package}.nn.QuantLinear; leave the LM head out of quant"
        ):
            call(model)


def test_a_bias_beside_a_head():
    hidden = random(B, T, H)
    with pytest.raises(
        ValueError, match="bias: expected None if weight is an LM head, got a tensor; the bias of"
    ):
        CrossEntropyLoss()(hidden, head(bias=False), TARGETS, bias=random(V))
    with pytest.raises(ValueError, match="teacher_bias: expected None if teacher_weight is an LM head"):
        hard(hidden, weight=head(), teacher_weight=head(), teacher_bias=random(V))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiles_into_one_graph(family):
    model = tiny_model(family)
    hidden, targets = torch.randn(6, 32), torch.randint(VOCAB, (6,))
    view = head_of(model)
    for given in (model.lm_head, view):
        loss = CrossEntropyLoss()
        compiled = torch.compile(
            lambda h, t, x=given: loss(h, x, t).loss, backend="aot_eager", fullgraph=True
        )
        torch.testing.assert_close(compiled(hidden, targets), loss(hidden, given, targets).loss)


def test_several_ids_of_a_head_module():
    hidden, head, ids = torch.randn(5, 8), nn.Linear(8, 30), torch.randint(30, (5, 3))
    given, plain = linear_logprobs(hidden, head, ids), head(hidden).log_softmax(-1)
    torch.testing.assert_close(given.logps, plain.gather(-1, ids), rtol=1e-5, atol=1e-5)
    grads = (
        torch.autograd.grad(x.sum(), list(head.parameters())) for x in (given.logps, plain.gather(-1, ids))
    )
    for ours, of_stock in zip(*grads, strict=True):
        torch.testing.assert_close(ours, of_stock, rtol=1e-4, atol=1e-5)
    assert torch.equal(linear_topk(hidden, head, 2).ids, plain.topk(2).indices)


def test_a_bias_of_minus_infinity_rules_an_id_out():
    linear = head()
    with torch.no_grad():
        linear.bias[0] = -torch.inf
    check_head(linear, linear.forward, linear.weight[:1])
    with torch.no_grad():
        linear.bias[0] = torch.nan
    with pytest.raises(ValueError, match="^model: expected logits that differ by at most"):
        check_head(linear, linear.forward, linear.weight[:1])
