"""Models and trainers that existed before the flag: the same losses and gradients, and the way back."""

import copy
import warnings

import pytest
import torch
import transformers
import trl
from datasets import Dataset

from logitless.models import fit_activations, fuse_layers
from logitless.trl_integration import (
    ORPOConfig,
    ORPOTrainer,
    SFTConfig,
    SFTTrainer,
    apply_to,
    patch_model,
    remove_from,
)
from logitless.trl_integration.apply import PLAIN, adapter_of

from .compare import adapted, options, our_pair, sft_trainer, unchanged
from .kinds import preference_dataset, step
from .tiny import VOCAB, Run, tiny_dataset, tiny_model, train, words
from .user_models import returns_a_tuple, subclass, without_return_dict


def labelled_dataset() -> Dataset:
    """Rows of one length, which the plain trainer's collator needs."""
    rows = tiny_dataset().map(lambda row: {"input_ids": (row["input_ids"] * 5)[:16]})
    return rows.map(lambda row: {"labels": row["input_ids"]})


def losses_of(run: Run) -> list[float]:
    return [log["loss"] for log in run.logs if "loss" in log]


def test_patched_model_in_the_plain_trainer(tmp_path):
    args = transformers.TrainingArguments(**options(tmp_path, gradient_accumulation_steps=2))
    data, losses = labelled_dataset(), []
    for wrap in (unchanged, patched):
        model = wrap(tiny_model())
        run = train(transformers.Trainer, args, model, data, eval_dataset=data)
        losses.append([*losses_of(run), run.trainer.evaluate()["eval_loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def patched(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    patch_model(model)
    return model


# SFT and Distillation call the backbone, ORPO the model without labels.
@pytest.mark.parametrize("kind", ["SFT", "Distillation", "ORPO"])
def test_a_patched_model_in_a_trainer_of_trl_is_reported_once(folder, kind):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(kind, folder, wrap=patched, max_steps=2)
        ours = [str(x.message) for x in caught if str(x.message).startswith("labels: expected labels")]
        assert len(ours) == 1 and "use_chunked_loss=True, or call apply_to(trainer)" in ours[0]
        # The flag computes the loss, whether the model is patched or not.
        caught.clear()
        step(kind, folder, wrap=patched, **our_pair(kind), use_chunked_loss=True)
        assert not [x for x in caught if str(x.message).startswith("labels:")]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_peft_model_with_a_task_type_in_the_plain_trainer(tmp_path, bf16):
    def flagged(*args, **kwargs):
        trainer = transformers.Trainer(*args, **kwargs)
        apply_to(trainer)
        return trainer

    def run(cls) -> Run:
        args = transformers.TrainingArguments(**options(tmp_path, bf16=bf16))
        return train(cls, args, adapted(tiny_model(), task_type="CAUSAL_LM"), labelled_dataset())

    stock, mine = run(transformers.Trainer), run(flagged)
    assert mine.trainer.last_plan is not None
    rtol = 3e-2 if bf16 else 1e-3
    assert losses_of(mine) == pytest.approx(losses_of(stock), rel=rtol)
    for name, grad in stock.gradients[0].items():
        assert (mine.gradients[0][name] - grad).norm() <= rtol * grad.norm()


class AnyKeyword(transformers.Trainer):
    def compute_loss(self, model, inputs, **options):
        return super().compute_loss(model, inputs, **options)


class OfTraining(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        actual = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return actual if return_outputs else 3 * actual


class WithoutOutputs(transformers.Trainer):
    def compute_loss(self, model, inputs, num_items_in_batch=None):
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


class OtherOutputs(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs, output_hidden_states=True)
        pooled = {"loss": out.loss, "pooled": out.hidden_states[-1].mean(1)}
        return (out.loss, pooled) if return_outputs else out.loss


class PlainDict(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        return (out.loss, {"loss": out.loss, "logits": out.logits}) if return_outputs else out.loss


@pytest.mark.parametrize("kind", [AnyKeyword, OfTraining, WithoutOutputs, OtherOutputs, PlainDict])
def test_a_compute_loss_of_the_users(tmp_path, kind):
    losses, shapes = [], []
    for flag in (False, True):
        data = labelled_dataset()
        args = transformers.TrainingArguments(**options(tmp_path, max_steps=1))
        trainer = kind(tiny_model(), args=args, train_dataset=data)
        if flag:
            apply_to(trainer)
        losses.append(trainer.train().training_loss)
        if kind is not WithoutOutputs:
            shapes.append(trainer.predict(data.select(range(3))).predictions.shape)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert shapes[:1] == shapes[1:]


def test_models_of_model_init(tmp_path):
    """Each call of `train` makes another one, as a hyperparameter search does."""
    data = labelled_dataset()
    args = transformers.TrainingArguments(**options(tmp_path))
    losses = []
    for flag in (False, True):
        families = iter(("llama", "llama", "gemma2"))
        trainer = transformers.Trainer(
            args=args, model_init=lambda: tiny_model(next(families)), train_dataset=data, eval_dataset=data
        )
        if flag:
            apply_to(trainer)
        for _ in range(2):
            losses += [trainer.train().training_loss, trainer.evaluate()["eval_loss"]]
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-4)
    assert trainer.last_plan is not None


@pytest.mark.parametrize("option", [{"use_fused_layers": True}, {"activation_budget": "64MiB"}])
def test_model_init_with_options_of_one_model(tmp_path, option):
    """What the message says to do works."""
    data = labelled_dataset()
    args = transformers.TrainingArguments(**options(tmp_path))
    trainer = transformers.Trainer(args=args, model_init=lambda: tiny_model(), train_dataset=data)
    name = next(iter(option))
    with pytest.raises(ValueError, match=f"^model_init: expected None with {name}, got a function; its tr"):
        apply_to(trainer, **option)
    expected = trainer.train().training_loss

    def model_init():
        model = tiny_model()
        fuse_layers(model)
        fit_activations(model, "64MiB")
        return model

    trainer.model_init = model_init
    apply_to(trainer)
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-4)


def test_predictions_of_a_model_whose_forward_pass_names_no_arguments(tmp_path):
    """`Trainer` finds no labels there, and calls the model itself."""

    def forward(self, *args, **kwargs):
        return transformers.LlamaForCausalLM.forward(self, *args, **kwargs)

    actual = []
    data = labelled_dataset().select_columns(["input_ids", "labels"])
    for flag in (False, True):
        args = transformers.TrainingArguments(**options(tmp_path, remove_unused_columns=False))
        trainer = transformers.Trainer(subclass(forward), args=args, train_dataset=data)
        if flag:
            apply_to(trainer)
        actual.append((trainer.train().training_loss, trainer.predict(data).predictions[1]))
    assert actual[1][0] == pytest.approx(actual[0][0], rel=1e-4)
    assert actual[1][1].shape == actual[0][1].shape == (24, 16, VOCAB)


@pytest.mark.parametrize("forward", [returns_a_tuple, without_return_dict])
def test_predictions_of_a_forward_pass_of_the_users(tmp_path, forward):
    actual = []
    for flag in (False, True):
        args = transformers.TrainingArguments(**options(tmp_path))
        trainer = transformers.Trainer(subclass(forward), args=args, train_dataset=labelled_dataset())
        if flag:
            apply_to(trainer)
        loss = trainer.train().training_loss
        predictions = trainer.predict(labelled_dataset()).predictions
        actual.append((loss, predictions.shape))
    assert actual[1][0] == pytest.approx(actual[0][0], rel=1e-4)
    assert actual[1][1] == actual[0][1]


def test_a_forward_of_the_head_that_comes_after_the_first_step(tmp_path):
    class Late(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            head = model.lm_head
            head.forward = lambda x: 2 * torch.nn.functional.linear(x, head.weight)

    args = transformers.TrainingArguments(**options(tmp_path, max_steps=2))
    trainer = transformers.Trainer(
        tiny_model(), args=args, train_dataset=labelled_dataset(), callbacks=[Late()]
    )
    apply_to(trainer)
    with pytest.raises(ValueError, match="model: expected logits that differ by at most"):
        trainer.train()


def test_undo_leaves_what_the_user_has_set_since(tmp_path):
    trainer, calls = sft_trainer(tmp_path), []
    undo = apply_to(trainer)
    ours = trainer.training_step
    trainer.training_step = lambda *args, **kwargs: (calls.append(1), ours(*args, **kwargs))[1]
    session = trainer.chunked_loss
    undo()
    trainer.train()
    assert calls and not session.called_replacements


def test_what_apply_to_does_not_take(tmp_path):
    mine = sft_trainer(tmp_path, SFTTrainer, SFTConfig, use_chunked_loss=True)
    with pytest.raises(ValueError, match="trainer: expected one without the chunked loss, got a SFTTrainer"):
        apply_to(mine)
    stock_trainer = sft_trainer(tmp_path)
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
    themselves, the experimental ones do not."""
    model = tiny_model()
    args = ORPOConfig(**options(tmp_path, use_chunked_loss=True, max_length=48))
    trainer = ORPOTrainer(model, args=args, train_dataset=preference_dataset(), processing_class=words())
    trainer.chunked_loss.returns_gatherable_logits = True  # as while it computes its loss
    refused = pytest.raises(ValueError, match="model: expected one process per GPU, got nn.DataParallel")
    with trainer.chunked_loss.attach_models(), refused:
        # as torch.nn.parallel.replicate makes it, which needs two GPUs
        model._replicate_for_data_parallel()(torch.arange(3, 9)[None])


def test_a_deep_copy_of_a_trainer(tmp_path):
    """With the flag its methods would be those of the original."""
    trainer = sft_trainer(tmp_path, SFTTrainer, SFTConfig, use_chunked_loss=True)
    expected = "trainer: expected one without the flag to copy, got use_chunked_loss=True; call remove_from"
    with pytest.raises(ValueError, match=expected):
        copy.deepcopy(trainer)
    remove_from(trainer)
    twin = copy.deepcopy(trainer)
    apply_to(twin)
    weights = [x.clone() for x in trainer.model.parameters()]
    twin.train()
    assert twin.last_plan is not None
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    assert not all(map(torch.equal, weights, twin.model.parameters()))
