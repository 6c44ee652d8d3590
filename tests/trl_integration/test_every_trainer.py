"""Each trainer of TRL with `apply_to` on it, and ours with the flag off, beside the stock one: the gradients
of every parameter in one step. And each notices a TRL that computes its loss elsewhere."""

import logging

import pytest
import torch
import trl

import logitless.trl_integration as ours
from logitless.trl_integration import apply_to
from logitless.trl_integration.pairs import ADAPTERS
from tests.cases import usually

from .compare import adapted, our_pair, stock
from .kinds import ALL, step
from .served import serve
from .tiny import assert_same_gradients

# The last loss of these recomputes the logits in its backward pass; SDPO's has no gradient.
RECOMPUTED = ("DPO", "KTO", "GRPO", "RLOO", "ORPO", "CPO", "GMPO", "OnlineDPO", "A2PO", "SDFT")
PRODUCTS = dict.fromkeys((*RECOMPUTED, "ServerDistillation"), 4) | {"SDPO": 1}


def test_all_twenty_are_here():
    assert {*ALL, "AsyncGRPO", "AsyncDistillation"} == set(ADAPTERS) == set(ours.PAIRS)


@pytest.mark.parametrize("kind", ALL)
def test_flag_off_and_apply_to(folder, monkeypatch, calls, caplog, kind):
    serve(monkeypatch)
    undone = []
    of_stock = step(kind, folder)
    off = step(kind, folder, **our_pair(kind))
    assert calls.number == 0 and "chunked_loss" not in vars(off.trainer)
    for name, grad in of_stock.gradients[0].items():
        assert torch.equal(off.gradients[0][name], grad)

    def change(trainer):
        undone.append((trainer, dict(vars(trainer)), apply_to(trainer, logits_budget=2**14)))

    caplog.clear()
    with caplog.at_level(logging.INFO, "logitless.trl_integration"):
        applied = step(kind, folder, change=change)
    assert_same_gradients(of_stock, applied, rtol=1e-3)
    assert calls.number > 0
    (line,) = [record.message for record in caplog.records if record.name == "logitless.trl_integration"]
    assert line.startswith(f"{kind}Trainer: ") and " projected tokens in " in line
    assert f", {PRODUCTS.get(kind, 3)} product" in line
    assert ("head checked at step 1" in line) is (kind != "Distillation")
    trainer, before, undo = undone[0]
    assert type(trainer) is stock(f"{kind}Trainer")
    undo()
    methods = {"training_step", "prediction_step", "compute_loss", "chunked_loss", "last_plan"}
    assert not methods & (vars(trainer).keys() - before.keys())
    assert not any("_logitless_states" in vars(module) for module in trainer.model.modules())
    logits = trainer.model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits
    assert isinstance(logits, torch.Tensor)


@pytest.mark.parametrize("kind", usually(ALL[::2], ALL))
def test_under_lora(folder, monkeypatch, kind):
    """The pair with the flag on; the head is frozen, and nothing of its size is kept."""
    serve(monkeypatch)
    of_stock = step(kind, folder, wrap=adapted)
    flag = {"use_chunked_loss": True, "logits_budget": 2**14}
    mine = step(kind, folder, wrap=adapted, **our_pair(kind), **flag)
    assert_same_gradients(of_stock, mine, rtol=1e-3)
    assert set(mine.gradients[0]) == {name for name in of_stock.gradients[0] if "lora_" in name}
    products = 1 if kind == "SDPO" else 2
    assert f", {products} product" in mine.trainer.chunked_loss.describe()


def unused(trainer) -> None:
    """As it would be if TRL computed its loss elsewhere: only the check is left of what was put on."""
    undo = apply_to(trainer)
    steps = trainer.training_step, trainer.prediction_step
    session = trainer.chunked_loss
    session.attach_functions.clear()
    undo()
    session.is_off = False
    trainer.training_step, trainer.prediction_step, trainer.last_plan = *steps, None


@pytest.mark.parametrize("kind", ALL)
def test_a_loss_that_is_computed_elsewhere_is_noticed(folder, monkeypatch, kind):
    serve(monkeypatch)
    with pytest.raises(RuntimeError) as raised:
        step(kind, folder, change=unused)
    message = str(raised.value)
    for path, replacement in ADAPTERS[kind].replacements.items():
        assert (f"{path}, " in message) is ("train" in replacement.required_in)
    assert "the chunked loss: expected to be called in every step of" in message
    assert f"(train), got a loss that trl {trl.__version__} computed without" in message
    assert "(supported: >=1.15,<1.17)" in message
