"""Models and trainers that existed before the flag: the same losses and gradients, and the way back."""

import pytest
import torch
import transformers
import trl

from logitless.trl_integration import ORPOConfig, ORPOTrainer, SFTConfig, SFTTrainer, apply_to, patch_model
from logitless.trl_integration.apply import PLAIN, adapter_of

from .compare import options
from .kinds import preference_dataset
from .tiny import VOCAB, tiny_dataset, tiny_model, tiny_tokenizer, words


def gradients(model, **inputs):
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["llama", "tied", "gemma2", "granite", "cohere", "mixtral"])
@pytest.mark.parametrize("num_items", [None, torch.tensor(50)], ids=["mean", "num_items"])
def test_patched_model(family, num_items, calls):
    model = tiny_model(family, **({"output_router_logits": True} if family == "mixtral" else {}))
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    inputs |= {} if num_items is None else {"num_items_in_batch": num_items}
    theirs, expected = gradients(model, **inputs)
    undo = patch_model(model, logits_budget=2**14)
    assert calls.number == 0
    ours, found = gradients(model, **inputs)
    assert calls.number == 1 and ours.logits is None
    assert torch.allclose(ours.loss, theirs.loss, rtol=1e-5)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    # Without labels nothing has changed.
    assert torch.equal(model(input_ids=ids).logits, theirs.logits) or torch.allclose(
        model(input_ids=ids).logits, theirs.logits
    )
    undo()
    assert gradients(model, **inputs)[0].logits is not None and calls.number == 1


def test_patched_model_in_the_plain_trainer(tmp_path):
    losses = []
    for patched in (False, True):
        model = tiny_model()
        if patched:
            patch_model(model)
        rows = tiny_dataset().map(lambda row: {"input_ids": (row["input_ids"] * 5)[:16]})
        data = rows.map(lambda row: {"labels": row["input_ids"]})
        args = transformers.TrainingArguments(
            **{k: v for k, v in options(tmp_path, gradient_accumulation_steps=2).items()}
        )
        trainer = transformers.Trainer(model, args=args, train_dataset=data, eval_dataset=data)
        trainer.train()
        losses.append(
            [log["loss"] for log in trainer.state.log_history if "loss" in log]
            + [trainer.evaluate()["eval_loss"]]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_compute_loss_that_takes_any_keyword(tmp_path):
    class Mine(transformers.Trainer):
        def compute_loss(self, model, inputs, **options):
            return super().compute_loss(model, inputs, **options)

    losses = []
    for flag in (False, True):
        data = tiny_dataset().map(lambda row: {"labels": row["input_ids"]})
        args = transformers.TrainingArguments(**options(tmp_path, max_steps=1, per_device_train_batch_size=1))
        trainer = Mine(tiny_model(), args=args, train_dataset=data)
        if flag:
            apply_to(trainer)
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def made(cls, config, tmp_path, **more):
    settings = options(tmp_path, **more)
    given = {"train_dataset": tiny_dataset(), "processing_class": tiny_tokenizer()}
    return cls(tiny_model(), args=config(**settings), **given)


def test_what_apply_to_does_not_take(tmp_path):
    mine = made(SFTTrainer, SFTConfig, tmp_path, use_chunked_loss=True)
    with pytest.raises(ValueError, match="trainer: expected one without the chunked loss, got a SFTTrainer"):
        apply_to(mine)
    stock_trainer = made(trl.SFTTrainer, trl.SFTConfig, tmp_path)
    undo = apply_to(stock_trainer)
    with pytest.raises(ValueError, match="trainer: expected one without the chunked loss"):
        apply_to(stock_trainer)
    undo()
    apply_to(stock_trainer)()
    with pytest.raises(ValueError, match="trainer: expected a transformers.Trainer.*got LlamaForCausalLM"):
        apply_to(tiny_model())
    with pytest.raises(TypeError, match="logits_budget: expected a whole number of bytes"):
        apply_to(stock_trainer, logits_budget=1.5)
    args = transformers.TrainingArguments(**options(tmp_path, label_smoothing_factor=0.1))
    with pytest.raises(ValueError, match="label_smoothing_factor: expected 0 in a trainer outside of TRL"):
        apply_to(transformers.Trainer(tiny_model(), args=args))
    with pytest.raises(ValueError, match="model: expected a causal language model"):
        patch_model(tiny_model().base_model)


class OfTheirOwn(trl.DPOTrainer):
    pass


def test_a_trainer_that_is_not_covered_is_refused_by_name():
    """A subclass inside TRL has a loss of its own, whatever it extends."""
    unknown = type("NewTrainer", (trl.GRPOTrainer,), {"__module__": "trl.experimental.new"})
    assert adapter_of(OfTheirOwn).name == "DPO" and adapter_of(transformers.Trainer) is PLAIN
    for cls in (unknown, trl.RewardTrainer):
        with pytest.raises(
            ValueError, match="trainer: expected one of TRL's DPO, KTO.* SFT, .*got " + cls.__name__
        ):
            adapter_of(cls)


def test_data_parallel_is_refused(tmp_path):
    """`Trainer` wraps the model in it where one process sees several GPUs. TRL's own trainers refuse that
    themselves, these not."""
    patched, trained = tiny_model(), tiny_model()
    undo = patch_model(patched)
    args = ORPOConfig(**options(tmp_path, use_chunked_loss=True, max_length=48))
    trainer = ORPOTrainer(trained, args=args, train_dataset=preference_dataset(), processing_class=words())
    ids = torch.arange(3, 9)[None]
    trainer.chunked_loss.returns_gatherable_logits = True  # as while it computes its loss
    for model, given in ((patched, {"labels": ids}), (trained, {})):
        # as torch.nn.parallel.replicate makes it, which needs two GPUs
        refused = pytest.raises(ValueError, match="model: expected one process per GPU, got nn.DataParallel")
        with trainer.chunked_loss.attach_models(), refused:
            model._replicate_for_data_parallel()(ids, **given)
    undo()
    assert patched._replicate_for_data_parallel()(ids, labels=ids).logits is not None
