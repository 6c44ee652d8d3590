"""Trainers that both the constructor and `apply_to` refuse; and a teacher under DeepSpeed ZeRO-3."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from trl.experimental.orpo import ORPOTrainer

import logitless.trl_integration as ours
from logitless.trl_integration import apply_to
from logitless.trl_integration.adapter import Adapter, Replacement, check_common_options, enable
from logitless.trl_integration.apply import adapter_of
from logitless.trl_integration.versions import import_from_trl

from .compare import options, our_pair, sft_trainer, stock
from .kinds import preference_dataset, step
from .tiny import VOCAB, partition, tiny_model, words


def t5() -> transformers.PreTrainedModel:
    sizes = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **sizes))


@pytest.mark.parametrize("kind", ["ORPO", "CPO"])
def test_an_encoder_decoder(tmp_path, kind):
    settings = options(tmp_path, max_length=24, max_completion_length=12)
    given = {"train_dataset": preference_dataset(), "processing_class": words()}
    trainer = stock(f"{kind}Trainer")(t5(), args=stock(f"{kind}Config")(**settings), **given)
    refused = pytest.raises(
        ValueError, match="model: expected a decoder with the chunked loss, got an encoder"
    )
    with refused:
        apply_to(trainer)
    config, cls = our_pair(kind).values()
    with refused:
        cls(t5(), args=config(**settings, use_chunked_loss=True), **given)


def test_data_parallel():
    with pytest.raises(
        ValueError, match="model: expected one process per GPU, got nn.DataParallel over 2 GPUs"
    ):
        check_common_options(SimpleNamespace(args=SimpleNamespace(n_gpu=2)))


def test_a_loss_function_of_logits(tmp_path):
    with pytest.warns(FutureWarning):
        trainer = sft_trainer(
            tmp_path, partial(trl.SFTTrainer, compute_loss_func=lambda *args, **kwargs: 0.0)
        )
    with pytest.raises(ValueError, match="compute_loss_func: expected None with the chunked loss"):
        apply_to(trainer)
    # What TRL writes there with transformers before 5.19 is no function.
    trainer.compute_loss_func = "non-None value to disable scaling"
    apply_to(trainer)()


class OldGRPO(trl.GRPOTrainer):
    """With a method of an older TRL, which reads logits."""

    def _get_per_token_logps_and_entropies(self, model, ids, mask, logits_to_keep, *args, **kwargs):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -logits_to_keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, -logits_to_keep:, None])[..., 0]
        return logps, torch.zeros_like(logps), None


class Predicting(trl.SFTTrainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return model(**self._prepare_inputs(inputs)).loss, None, None


class OwnLoss(ORPOTrainer):
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        return model(batch["chosen_input_ids"]).logits.square().mean(), {}


class OwnMean(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(input_ids=inputs["input_ids"]).logits.square().mean()


@pytest.mark.parametrize(
    ("kind", "cls", "got", "remedy"),
    [
        (
            "GRPO",
            OldGRPO,
            "_get_per_token_logps_and_entropies",
            "call the model with fused_lm_head=True in it",
        ),
        ("SFT", Predicting, "prediction_step", "call the model with fused_lm_head=True in it"),
        ("ORPO", OwnLoss, "get_batch_loss_metrics", "call TRL's method from it"),
    ],
)
def test_a_method_that_computes_the_loss_elsewhere_is_named(folder, kind, cls, got, remedy):
    def change(trainer):
        apply_to(trainer)
        if cls is Predicting:
            trainer.train = lambda: trainer.evaluate(trainer.train_dataset)

    expected = f"got {cls.__name__}.{got} in the place of {kind}Trainer.{got}; {remedy}, or train without"
    with pytest.raises(RuntimeError, match=f"the chunked loss: expected to be called .*{expected} the flag"):
        step(kind, folder, trainer=cls, change=change)


def test_the_loss_of_a_trainer_outside_of_trl_is_named(tmp_path):
    args = transformers.TrainingArguments(**options(tmp_path))
    data = Dataset.from_dict({"input_ids": [[3, 4, 5, 6]] * 3, "labels": [[3, 4, 5, 6]] * 3})
    trainer = OwnMean(tiny_model(), args=args, train_dataset=data)
    apply_to(trainer)
    expected = (
        "OwnMean.compute_loss in the place of Trainer.compute_loss; call the model with labels in it and"
    )
    with pytest.raises(RuntimeError, match=f"the chunked loss: expected to be called .*, got {expected}"):
        trainer.train()


def test_a_copy_of_a_trainer():
    """Whose first class of TRL is one without a loss."""
    copy = type("SFTTrainer", (trl.SFTTrainer.__mro__[1],), {"__module__": "my_trainers"})
    message = (
        "got SFTTrainer of my_trainers, which extends TRL's _BaseTrainer; a copy's loss may differ: make "
    )
    with pytest.raises(
        ValueError, match=f"trainer: expected one of TRL's .*{message}it a subclass of TRL's SF"
    ):
        adapter_of(copy)


@pytest.mark.parametrize(
    ("config", "level", "why"),
    [
        (trl.SFTConfig, "WARNING", "args is no config of this package"),
        (ours.SFTConfig, "INFO", "its config sets no option"),
    ],
)
def test_a_trainer_of_ours_with_trls_loss_says_so(tmp_path, caplog, config, level, why):
    with caplog.at_level("INFO", "logitless.trl_integration"):
        sft_trainer(tmp_path, ours.SFTTrainer, config)
    (record,) = [x for x in caplog.records if x.name == "logitless.trl_integration"]
    expected = (
        f"SFTTrainer: the loss is TRL's, because {why}; pass args=SFTConfig(use_chunked_loss=True) of l"
    )
    assert record.levelname == level and record.message.startswith(expected)


class Mine(trl.SFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


def test_a_method_of_ones_own(tmp_path, calls):
    """It runs where it can, and where the flag would leave it out it is refused."""
    trainer = sft_trainer(tmp_path, Mine)
    batch = next(iter(trainer.get_train_dataloader()))
    expected = trainer.compute_loss(trainer.model, dict(batch))
    undo = apply_to(trainer)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch)), expected)
    assert calls.number == 1
    undo()
    instead = Adapter("trl:SFT", replacements={"compute_loss": Replacement(lambda *args: None)})
    with pytest.raises(
        ValueError, match="compute_loss: expected TRL's own in SFTTrainer, got Mine.compute_loss"
    ):
        enable(trainer, instead, None)
    assert not {"compute_loss", "chunked_loss"} & vars(trainer).keys()


def test_names_that_trl_has_moved(tmp_path):
    moved = r"expected in trl >=1.15,<1.17, got trl 1\.1[56]\.\d without it; pip install 'trl>=1.15,<1.17'"
    with pytest.raises(ImportError, match="trl:NoTrainer: " + moved):
        import_from_trl("trl:NoTrainer")
    trainer = sft_trainer(tmp_path)
    with pytest.raises(ImportError, match="trl:SFTTrainer.no_method: " + moved):
        enable(trainer, Adapter("trl:SFT", replacements={"no_method": Replacement(lambda *args: None)}), None)
    assert "training_step" not in vars(trainer)


def test_gkd_s_teacher_with_an_emptied_head(folder):
    actual = []

    def change(trainer):
        apply_to(trainer)
        batch, weight = next(iter(trainer.get_train_dataloader())), trainer.model.lm_head.weight
        if actual:
            partition(trainer.teacher_model.lm_head)
        loss = trainer.compute_loss(trainer.model, batch)
        actual.append((loss, torch.autograd.grad(loss, weight)[0]))
        trainer.train = lambda: None

    for _ in range(2):
        step("GKD", folder, change=change)
    for whole, other in zip(*actual, strict=True):
        torch.testing.assert_close(other, whole)
