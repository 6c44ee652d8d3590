"""What is SFT's own: evaluation, label smoothing, and its flag and options."""

import pickle

import peft
import pytest
import torch
import trl
from transformers import HfArgumentParser

from logitless.trl_integration import SFTConfig, SFTTrainer, apply_to

from .compare import RTOL, STEPS, assert_same, options, sft_trainer, side_by_side
from .tiny import tiny_dataset, tiny_model, tiny_tokenizer, train

# TRL's preparation would drop rows without labels.
AS_GIVEN = {"skip_prepare_dataset": True}


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("masked", [False, True], ids=["all_tokens", "masked"])
def test_gradient_accumulation(tmp_path, loss_type, masked):
    """The batches have different numbers of labels, so that division by the number of labels of one batch
    would change the loss. With `masked`, some batches have no label."""
    runs = side_by_side(
        tmp_path,
        "SFT",
        tiny_dataset(masked=masked),
        loss_type=loss_type,
        gradient_accumulation_steps=3,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        dataset_kwargs=AS_GIVEN,
    )
    assert_same(*runs)
    assert runs[1].strategies == ["fused"] * 3 * STEPS and runs[1].trainer.last_plan.chunks > 1


def test_label_smoothing(tmp_path):
    """TRL builds the full logits for it, and runs a second forward pass for the metrics."""
    with pytest.warns(FutureWarning, match="label_smoothing_factor"):
        assert_same(*side_by_side(tmp_path, "SFT", tiny_dataset(masked=True), label_smoothing_factor=0.2))


def test_bf16_autocast_and_checkpointing(tmp_path):
    changes = {"bf16": True, "gradient_checkpointing": True, "learning_rate": 1e-3}
    assert_same(*side_by_side(tmp_path, "SFT", tiny_dataset(), **changes), rtol=2e-2)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_evaluation(tmp_path, loss_type):
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "loss_type": loss_type,
        "per_device_eval_batch_size": 4,
    }
    given = {"eval_dataset": tiny_dataset(seed=1)}
    stock, ours = side_by_side(tmp_path, "SFT", tiny_dataset(), trainer=given, **changes)
    evaluations = [log for log in ours.logs if "eval_loss" in log]
    assert len(evaluations) == 2 and {"eval_entropy", "eval_mean_token_accuracy"} <= evaluations[0].keys()
    assert_same(stock, ours)
    expected = stock.trainer.evaluate()["eval_loss"]
    assert ours.trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=RTOL)
    assert ours.trainer.last_plan.strategy == "loss_only"


def test_prompt_tuning(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert_same(*side_by_side(tmp_path, "SFT", tiny_dataset(), trainer={"peft_config": config}))


def test_flag_off_is_stock(tmp_path):
    """With a config of TRL's, too."""
    settings = options(tmp_path)
    stock = train(trl.SFTTrainer, trl.SFTConfig(**settings), tiny_model(), tiny_dataset())
    ours = train(SFTTrainer, trl.SFTConfig(**settings), tiny_model(), tiny_dataset())
    assert stock.logs == ours.logs and torch.equal(stock.weights, ours.weights)
    assert ours.trainer.last_plan is None


@pytest.mark.parametrize(
    "flags, names",
    [
        ({"use_chunked_loss": True}, "use_chunked_loss"),
        ({"use_fused_layers": True}, "use_fused_layers"),
        ({"use_chunked_loss": True, "use_fused_layers": True}, "use_chunked_loss, use_fused_layers"),
        ({"activation_budget": "1GiB"}, "activation_budget"),
    ],
)
def test_stock_trainer_refuses_our_flags(tmp_path, flags, names):
    args = SFTConfig(**options(tmp_path, **flags))
    given = {"args": args, "train_dataset": tiny_dataset(), "processing_class": tiny_tokenizer()}
    refused = pytest.raises(ValueError, match=f"^{names}: expected a trainer that honours it, got one")
    with refused:
        trl.SFTTrainer(tiny_model(), **given)
    SFTTrainer(tiny_model(), **given)
    with refused:
        trl.SFTTrainer(tiny_model(), **given)


@pytest.mark.parametrize(
    "flag, budget, error, expected",
    [
        (True, 0, ValueError, "a positive number of bytes"),
        (True, -5, ValueError, "a positive number of bytes"),
        (True, 1e9, TypeError, "a whole number of bytes or None"),
        (True, "2Gigs", ValueError, "a positive number of bytes"),
        (True, True, TypeError, "a whole number of bytes or None"),
        (False, 5, ValueError, "None with use_chunked_loss=False"),
    ],
)
def test_bad_budgets(tmp_path, flag, budget, error, expected):
    with pytest.raises(error, match=f"logits_budget: expected {expected}, got {budget!r}"):
        SFTConfig(**options(tmp_path, use_chunked_loss=flag, logits_budget=budget))


@pytest.mark.parametrize(
    "family, changes, expected",
    [
        ("mixtral", {}, "0 for a model with a router loss"),
        ("llama", {"loss_type": "dft"}, "0 with loss_type"),
    ],
    ids=["router", "dft"],
)
def test_smoothing_that_has_no_meaning_is_refused(tmp_path, family, changes, expected):
    settings = {"label_smoothing_factor": 0.1, "model": tiny_model(family), **changes}
    refused = pytest.raises(ValueError, match=f"label_smoothing_factor: expected {expected}")
    with refused:
        sft_trainer(tmp_path, SFTTrainer, SFTConfig, use_chunked_loss=True, **settings)
    trainer = sft_trainer(tmp_path, **settings)
    with refused:
        apply_to(trainer)
    assert not {"compute_loss", "chunked_loss"} & vars(trainer).keys()


def test_config_is_parsed_printed_and_pickled(tmp_path):
    parser = HfArgumentParser(SFTConfig)
    command = f"--output_dir {tmp_path} --use_cpu --bf16 False --use_chunked_loss"
    for budget in ("1048576", "1MiB"):
        (args,) = parser.parse_args_into_dataclasses([*command.split(), "--logits_budget", budget])
        assert (args.use_chunked_loss, args.logits_budget) == (True, 1048576)
    assert "--use_chunked_loss" in parser.format_help()
    copy = pickle.loads(pickle.dumps(args))
    assert copy.to_dict() == args.to_dict() and args.to_dict()["use_chunked_loss"] is True
