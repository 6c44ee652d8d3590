"""What we rely on in TRL's trainers, and the exchange of their fused head for ours."""

import peft
import pytest
import torch
import trl
import trl.trainer.sft_trainer as stock_module
from transformers import Trainer
from trl.trainer.utils import FusedCausalLMOutput

from logitless.exchange import state_of
from logitless.trl_integration import SFTConfig, SFTTrainer
from logitless.trl_integration.adapter import swapped

from .tiny import tiny_dataset, tiny_model, tiny_tokenizer


def settings(tmp_path, **changes):
    return {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none", **changes}


def given():
    return {"train_dataset": tiny_dataset(), "processing_class": tiny_tokenizer()}


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
def test_stock_constructor_patches_the_base_model_once(tmp_path, monkeypatch, adapter):
    calls = []
    monkeypatch.setattr(
        stock_module, "add_fused_lm_head", lambda *args, **kwargs: calls.append((args, kwargs))
    )
    config = peft.LoraConfig(target_modules=["q_proj"]) if adapter else None
    trainer = trl.SFTTrainer(
        tiny_model(), args=trl.SFTConfig(**settings(tmp_path)), peft_config=config, **given()
    )
    base = trainer.model.get_base_model() if adapter else trainer.model
    assert calls == [((base,), {"outputs": ("log_probs", "entropy", "is_top1")})]


def test_stock_loss_only_sums_the_fields(tmp_path):
    """So a field may come summed. Also: smoothing and the kind of loss are looked up when the loss is
    computed."""
    trainer = trl.SFTTrainer(tiny_model(), args=trl.SFTConfig(**settings(tmp_path)), **given())
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([True] * 5 + [False] * 2)
    fields = {
        "log_probs": -torch.rand(7, generator=generator) * mask,
        "entropy": torch.rand(7, generator=generator) * mask,
        "is_top1": (torch.arange(7) < 2) & mask,
        "label_mask": mask,
    }
    calls, losses, metrics = [], [], []

    def losses_of(**output):
        def model(**kwargs):
            calls.append(kwargs)
            return FusedCausalLMOutput(**output)

        for num_items in (None, 20):
            inputs = {"labels": torch.ones(1, 7), "attention_mask": torch.ones(1, 7)}
            losses.append(trainer.compute_loss(model, inputs, num_items_in_batch=num_items))
        metrics.append(
            [v for name in ("entropy", "mean_token_accuracy") for v in trainer._metrics["train"][name]]
        )
        trainer._metrics["train"].clear()

    trainer.model.train()
    losses_of(**fields)
    trainer.args.loss_type, trainer.label_smoother = "dft", object()
    with swapped(trainer.args, loss_type="nll"), swapped(trainer, label_smoother=None):
        losses_of(**{name: value.sum() for name, value in fields.items()})
    assert all(call["fused_lm_head"] is True and "labels" in call for call in calls)
    torch.testing.assert_close(losses[:2], losses[2:])
    assert losses[0] == pytest.approx(-fields["log_probs"].sum().item() / 5)
    assert losses[1] == pytest.approx(-fields["log_probs"].sum().item() / 20)
    assert metrics[0] == pytest.approx(metrics[1])


def test_trainer_reads_where_to_place_the_model_once(tmp_path, monkeypatch):
    reads = []
    prop = property(lambda self: reads.append(self))
    monkeypatch.setattr(trl.SFTConfig, "place_model_on_device", prop)
    args = trl.SFTConfig(**settings(tmp_path, max_steps=1, save_strategy="no"))
    args.to_dict(), args.to_json_string(), repr(args)
    assert reads == []
    trainer = trl.SFTTrainer(tiny_model(), args=args, **given())
    trainer.train()
    assert reads == [args]
    Trainer(tiny_model(), args=args)
    assert reads == [args, args]


def test_the_exchange_ends_with_the_constructor(tmp_path):
    stock = stock_module.add_fused_lm_head
    args = SFTConfig(**settings(tmp_path, use_chunked_loss=True))
    trainer = SFTTrainer(tiny_model(), args, **given())
    assert stock_module.add_fused_lm_head is stock
    with trainer.chunked_loss.attached():
        assert state_of(trainer.model, "score") is not None
    assert state_of(trainer.model, "score") is None
    with pytest.raises(ValueError, match="train_dataset"):
        SFTTrainer(tiny_model(), args)
    assert stock_module.add_fused_lm_head is stock and not args._claimed


def test_swapped_restores_after_an_error():
    class Owner:
        a, b = 1, 2

    with pytest.raises(RuntimeError), swapped(Owner, a=3, b=4):
        assert (Owner.a, Owner.b) == (3, 4)
        raise RuntimeError
    assert (Owner.a, Owner.b) == (1, 2)
    with pytest.raises(AttributeError), swapped(Owner, absent=1):
        pass


def test_swapped_leaves_nothing_on_a_subclass():
    """Neither on a class that has only inherited the attribute, nor on an instance."""

    class Owner:
        a = 1

    class Inherits(Owner):
        pass

    for owner in (Inherits, Inherits()):
        with swapped(owner, a=3):
            assert owner.a == 3
        assert owner.a == 1 and "a" not in vars(owner)
