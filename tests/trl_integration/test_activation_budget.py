"""`activation_budget`, alone and beside the other flags: gradients of a few trainers, and what is refused."""

import logging

import pytest
import torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin

import logitless.trl_integration as ours
from logitless.activations import fit as activations
from logitless.activations.fit import KEY
from logitless.exchange import state_of
from logitless.models import fit_activations
from logitless.trl_integration import apply_to, remove_from
from tests.cases import usually

from .compare import adapted, options, our_pair, sft_trainer
from .kinds import step
from .tiny import Run, assert_same_gradients, tiny_model

# The second model of some: it runs without gradients.
KINDS = ("SFT", "DPO", "GRPO", "ORPO", "Distillation")
STEPS = {"max_steps": 3, "learning_rate": 1e-3}
PLENTY = 10**9
BOTH = {"use_chunked_loss": True, "logits_budget": 2**14, "use_fused_layers": True}


def flagged(kind: str, folder, budget: int | str, **more) -> Run:
    return step(kind, folder, activation_budget=budget, **our_pair(kind), **STEPS | more)


def assert_equal_gradients(actual: Run, expected: Run) -> None:
    assert len(actual.gradients) == len(expected.gradients) == STEPS["max_steps"]
    for mine, stock in zip(actual.gradients, expected.gradients):
        assert mine.keys() == stock.keys() and all(torch.equal(mine[name], x) for name, x in stock.items())


@pytest.fixture
def plans(monkeypatch) -> list:
    """The plans of all passes, in their order."""
    made, stock = [], activations.ActivationPlan

    def plan(*args):
        made.append(stock(*args))
        return made[-1]

    monkeypatch.setattr(activations, "ActivationPlan", plan)
    return made


def part(plans: list) -> int:
    """A budget with which some of the layers that were all kept are run again."""
    most = max(plan.bytes for plan in plans)
    assert any(set(plan.levels) == {"keep"} for plan in plans)
    plans.clear()
    return most * 3 // 5


@pytest.mark.parametrize("kind", usually(["SFT", "DPO", "GRPO"], KINDS))
def test_gradients_are_those_of_the_stock_trainer(folder, plans, kind):
    """Bit for bit, whatever gradient_checkpointing says; beside both flags to rounding."""
    stock = step(kind, folder, **STEPS)
    all_kept = flagged(kind, folder, PLENTY, gradient_checkpointing=True)
    assert_equal_gradients(all_kept, stock)
    budget = part(plans)
    fitted = flagged(kind, folder, budget)
    assert_equal_gradients(fitted, stock)
    handle = fitted.trainer.fitted_activations.fitted
    assert any(set(plan.levels) == {"full", "keep"} for plan in plans)
    assert max(plan.bytes for plan in plans) <= budget and handle.held_bytes == 0
    both = flagged(kind, folder, budget, **BOTH)
    assert any("cheap" in plan.levels for plan in plans)
    assert_same_gradients(stock, both, rtol=1e-3)
    assert_equal_gradients(flagged(kind, folder, PLENTY, **BOTH), both)


@pytest.mark.parametrize("dtype", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_lora_with_dropout(folder, plans, dtype):
    def wrap(model):
        return adapted(model, lora_dropout=0.1)

    given = {"wrap": wrap, "gradient_accumulation_steps": 2, "use_fused_layers": True} | dtype
    stock = step("SFT", folder, **given, **our_pair("SFT"), **STEPS)
    mine = flagged("SFT", folder, PLENTY, **given)
    assert_equal_gradients(mine, stock)
    assert_equal_gradients(flagged("SFT", folder, part(plans), **given), stock)


def test_the_log_line(folder, caplog):
    with caplog.at_level(logging.INFO, "logitless"):
        run = flagged("SFT", folder, "1GB")
    lines = [x.message for x in caplog.records if "activation budget" in x.message]
    assert len(lines) == 1 and lines[0].startswith("activation budget: 2 layers, ")
    assert "of 953.67 MiB" in lines[0] and run.trainer.args.activation_budget == "1GB"


def test_apply_to_and_undo(tmp_path):
    trainer = sft_trainer(tmp_path)
    before = dict(vars(trainer))
    only = {"use_chunked_loss": False, "activation_budget": "2MiB"}
    undo = apply_to(trainer, **only)
    assert vars(trainer).keys() - before.keys() == {"fitted_activations", "training_step"}
    assert state_of(trainer.model.model, KEY) is trainer.fitted_activations.fitted
    with pytest.raises(ValueError, match="trainer: expected one without the fitted activations, got a SFTT"):
        apply_to(trainer, **only)
    undo_rest = apply_to(trainer, use_fused_layers=True)
    undo()
    assert state_of(trainer.model.model, KEY) is None and "fitted_activations" not in vars(trainer)
    undo_rest()
    apply_to(trainer, use_fused_layers=True, activation_budget=2**20)
    assert trainer.fitted_activations.fitted.budget == 2**20
    remove_from(trainer)
    assert state_of(trainer.model.model, KEY) is None
    assert not any("_logitless_states" in vars(module) for module in trainer.model.modules())


def test_any_trainer_takes_a_budget(tmp_path):
    args = transformers.TrainingArguments(**options(tmp_path, label_smoothing_factor=0.1))
    model = tiny_model()
    fit_activations(model, 5)  # it has been in another trainer
    trainer = transformers.Trainer(model, args=args)
    undo = apply_to(trainer, use_chunked_loss=False, activation_budget="77MB")
    assert state_of(model.model, KEY).budget == 77 * 10**6
    undo()
    assert state_of(model.model, KEY) is None


def test_out_of_memory_in_a_step(tmp_path):
    trainer = sft_trainer(tmp_path)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    trainer.training_step = fail
    undo = apply_to(trainer, use_chunked_loss=False, activation_budget="2MiB")
    for notes in (1, 0):
        with pytest.raises(torch.OutOfMemoryError, match="no memory") as caught:
            trainer.training_step(trainer.model, {})
        actual = getattr(caught.value, "__notes__", [])
        assert len(actual) == notes and all("activation_budget: no plan yet" in note for note in actual)
        undo()


def test_a_bad_budget(tmp_path):
    with pytest.raises(ValueError, match="activation_budget: expected a positive number of bytes, got 0"):
        ours.SFTConfig(**options(tmp_path, activation_budget=0))


def assert_refused(trainer, message: str) -> None:
    before = dict(vars(trainer))
    with pytest.raises(ValueError, match=message):
        apply_to(trainer, use_fused_layers=True, activation_budget="1GiB")
    assert vars(trainer) == before and "_logitless_states" not in vars(trainer.model.model)


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("activation_offloading", True, "activation_offloading: expected False with an activation_budget"),
        ("torch_compile", True, "torch_compile: expected False with an activation_budget, got True; Ind"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": True}, "kwargs: expected none of use_reentrant"),
        ("gradient_checkpointing_kwargs", {"every_n_layers": 2}, "expected none of every_n_layers"),
        ("gradient_checkpointing_kwargs", {"offload": True}, "expected none of offload"),
        ("fsdp_config", {"activation_checkpointing": True}, "fsdp_config: expected activation_checkpoin"),
    ],
)
def test_options_that_are_refused(tmp_path, option, value, message):
    trainer = sft_trainer(tmp_path)
    setattr(trainer.args, option, value)
    assert_refused(trainer, message)


def test_fsdp_1_is_refused(tmp_path, monkeypatch):
    trainer = sft_trainer(tmp_path)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    monkeypatch.setitem(trainer.accelerator.state.__dict__, "fsdp_plugin", plugin)
    assert_refused(trainer, "fsdp_version: expected 2 with an activation_budget, got 1")


def test_checkpointing_that_is_not_reentrant_is_taken(tmp_path):
    trainer = sft_trainer(tmp_path)
    trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    apply_to(trainer, use_fused_layers=True, activation_budget="1GiB")()
