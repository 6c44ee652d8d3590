"""`use_fused_layers`, alone and beside the chunked loss: one step of a few trainers, and what is refused."""

import functools
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers

from logitless.exchange import state_of
from logitless.layers import fused_forwards
from logitless.models import fuse_layers
from logitless.trl_integration import apply_to

from .compare import adapted, options, our_pair, sft_trainer, stock_pair
from .kinds import step
from .tiny import VOCAB, assert_same_gradients, tiny_model

# The second model of each: GRPO runs with a KL penalty.
KINDS = {"SFT": None, "DPO": "ref_model", "GRPO": "ref_model", "ORPO": None, "Distillation": "teacher_model"}
BOTH = {"use_chunked_loss": True, "logits_budget": 2**14}
COUNTS = "5 LlamaRMSNorm, 2 LlamaDecoderLayer, 2 LlamaAttention, 2 LlamaMLP"
MODULES = 11


def fused(model) -> int:
    return sum(state_of(module, fused_forwards.KEY) is not None for module in model.modules())


def models_of(trainer) -> dict:
    names = ("model", "ref_model", "teacher_model")
    return {name: x for name in names if (x := getattr(trainer, name, None)) is not None}


def flagged(kind: str, folder, **more):
    return step(kind, folder, use_fused_layers=True, **our_pair(kind), **more)


@pytest.fixture
def lines(caplog):
    """The lines of our log."""
    with caplog.at_level(logging.INFO, "logitless.trl_integration"):
        yield lambda: [x.message for x in caplog.records if x.name == "logitless.trl_integration"]


@pytest.fixture
def runs(monkeypatch) -> set:
    """The norms that have run as ours."""
    seen, stock_norm = set(), fused_forwards.apply_norm

    def apply_norm(body, module, *args):
        seen.add(module)
        return stock_norm(body, module, *args)

    monkeypatch.setattr(fused_forwards, "apply_norm", apply_norm)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_alone_and_with_the_loss(folder, calls, lines, runs, kind):
    """The gradient of each parameter is the stock trainer's."""
    stock = step(kind, folder)
    assert not runs and not any(map(fused, models_of(stock.trainer).values()))

    layers = flagged(kind, folder)
    assert_same_gradients(stock, layers, rtol=1e-4)
    assert calls.number == 0 and "chunked_loss" not in vars(layers.trainer)
    models = models_of(layers.trainer)
    assert set(models) == {"model", KINDS[kind]} - {None} == set(layers.trainer.fused_layers.reports)
    for model in models.values():
        assert fused(model) == MODULES and runs & set(model.modules())
    said = "; ".join(f"fused in {name}: {COUNTS}" for name in models)
    assert lines() == [f"{kind}Trainer: {said}"]

    both = flagged(kind, folder, **BOTH)
    assert_same_gradients(stock, both, rtol=1e-3)
    assert calls.number > 0 and fused(both.trainer.model) == MODULES
    line = lines()[1]
    assert " products; " in line and line.endswith(f"; {said}") and len(lines()) == 2


def test_sft_fused_layers_off(folder, runs):
    stock, off = step("SFT", folder), step("SFT", folder, **our_pair("SFT"), **BOTH)
    assert not runs and not fused(off.trainer.model) and "fused_layers" not in vars(off.trainer)
    assert_same_gradients(stock, off, rtol=1e-4)


@pytest.mark.parametrize("loss", [False, True], ids=["layers", "both"])
def test_sft_fused_layers_under_lora(folder, runs, loss):
    """Checkpointed, with norms that PEFT trains whole: which run as a copy that `modules_to_save` wraps."""

    def wrap(model):
        return adapted(model, modules_to_save=["norm"])

    given = {"wrap": wrap, "gradient_checkpointing": True}
    stock, mine = step("SFT", folder, **given), flagged("SFT", folder, **given, **(BOTH if loss else {}))
    assert_same_gradients(stock, mine, rtol=1e-3)
    trained = mine.trainer.model.get_base_model().model.norm.modules_to_save["default"]
    assert trained in runs and any("modules_to_save" in name for name in mine.gradients[0])


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO"])
def test_fused_lora_layers(folder, kind):
    """All linear layers, with dropout, whose masks are the stock trainer's on the CPU."""
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False, use_rslora=True
    )

    def pair(names: dict) -> dict:
        return names | {"trainer": functools.partial(names["trainer"], peft_config=config)}

    stock, mine = (
        step(kind, folder, **pair(stock_pair(kind))),
        step(kind, folder, use_fused_layers=True, **pair(our_pair(kind))),
    )
    assert_same_gradients(stock, mine, rtol=1e-4)
    assert all("lora_" in name for name in mine.gradients[0])
    (report,) = mine.trainer.fused_layers.reports.values()
    parts = [part for parts in report.fused.values() for part in parts if part == "LoRA" or "input" in part]
    groups = ["q_proj, k_proj, v_proj of one input", "gate_proj, up_proj of one input"]
    assert sorted(parts) == sorted(["LoRA"] * 14 + groups * 2)
    # The reference is the model with the adapter switched off.
    assert report.stock_calls.keys() == (set() if kind == "SFT" else {"adapters are disabled"})


def test_a_reference_that_is_a_second_adapter(folder):
    """What TRL makes of a model that has an adapter already."""

    def wrap(model):
        return adapted(model, target_modules="all-linear")

    stock, mine = step("DPO", folder, wrap=wrap), flagged("DPO", folder, wrap=wrap)
    assert_same_gradients(stock, mine, rtol=1e-4)
    (report,) = mine.trainer.fused_layers.reports.values()
    assert set(mine.trainer.model.peft_config) == {"default", "ref"} and not report.stock_calls


def test_weights_of_fused_lora_layers_that_vllm_gets(folder):
    from trl.generation.vllm_generation import VLLMGeneration

    class Client:
        def update_named_params(self, metadata, parameters):
            self.sent = {name: value.clone() for name, value in parameters}

        def reset_prefix_cache(self):
            pass

    def sent(model) -> dict[str, torch.Tensor]:
        generation = object.__new__(VLLMGeneration)
        generation.__dict__ |= {
            "model": model,
            "mode": "server",
            "accelerator": SimpleNamespace(is_main_process=True),
            "vllm_client": Client(),
            "_weight_metadata": None,
            "_dist": SimpleNamespace(gather_params=lambda parameters: nullcontext(), is_fsdp=False),
        }
        generation.sync_weights()
        return generation.vllm_client.sent

    models = [adapted(tiny_model(), target_modules="all-linear", modules_to_save=["norm"]) for _ in range(2)]
    report = fuse_layers(models[0]).report
    actual, expected = map(sent, models)
    assert list(actual) == list(expected) and not any("lora" in name for name in actual)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    # Merged and unmerged on the way.
    models[0](torch.tensor([[3, 4]]))
    assert not report.stock_calls


def test_apply_to_and_undo(tmp_path, calls, lines):
    trainer = sft_trainer(tmp_path)
    model, before = trainer.model, dict(vars(trainer))
    handlers = list(trainer.callback_handler.callbacks)
    only = {"use_chunked_loss": False, "use_fused_layers": True}
    undo = apply_to(trainer, **only)
    assert fused(model) == MODULES and vars(trainer).keys() - before.keys() == {"fused_layers"}
    with pytest.raises(ValueError, match="trainer: expected one without the fused layers, got a SFTTrainer"):
        apply_to(trainer, **only)
    # The loss may come later, and go first.
    undo_loss = apply_to(trainer)
    undo()
    assert not fused(model) and "chunked_loss" in vars(trainer)
    undo_loss()
    assert vars(trainer) == before and trainer.callback_handler.callbacks == handlers
    assert not any("_logitless_states" in vars(module) for module in model.modules())

    undo = apply_to(trainer, use_fused_layers=True)
    assert fused(model) == MODULES and "chunked_loss" in vars(trainer)
    undo()
    assert vars(trainer) == before and not fused(model)
    assert calls.number == 0 and lines() == []


def test_a_second_trainer_of_a_model_with_adapters(tmp_path):
    model = adapted(tiny_model(), task_type="CAUSAL_LM")
    names = our_pair("SFT")
    first, second = (
        sft_trainer(tmp_path / name, names["trainer"], names["config"], model=model, use_fused_layers=True)
        for name in ("first", "second")
    )
    for trainer in (first, second):  # the fusion is that of the second
        parts = trainer.fused_layers.reports["model"].fused.values()
        assert sum("LoRA" in each for each in parts) == 4
    second.train()
    assert not second.fused_layers.reports["model"].stock_calls
    second.fused_layers.undo()
    assert not any("_logitless_states" in vars(module) for module in model.modules())


def test_any_trainer_takes_layers(tmp_path):
    """One whose loss the other flag does not know, and a model that has been through a trainer before."""
    args = transformers.TrainingArguments(**options(tmp_path, label_smoothing_factor=0.1))
    model = tiny_model()
    fuse_layers(model)
    trainer = transformers.Trainer(model, args=args)
    undo = apply_to(trainer, use_chunked_loss=False, use_fused_layers=True)
    assert fused(model) == MODULES
    undo()
    assert not fused(model)


def test_what_is_refused(tmp_path, monkeypatch):
    trainer = sft_trainer(tmp_path)
    with pytest.raises(ValueError, match="use_chunked_loss: expected True, or use_fused_layers=True or"):
        apply_to(trainer, use_chunked_loss=False)
    with pytest.raises(ValueError, match="logits_budget: expected None with use_chunked_loss=False, got 16"):
        apply_to(trainer, use_chunked_loss=False, use_fused_layers=True, logits_budget=16)
    before = dict(vars(trainer))
    monkeypatch.setattr(trainer.args, "use_liger_kernel", True)
    monkeypatch.setattr(trainer.args, "liger_kernel_config", {"fused_linear_cross_entropy": False})
    with pytest.raises(ValueError, match="use_liger_kernel: expected False with use_fused_layers=True"):
        apply_to(trainer, use_fused_layers=True)
    assert vars(trainer) == before and "_logitless_states" not in vars(trainer.model)


def gpt2() -> transformers.PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def test_a_model_without_known_layers(tmp_path):
    """A policy, and a reference, after which the policy is not fused either."""
    args = transformers.TrainingArguments(**options(tmp_path))
    layers = {"use_chunked_loss": False, "use_fused_layers": True}
    unknown = pytest.raises(ValueError, match="model: expected norms, .*got GPT2LMHeadModel with none")
    with unknown:
        apply_to(transformers.Trainer(gpt2(), args=args), **layers)
    trainer = transformers.Trainer(tiny_model(), args=args)
    trainer.ref_model = gpt2()
    with unknown:
        apply_to(trainer, **layers)
    assert not fused(trainer.model) and "fused_layers" not in vars(trainer)


def test_a_teacher_that_is_the_student(tmp_path):
    trainer = sft_trainer(tmp_path)
    trainer.teacher_model = trainer.model
    undo = apply_to(trainer, use_chunked_loss=False, use_fused_layers=True)
    assert set(trainer.fused_layers.reports) == {"model"}
    undo()
    assert not fused(trainer.model)


def test_a_compiled_model_is_said_to_run_its_own(tmp_path, monkeypatch):
    trainer = sft_trainer(tmp_path)
    monkeypatch.setattr(trainer.args, "torch_compile", True)
    apply_to(trainer, use_chunked_loss=False, use_fused_layers=True)
    assert (
        str(trainer.fused_layers) == f"fused in model: {COUNTS} (torch.compile takes the model's own layers)"
    )


@pytest.mark.parametrize("loss", [False, True], ids=["layers", "both"])
def test_models_that_accelerate_has_prepared(folder, runs, loss):
    """For bf16, with a forward pass of its own on each: the reference always is, the policy once it has been
    trained."""
    trainer = step("DPO", folder, bf16=True).trainer
    models, batch = (trainer.model, trainer.ref_model), next(iter(trainer.get_train_dataloader()))
    forwards = [vars(model)["forward"] for model in models]

    def numbers():
        value = trainer.compute_loss(trainer.model, dict(batch))
        return value, torch.autograd.grad(value, list(trainer.model.parameters()))

    stock_value, stock_gradients = numbers()
    undo = apply_to(trainer, use_chunked_loss=loss, use_fused_layers=True)
    value, gradients = numbers()
    torch.testing.assert_close(value, stock_value, rtol=1e-2, atol=0)
    for stock, mine in zip(stock_gradients, gradients, strict=True):
        assert (mine - stock).norm() <= 0.03 * stock.norm() + 1e-6
    assert all(runs & set(model.modules()) for model in models)
    undo()
    assert [vars(model)["forward"] for model in models] == forwards
    assert torch.equal(numbers()[0], stock_value) and not any(map(fused, models))
