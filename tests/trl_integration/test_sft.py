"""Our SFT pair beside TRL's: the same losses, gradient norms, metrics and weights over several optimizer
steps."""

import pickle

import peft
import pytest
import torch
import trl
from transformers import HfArgumentParser

from logitless.trl_integration import SFTConfig, SFTTrainer, apply_to

from .tiny import Run, assert_same_gradients, tiny_dataset, tiny_model, tiny_tokenizer, train

STEPS = 2
# fp32 sums in another order, then a few optimizer steps on top
RTOL = 1e-4


def options(tmp_path, **changes):
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 3,
        "gradient_checkpointing": False,
        **changes,
    }


def side_by_side(
    tmp_path, *, family="llama", masked=False, wrap=lambda model: model, trainer=None, **changes
):
    """Trains with TRL's pair and with ours, from the same weights on the same batches."""
    given = dict(dataset=tiny_dataset(masked=masked), **(trainer or {}))
    settings = options(tmp_path, **changes)
    stock = train(trl.SFTTrainer, trl.SFTConfig(**settings), wrap(tiny_model(family)), **given)
    # room for a few of the 30-odd tokens at a time, so that there are several chunks
    settings |= {"use_chunked_loss": True, "logits_budget": 16 * 1024}
    ours = train(SFTTrainer, SFTConfig(**settings), wrap(tiny_model(family)), **given)
    return stock, ours


def assert_same(
    stock: Run, ours: Run, *, rtol: float = RTOL, strategy: str | None = "fused", chunked: bool = True
) -> None:
    assert len(stock.logs) == len(ours.logs) > STEPS
    for step, (theirs, mine) in enumerate(zip(stock.logs, ours.logs, strict=True)):
        assert theirs.keys() == mine.keys()
        for key in theirs:
            assert mine[key] == pytest.approx(theirs[key], rel=rtol, abs=1e-7), f"{key} at log {step}"
    assert_same_gradients(stock, ours, rtol=rtol)
    losses = [log["loss"] for log in stock.logs if "loss" in log]
    assert losses[0] != losses[1]

    assert set(ours.strategies) == {strategy} and set(stock.strategies) == {None}
    if chunked:
        assert ours.trainer.last_plan.chunks > 1


# --- the same training run
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "tied", "gemma2", "granite", "cohere"])
def test_head_of_the_family(tmp_path, family):
    assert_same(*side_by_side(tmp_path, family=family))


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("masked", [False, True], ids=["all_tokens", "masked"])
def test_gradient_accumulation(tmp_path, loss_type, masked):
    """Batches of unequal length, so dividing by each one's own count would show. With `masked`, some hold no
    label at all."""
    changes = {
        "gradient_accumulation_steps": 3,
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
    }
    # TRL's preparation would drop the rows without labels
    changes["dataset_kwargs"] = {"skip_prepare_dataset": True}
    stock, ours = side_by_side(tmp_path, loss_type=loss_type, masked=masked, **changes)
    assert_same(stock, ours)
    assert len(ours.strategies) == 3 * STEPS


def test_dft_is_another_loss_than_nll(tmp_path):
    nll, dft = (side_by_side(tmp_path, loss_type=name)[1] for name in ("nll", "dft"))
    assert dft.logs[0]["loss"] < 0.5 * nll.logs[0]["loss"]


@pytest.mark.parametrize(
    "changes",
    [
        {"padding_free": True, "max_length": None},
        {"packing": True, "max_length": 32},
        {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
    ],
    ids=["padding_free", "packed", "wrapped"],
)
def test_flattened_sequences(tmp_path, changes):
    assert_same(*side_by_side(tmp_path, **changes))


def test_label_smoothing(tmp_path):
    """TRL builds the full logits for it, and runs a second forward pass for the metrics."""
    with pytest.warns(FutureWarning, match="label_smoothing_factor"):
        assert_same(*side_by_side(tmp_path, label_smoothing_factor=0.2, masked=True))


def test_router_loss_of_a_mixture_of_experts(tmp_path):
    stock, ours = side_by_side(tmp_path, family="mixtral", gradient_accumulation_steps=2)
    assert_same(stock, ours)
    assert ours.logs[0]["aux_loss"] > 0.1


def test_bf16_autocast_and_checkpointing(tmp_path):
    stock, ours = side_by_side(tmp_path, bf16=True, gradient_checkpointing=True, learning_rate=1e-3)
    assert_same(stock, ours, rtol=2e-2)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_evaluation(tmp_path, loss_type):
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "loss_type": loss_type,
        "per_device_eval_batch_size": 4,
    }
    stock, ours = side_by_side(tmp_path, trainer={"eval_dataset": tiny_dataset(seed=1)}, **changes)
    evaluations = [log for log in ours.logs if "eval_loss" in log]
    assert len(evaluations) == 2 and {"eval_entropy", "eval_mean_token_accuracy"} <= evaluations[0].keys()
    assert_same(stock, ours, chunked=False)
    assert ours.trainer.evaluate()["eval_loss"] == pytest.approx(
        stock.trainer.evaluate()["eval_loss"], rel=RTOL
    )
    assert ours.trainer.last_plan.strategy == "loss_only"


def test_compute_metrics_still_gets_logits(tmp_path):
    shapes = []

    def compute_metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    changes = {"eval_strategy": "steps", "eval_steps": STEPS}
    given = {"eval_dataset": tiny_dataset(seed=1, examples=2), "compute_metrics": compute_metrics}
    with pytest.warns(FutureWarning, match="return_outputs"):
        assert_same(*side_by_side(tmp_path, trainer=given, **changes), chunked=False)
    assert len(shapes) == 2 and shapes[0] == shapes[1] and shapes[0][-1] == 96


# --- PEFT
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]], ids=["frozen_head", "trained_head"])
def test_lora(tmp_path, modules_to_save):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=modules_to_save)
    stock, ours = side_by_side(tmp_path, trainer={"peft_config": config})
    assert_same(stock, ours)
    head = ours.trainer.model.get_base_model().get_output_embeddings()
    assert head.weight.requires_grad is (modules_to_save is not None)


def test_prompt_tuning(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert_same(*side_by_side(tmp_path, trainer={"peft_config": config}))


def test_lora_on_the_head_is_refused(tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    args = SFTConfig(**options(tmp_path, use_chunked_loss=True))
    with pytest.raises(ValueError, match="lm_head"):
        SFTTrainer(
            tiny_model(),
            args=args,
            train_dataset=tiny_dataset(),
            processing_class=tiny_tokenizer(),
            peft_config=config,
        )


# --- the flag
# ----------------------------------------------------------------------------------------------------


def test_flag_off_is_stock(tmp_path):
    settings = options(tmp_path)
    stock = train(trl.SFTTrainer, trl.SFTConfig(**settings), tiny_model(), tiny_dataset())
    ours = train(SFTTrainer, SFTConfig(**settings), tiny_model(), tiny_dataset())
    stocks_config = train(SFTTrainer, trl.SFTConfig(**settings), tiny_model(), tiny_dataset())
    assert stock.logs == ours.logs == stocks_config.logs
    assert torch.equal(stock.weights, ours.weights) and torch.equal(stock.weights, stocks_config.weights)
    assert ours.trainer.last_plan is None


def test_stock_trainer_refuses_the_flag(tmp_path):
    args = SFTConfig(**options(tmp_path, use_chunked_loss=True))
    given = {"args": args, "train_dataset": tiny_dataset(), "processing_class": tiny_tokenizer()}
    refused = pytest.raises(ValueError, match="use_chunked_loss: expected a trainer that honours it")
    with refused:
        trl.SFTTrainer(tiny_model(), **given)
    SFTTrainer(tiny_model(), **given)
    with refused:
        trl.SFTTrainer(tiny_model(), **given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits_budget": 0}, ValueError, "logits_budget: expected a positive number of bytes, got 0"),
        ({"logits_budget": -5}, ValueError, "logits_budget: expected a positive number of bytes, got -5"),
        (
            {"logits_budget": 1e9},
            TypeError,
            "logits_budget: expected a whole number of bytes or None, got 1000000000.0",
        ),
        (
            {"logits_budget": True},
            TypeError,
            "logits_budget: expected a whole number of bytes or None, got True",
        ),
        (
            {"use_chunked_loss": False, "logits_budget": 5},
            ValueError,
            "logits_budget: expected None with use_chunked_loss",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_options(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        SFTConfig(**options(tmp_path, **{"use_chunked_loss": True, **changes}))


def test_a_loss_of_logits_is_refused(tmp_path):
    args = SFTConfig(**options(tmp_path, use_chunked_loss=True))
    given = {"args": args, "train_dataset": tiny_dataset(), "processing_class": tiny_tokenizer()}
    with pytest.raises(ValueError, match="compute_loss_func: expected None"), pytest.warns(FutureWarning):
        SFTTrainer(tiny_model(), compute_loss_func=lambda outputs, labels, num_items_in_batch: 0.0, **given)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mixtral", {}, "0 for a model with a router loss"),
        ("llama", {"loss_type": "dft"}, "0 with loss_type"),
    ],
    ids=["router", "dft"],
)
@pytest.mark.parametrize("applied", [False, True], ids=["constructor", "apply_to"])
def test_smoothing_that_has_no_meaning_is_refused(tmp_path, family, changes, expected, applied):
    settings = options(tmp_path, label_smoothing_factor=0.1, **changes)
    given = {"train_dataset": tiny_dataset(), "processing_class": tiny_tokenizer()}
    trainer = trl.SFTTrainer(tiny_model(family), args=trl.SFTConfig(**settings), **given)
    with pytest.raises(ValueError, match=f"label_smoothing_factor: expected {expected}"):
        if applied:
            apply_to(trainer)
        SFTTrainer(tiny_model(family), args=SFTConfig(**settings, use_chunked_loss=True), **given)
    assert not {"compute_loss", "chunked_loss"} & vars(trainer).keys()


def test_config_is_parsed_printed_and_pickled(tmp_path):
    parser = HfArgumentParser(SFTConfig)
    command = f"--output_dir {tmp_path} --use_cpu --bf16 False --use_chunked_loss --logits_budget 1048576"
    (args,) = parser.parse_args_into_dataclasses(command.split())
    assert (args.use_chunked_loss, args.logits_budget) == (True, 1048576)
    assert "--use_chunked_loss" in parser.format_help()
    copy = pickle.loads(pickle.dumps(args))
    assert copy.to_dict() == args.to_dict() and args.to_dict()["use_chunked_loss"] is True
