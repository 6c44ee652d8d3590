"""`patch_model`: what must go on working beside the loss, how it is undone, checked, and refused."""

import copy
import functools
import io
import types
import warnings

import peft
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel
from torch import nn

from logitless.exchange import STATES
from logitless.losses import linear_cross_entropy
from logitless.models import head_of, patch_model
from logitless.models.patch import check_trainer_arguments

from ..trl_integration import user_models
from ..trl_integration.tiny import IDS, INPUTS, LABELS, VOCAB, partition, tiny_model
from .every import gradients, tiny


def same_as_stock(model, **inputs):
    """Loss and gradients of the model as it is, and of a stock twin."""
    twin = transformers.AutoModelForCausalLM.from_config(model.config)
    twin.load_state_dict(model.state_dict())
    stock, expected = gradients(twin, **INPUTS | inputs)
    ours, actual = gradients(model, **INPUTS | inputs)
    assert ours.logits is None
    torch.testing.assert_close(ours.loss, stock.loss)
    torch.testing.assert_close(actual, expected)


def test_patch_tells_what_it_did(caplog):
    model = tiny_model()
    with caplog.at_level("INFO", logger="logitless"):
        patch_model(model, logits_budget="1.5MiB")()
        with pytest.raises(
            ValueError, match="^logits_budget: expected a positive number of bytes, got '1 gig'"
        ):
            patch_model(model, logits_budget="1 gig")
        assert "logits_budget 1.5 MiB, " in caplog.records.pop().getMessage()
        patch = patch_model(model)
    assert patch.checked == "checked at attach" and patch.last_plan is None
    line = "LlamaForCausalLM: patch_model: loss without full logits, logits_budget the device's default, "
    assert [record.getMessage() for record in caplog.records] == [f"{line}checked at attach"]
    model(**INPUTS).loss.backward()
    assert patch.last_plan.strategy == "fused"
    with torch.no_grad():
        model(**INPUTS)
    assert patch.last_plan.strategy == "loss_only"
    with pytest.raises(ValueError, match="model: expected LlamaForCausalLM as it comes.*undo that first"):
        patch_model(model)


def test_undo_leaves_nothing_behind():
    model = tiny_model()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    patch = patch_model(model)
    assert type(model).__name__ == "LlamaForCausalLM" and isinstance(model.lm_head, nn.Linear)
    patch()
    patch()
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is nn.Linear
    assert before == {name: set(module.__dict__) for name, module in model.named_modules()}
    assert model(**INPUTS).logits is not None


# --- arguments


@pytest.mark.parametrize("given", ["labels", "positional", "shift_labels", "both"])
def test_labels_however_they_come(given):
    model, aligned = tiny_model(), nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    expected = model(IDS, labels=LABELS).loss
    patch_model(model)
    out = {
        "labels": lambda: model(IDS, labels=LABELS),
        "positional": lambda: model(IDS, None, None, None, None, LABELS),
        "shift_labels": lambda: model(IDS, shift_labels=aligned),
        "both": lambda: model(IDS, labels=LABELS, shift_labels=aligned),
    }[given]()
    torch.testing.assert_close(out.loss, expected)
    assert out.logits is None


ROUTED = {"output_router_logits": True}


@pytest.mark.parametrize("family, options", [("llama", {}), ("mixtral", ROUTED)])
def test_num_items_in_batch(family, options):
    """The cross-entropy is divided by it, and the router loss is not."""
    model = tiny_model(family, **options)
    patch_model(model)
    same_as_stock(model, num_items_in_batch=torch.tensor(50))


@pytest.mark.parametrize("family, options", [("llama", {}), ("tied", {}), ("mixtral", ROUTED)])
def test_a_step_without_targets_trains_nothing(family, options):
    """transformers' Trainer divides by 0 then: the loss is NaN and the gradients are 0."""
    model = tiny_model(family, **options)
    patch_model(model)
    nothing = {"labels": torch.full_like(IDS, -100), "num_items_in_batch": torch.tensor(0)}
    twin = transformers.AutoModelForCausalLM.from_config(model.config)
    twin.load_state_dict(model.state_dict())
    (stock, expected), (ours, actual) = (gradients(x, **INPUTS | nothing) for x in (twin, model))
    assert ours.loss.isnan() and stock.loss.isnan()
    torch.testing.assert_close(actual, expected)
    assert any(x.any() for x in actual.values()) == (family == "mixtral")  # its router loss


def test_a_trainers_steps_with_and_without_targets(tmp_path):
    """Losses, norms and weights are the stock model's, of which the first step has no targets."""
    rows = [{"input_ids": row, "labels": row if i else row * 0 - 100} for i, row in enumerate(IDS)]
    arguments = {"max_steps": 2, "per_device_train_batch_size": 1, "logging_steps": 1, "use_cpu": True}
    arguments |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "learning_rate": 0.01}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *given):
            return None

    runs = []
    for patched in (False, True):
        model = tiny_model()
        if patched:
            patch_model(model)
        trainer = InOrder(model, transformers.TrainingArguments(tmp_path, **arguments), train_dataset=rows)
        trainer.train()
        logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
        runs.append((logs, {name: x.detach() for name, x in model.named_parameters()}))
    (stock, expected), (ours, actual) = runs
    assert stock[0] == ours[0] == (0.0, 0.0) and ours[1][1] > 0
    torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_function_of_the_users_is_honoured():
    model = tiny_model()

    def smoothed(logits, labels, vocab_size, **kwargs):
        flat = logits[:, :-1].reshape(-1, vocab_size)
        return nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.3)

    model.loss_function = smoothed
    expected = model(**INPUTS).loss
    patch_model(model)
    torch.testing.assert_close(model(**INPUTS).loss, expected)


cross_entropy = nn.functional.cross_entropy
REFUSED = {
    "'softmax'": lambda logits, labels: logits.softmax(-1).sum(),
    "log_softmax": lambda logits, labels: torch.log_softmax(logits, -1).sum(),
    "view.*of shape": lambda logits, labels: cross_entropy(logits[:1, :1].view(-1), labels[0, 0]),
    "cross_entropy of shape": lambda logits, labels: cross_entropy(logits, labels),
    "cross_entropy .* reduce=False": lambda logits, labels: cross_entropy(
        logits.view(-1, VOCAB), labels.flatten(), reduce=False
    ).sum(),
    "an index of slice, Tensor": lambda logits, labels: cross_entropy(
        logits[:, torch.arange(3)].flatten(0, 1), labels[:, :3].flatten()
    ),
    "a product with Tensor": lambda logits, labels: cross_entropy(
        (logits * torch.ones(VOCAB)).view(-1, VOCAB), labels.flatten()
    ),
    "a second tanh": lambda logits, labels: torch.tanh(torch.tanh(logits)),
    "logsumexp over dimension 1": lambda logits, labels: logits.logsumexp(1),
}


@pytest.mark.parametrize("use", REFUSED)
def test_uses_that_need_the_logits_are_refused(use):
    model = tiny_model()
    patch_model(model)
    model.loss_function = lambda logits, labels, **_: REFUSED[use](logits, labels)
    with pytest.raises(
        (TypeError, AttributeError), match=f"logits: expected a loss that is .*, got {use}.* of them"
    ):
        model(**INPUTS)
    # and the next call is not left with the deferred head
    assert isinstance(model(IDS).logits, torch.Tensor)


def test_cross_entropy_of_pytorch_that_is_replaced(monkeypatch):
    """A wrapper that calls PyTorch's function is supported; Liger's function reads the logits."""
    model = tiny_model()

    def liger_cross_entropy(input, target, **options):
        return input.new_zeros(input.stride()).sum()

    class Halved:
        def __call__(self, input, target, **options):
            return 0.5 * cross_entropy(input, target, **options)

    for replacement in (lambda *args, **options: 0.5 * cross_entropy(*args, **options), Halved()):
        with monkeypatch.context() as patched:
            patched.setattr(nn.functional, "cross_entropy", replacement)
            expected = model(**INPUTS).loss
            undo = patch_model(model)
            torch.testing.assert_close(model(**INPUTS).loss, expected)
            undo()
    patch_model(model)
    monkeypatch.setattr(nn.functional, "cross_entropy", liger_cross_entropy)
    expected = "in .*liger_cross_entropy, which replaces torch.nn.functional.cross_entropy; restore PyTorch's"
    with pytest.raises(AttributeError, match=f"got 'new_zeros' of them {expected}"):
        model(**INPUTS)
    monkeypatch.undo()
    assert model(**INPUTS).loss.isfinite()


def test_a_tuple_would_have_no_place_for_logits():
    model = tiny_model()
    patch_model(model)
    with pytest.raises(ValueError, match="return_dict: expected True for a labelled call, got False"):
        model(**INPUTS, return_dict=False)
    assert isinstance(model(IDS, return_dict=False)[0], torch.Tensor)


def test_other_calls_run_as_before():
    plain, model = tiny_model().eval(), tiny_model().eval()
    patch_model(model)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))


def test_own_losses_beside_the_patch_are_not_reported():
    """A loop may compute a loss from the backbone's output, and evaluates and generates in any mode."""
    model = tiny_model().train()
    patch_model(model)
    targets = nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for head in (head_of(model), model.lm_head.weight):
            hidden = model.base_model(IDS).last_hidden_state
            linear_cross_entropy(hidden, head, targets).backward()
        model(**INPUTS).loss.backward()
        with torch.no_grad():
            model(IDS)
        model.generate(IDS, max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(IDS))
        model.eval()(IDS)


# --- copies and files


def test_a_deep_copy_trains_its_own_weights():
    model = tiny_model()
    patch = patch_model(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(3)
        twin.model.embed_tokens.weight.mul_(2)
    same_as_stock(twin)
    assert all(x.grad is None for x in model.parameters())
    patch()
    assert model(**INPUTS).logits is not None and twin(**INPUTS).logits is None


def test_a_deep_copy_that_calls_the_model_it_was_copied_from():
    """As after training by TRL, whose `forward` on the instance holds the method that it replaces."""
    model = tiny_model()
    stock = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, **kwargs):
        return stock(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    patch_model(model)()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(3)
    expected = "got a deep copy whose `forward` calls the model that was copied; delete its attribute"
    for use in (patch_model, head_of):
        with pytest.raises(ValueError, match=expected):
            use(twin)
    del twin.forward
    patch_model(twin)
    same_as_stock(twin)


def test_files_hold_the_stock_model(tmp_path):
    model = tiny_model()
    expected = model(**INPUTS).loss
    keys = model.state_dict().keys()
    patch_model(model)
    assert model.state_dict().keys() == keys
    model.save_pretrained(tmp_path)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for restored in (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
        torch.load(file, weights_only=False),
    ):
        assert type(restored) is transformers.LlamaForCausalLM and type(restored.lm_head) is nn.Linear
        out = restored(**INPUTS)
        torch.testing.assert_close(out.loss, expected)
        assert out.logits is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patch_model(model)
    same_as_stock(model)


def test_a_trainer_that_predicts_without_logits(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_eval_batch_size": 1}
    model = tiny_model()
    undo = patch_model(model)
    trainer = transformers.Trainer(model, transformers.TrainingArguments(tmp_path, **arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert trainer.evaluate(rows)["eval_loss"] > 0  # which reads the loss alone
    expected = "logits: expected a prediction step that reads the loss alone, got one that reads logits"
    with pytest.warns(UserWarning, match=expected) as caught:
        trainer.predict(rows)
    assert len([each for each in caught if "logits" in str(each.message)]) == 1
    undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert trainer.predict(rows).predictions.shape == (*IDS.shape, VOCAB)


# --- forward passes that somebody else put on the instance


def autocast_by_accelerate(model):
    """As `Accelerator.prepare_model` does with mixed_precision="bf16"."""
    model._original_forward = model.forward
    new = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(new, model)
    model.forward = types.MethodType(convert_outputs_to_fp32(model.forward.__func__), model)


@pytest.mark.parametrize("first", ["accelerate", "patch"])
@pytest.mark.parametrize("undone", [False, True])
def test_accelerates_autocast(first, undone):
    model, plain = tiny_model(), tiny_model()
    autocast_by_accelerate(plain)
    expected = plain(**INPUTS).loss
    assert expected != tiny_model()(**INPUTS).loss
    if first == "accelerate":
        autocast_by_accelerate(model)
    patch = patch_model(model)
    if first == "patch":
        autocast_by_accelerate(model)
    for one in (model, copy.deepcopy(model)):
        out = one(**INPUTS)
        assert out.logits is None
        torch.testing.assert_close(out.loss, expected, rtol=1e-3, atol=0)
    if undone:
        patch()
        out = model(**INPUTS)
        assert torch.equal(out.loss, expected) and out.logits is not None
        assert STATES not in model.__dict__


def test_accelerate_takes_its_own_wrapper_off_and_not_ours():
    model = tiny_model()
    patch_model(model)
    autocast_by_accelerate(model)
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert model(**INPUTS).logits is None


def test_a_head_with_a_hook_of_accelerate():
    """As with a device_map: the hook moves the head's input, and ours must not lose the head for it."""
    model = tiny_model()
    add_hook_to_module(model.lm_head, AlignDevicesHook(execution_device="cpu"))
    patch = patch_model(model)
    same_as_stock(model)
    patch()
    assert "forward" in model.lm_head.__dict__ and model(**INPUTS).logits is not None
    offloaded = tiny_model()
    add_hook_to_module(offloaded.lm_head, AlignDevicesHook(execution_device="cpu", offload=True))
    with pytest.raises(ValueError, match="model: expected an LM head on a device, got one that is offloaded"):
        patch_model(offloaded)


def test_adapters_that_come_after_the_patch():
    model = tiny_model()
    patch = patch_model(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    ours, actual = gradients(adapted, **INPUTS)
    stock = tiny_model()
    torch.manual_seed(0)
    of_stock, expected = gradients(peft.get_peft_model(stock, config), **INPUTS)
    torch.testing.assert_close(ours.loss, of_stock.loss)
    torch.testing.assert_close(actual, expected)
    assert ours.logits is None and any("lm_head.lora_A" in name for name in actual)
    patch()
    assert not any(STATES in module.__dict__ for module in adapted.modules())


# --- dtypes


def test_fp32_head_on_a_half_precision_backbone():
    """As Mamba has it, whose own forward pass casts; autocast casts for the others."""
    model = tiny_model().bfloat16()
    model.lm_head.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**INPUTS).loss
        patch_model(model)
        torch.testing.assert_close(model(**INPUTS).loss, expected, rtol=1e-2, atol=0)
    mamba = tiny("MambaForCausalLM").bfloat16()
    mamba.lm_head.float()
    expected = mamba(IDS, labels=LABELS).loss
    patch_model(mamba)
    torch.testing.assert_close(mamba(IDS, labels=LABELS).loss, expected)


# --- DeepSpeed ZeRO-3


def test_zero_3_gathers_the_head_for_the_calls_of_its_module():
    model = tiny_model()
    _, expected = gradients(model, **INPUTS)
    partition(model.lm_head)
    patch = patch_model(model)
    assert patch.checked.startswith("not checked yet")
    _, actual = gradients(model, **INPUTS)
    assert patch.checked == "checked at step 1" and model.lm_head.weight.numel() == 0
    torch.testing.assert_close(actual, expected)


# --- the probes


def test_probes_leave_no_trace():
    model = tiny_model(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    patch_model(model)
    assert torch.equal(torch.get_rng_state(), state) and modes == [m.training for m in model.modules()]
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight)) and not calls


def test_a_head_that_is_not_its_parameters():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, args, out: out)  # as a logger: nothing changes
    patch_model(model)()
    # an instance's own forward that is not the class's: read as a Linear, and found out
    head = model.lm_head
    head.forward = lambda x: nn.functional.linear(x, head.weight).clamp(max=3.0)
    with pytest.raises(
        ValueError, match="model: expected logits that differ by at most .* from those of its head's"
    ):
        patch_model(model)
    assert (
        type(model) is transformers.LlamaForCausalLM
        and type(head) is nn.Linear
        and "forward" in head.__dict__
    )


def test_a_loss_that_differs_is_refused_with_both_numbers(monkeypatch):
    from logitless.models import logits

    own = logits.DeferredLogits.cross_entropy
    wrong = lambda self, target, **options: own(self, target.roll(1), **options)
    monkeypatch.setattr(logits.DeferredLogits, "cross_entropy", wrong)
    model = tiny_model()
    with pytest.raises(
        ValueError, match=r"model: expected the model's own loss \d+\.\d+, got \d+\.\d+; compute"
    ):
        patch_model(model)
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is nn.Linear


def test_tokens_that_the_model_selects_by_the_attention_mask():
    """Qwen2-Audio indexes logits and labels before the loss."""
    audio = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    text = {"model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Qwen2AudioConfig(
        audio_config=audio | {"num_mel_bins": 8, "max_source_positions": 8}, text_config=text
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    inputs = INPUTS | {"attention_mask": (torch.arange(11) < torch.tensor([[11], [7]])).long()}
    stock, expected = gradients(model, **inputs)
    assert patch_model(model).checked == "checked at attach"
    ours, actual = gradients(model, **inputs)
    torch.testing.assert_close(ours.loss, stock.loss)
    torch.testing.assert_close(actual, expected)


def test_a_use_of_the_attention_mask_is_refused_at_once():
    class Weighted(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            out = super().forward(input_ids, attention_mask, **kwargs)
            logits = out.logits if attention_mask is None else out.logits * attention_mask[..., None]
            out.loss = cross_entropy(logits.view(-1, VOCAB), labels.view(-1))
            return out

    with pytest.raises(TypeError, match="logits: expected a loss that is .*, got a product with Tensor"):
        patch_model(Weighted(tiny_model().config))


def test_a_model_that_cannot_be_called_with_ids_alone():
    model = tiny_model()
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: {}[1] if kwargs["input_ids"].shape[1] < 5 else None, with_kwargs=True
    )
    patch = patch_model(model)
    assert patch.checked == "checked at attach, its head alone (KeyError: 1)"
    model(**INPUTS).loss.backward()


def test_a_model_whose_loss_is_not_finite():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert patch_model(model).checked == "checked at attach, its head alone (its own loss is nan)"


@pytest.fixture
def patched_on_meta():
    """A model whose parameters come after its patch, and the patch."""
    with torch.device("meta"):
        model = tiny_model()
    patch = patch_model(model)
    assert patch.checked.startswith("not checked yet: ")
    model.to_empty(device="cpu").load_state_dict(tiny_model().state_dict())
    model.model.rotary_emb = tiny_model().model.rotary_emb
    return model, patch


def test_meta_models_are_checked_at_step_1(patched_on_meta):
    model, patch = patched_on_meta
    same_as_stock(model)
    assert patch.checked == "checked at step 1"


def test_an_unchecked_model_is_not_compiled_silently(patched_on_meta):
    model, _ = patched_on_meta
    with torch.compiler.set_stance("default"):
        with pytest.raises(Exception, match="pass unverified=True"):
            torch.compile(model, backend="eager", fullgraph=True)(**INPUTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, options",
    [
        ("llama", {}),
        ("gemma2", {}),
        ("mixtral", ROUTED),
    ],
)
def test_compiles_into_one_graph(family, options):
    model = tiny_model(family, **options)
    expected = model(**INPUTS).loss
    patch_model(model)
    with torch.compiler.set_stance("default"):
        out = torch.compile(model, backend="aot_eager", fullgraph=True)(**INPUTS)
    torch.testing.assert_close(out.loss, expected)
    assert out.logits is None


# --- what is refused


def test_models_without_a_head():
    for model in (tiny_model().base_model, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="model: expected a causal language model with an LM head, got"):
            patch_model(model)


def test_a_forward_pass_that_does_not_call_its_head(monkeypatch):
    model = tiny_model()
    other = nn.Linear(32, VOCAB, bias=False)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: other)
    with pytest.raises(
        ValueError, match="model: expected a forward pass that calls the module of get_output_emb"
    ):
        patch_model(model)


def test_data_parallel():
    model = tiny_model()
    patch = patch_model(model)
    # as torch.nn.parallel.replicate makes it, which needs two GPUs
    with pytest.raises(ValueError, match="model: expected one process per GPU, got nn.DataParallel"):
        model._replicate_for_data_parallel()(**INPUTS)
    patch()
    assert model._replicate_for_data_parallel()(**INPUTS).logits is not None


def test_label_smoothing_of_the_plain_trainer(tmp_path):
    """Trainer removes the labels and smooths full logits."""
    args = transformers.TrainingArguments(output_dir=tmp_path, label_smoothing_factor=0.1, report_to=[])
    with pytest.raises(ValueError, match="label_smoothing_factor: expected 0 with a patched model, got 0.1"):
        check_trainer_arguments(args)
    check_trainer_arguments(transformers.TrainingArguments(output_dir=tmp_path, report_to=[]))
    model = tiny_model()
    patch_model(model)
    trainer = transformers.Trainer(model, args)
    with pytest.warns(UserWarning, match="labels: expected labels in a training step, got none.*full logits"):
        trainer.compute_loss(model.train(), dict(INPUTS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.compute_loss(model, dict(INPUTS))  # said once
        with torch.no_grad():
            tiny_model().train()(IDS)


# --- forward passes of the user's


@pytest.mark.parametrize("forward", [user_models.without_return_dict, user_models.returns_a_tuple])
def test_a_forward_pass_of_the_models(forward):
    numbers = []
    for patched in (False, True):
        model = user_models.subclass(forward)
        if patched:
            assert patch_model(model).checked == "checked at attach"
            assert head_of(model).logit_scale == 1.0
        out = model(**INPUTS)
        loss = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
        numbers.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(numbers[1], numbers[0], rtol=1e-4, atol=1e-5)
    assert (out[1] if isinstance(out, tuple) else out.logits) is None


def test_labels_by_position_and_by_name():
    """A forward pass with `*args` passes them on to that of the class that it extends."""

    def by_name(self, *args, labels=None, **kwargs):
        return transformers.LlamaForCausalLM.forward(self, *args, labels=labels, **kwargs)

    def anything(self, *args, **kwargs):
        return transformers.LlamaForCausalLM.forward(self, *args, **kwargs)

    mask = torch.ones_like(IDS)
    for forward in (by_name, anything):
        model = user_models.subclass(forward)
        expected = model(**INPUTS).loss
        patch_model(model)
        assert model.eval()(IDS, mask).logits is not None
        torch.testing.assert_close(model(IDS, mask, labels=LABELS).loss, expected)
    torch.testing.assert_close(model(IDS, mask, None, None, None, LABELS).loss, expected)


@pytest.mark.parametrize("forward", [user_models.without_loss, user_models.returns_logits])
def test_a_forward_pass_without_a_loss(forward):
    patched = user_models.subclass(forward)
    patch_model(patched)
    with pytest.raises(ValueError, match="model: expected outputs with a loss for labels, got "):
        patched(**INPUTS)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x**2,
        lambda x: x > 0,
        lambda x: x == 0,
        lambda x: x @ x,
        lambda x: abs(x),
        lambda x: 1 / x,
        lambda x: x[..., :3].max(),
        lambda x: list(x),
        lambda x: float(x),
        lambda x: x.__setitem__(0, 0),
        lambda x: x.masked_fill_(x, 0),
    ],
)
def test_every_other_use_of_the_logits_is_refused_by_name(use):
    def forward(self, *args, labels=None, **kwargs):
        out = transformers.LlamaForCausalLM.forward(self, *args, **kwargs)
        use(out.logits) if labels is not None else None
        return out

    model = user_models.subclass(forward)
    patch_model(model)
    with pytest.raises((TypeError, AttributeError), match="^logits: expected a loss that is their cross-ent"):
        model(**INPUTS)
