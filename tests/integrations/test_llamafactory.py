"""LLaMA-Factory: the callback in a Trainer, and the command with LLaMA-Factory's own functions."""

import dataclasses
import logging
import re
import sys
from types import ModuleType

import pytest
import torch
import transformers
import yaml

from logitless.integrations.llamafactory import INCOMPATIBLE_KEYS, LogitlessCallback, check_arguments, main
from tests.integrations.support import PAGE, REQUIRED, another_version, check_text, require
from tests.trl_integration.tiny import VOCAB, tiny_model

ROWS = [
    {"input_ids": row, "labels": torch.where(row % 4 == 0, -100, row)}
    for row in torch.randint(3, VOCAB, (8, 11), generator=torch.Generator().manual_seed(0))
]


def trained(tmp_path, *callbacks, **options) -> tuple[transformers.Trainer, list[float]]:
    """A trainer after three steps, and the losses that it logged."""
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=0.01,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        **options,
    )
    model = tiny_model()
    trainer = transformers.Trainer(model, args, train_dataset=ROWS, callbacks=list(callbacks))
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_callback_in_a_trainer(tmp_path, caplog):
    stock, expected = trained(tmp_path)
    callback = LogitlessCallback(logits_budget=100_000)
    with caplog.at_level(logging.INFO, "logitless"):
        trainer, losses = trained(tmp_path, callback)
    assert losses == pytest.approx(expected, abs=2e-4) and len(losses) == 3
    assert callback.patch.last_plan is not None and callback.patch.logits_budget == 100_000
    assert "logitless: LLaMA-Factory's loss of labelled calls replaced" in caplog.text
    for ours, reference_value in zip(trainer.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(ours, reference_value, rtol=1e-3, atol=1e-4)
    assert type(trainer.model) is type(stock.model)  # undone


def test_fused_layers(tmp_path):
    seen = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, *, model, **kwargs):
            seen.append(type(model.model.layers[0].mlp))

    trainer, _ = trained(tmp_path, LogitlessCallback(fused_layers=True), Watch())
    stock = type(tiny_model().model.layers[0].mlp)
    assert len(seen) == 3 and stock not in seen
    assert type(trainer.model.model.layers[0].mlp) is stock  # undone


def test_label_smoothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor: expected 0 with a patched model, got 0.1"):
        trained(tmp_path, LogitlessCallback(), label_smoothing_factor=0.1)


@pytest.mark.parametrize("stage", ["dpo", "kto", "rm", "ppo"])
def test_other_stages_are_refused(stage):
    with pytest.raises(ValueError, match=f"^stage: expected 'sft' or 'pt', got '{stage}'; use"):
        check_arguments({"stage": stage})


@pytest.mark.parametrize("key", INCOMPATIBLE_KEYS)
def test_what_excludes_it(key):
    check_arguments({"stage": "sft", key: False})
    with pytest.raises(ValueError, match=f"^{key}: expected unset with logitless, got True; leave"):
        check_arguments({"stage": "sft", key: True})


@pytest.fixture
def stub(monkeypatch):
    """LLaMA-Factory's two functions: `run_exp` keeps its arguments."""
    calls = []
    tuner, hparams = ModuleType("llamafactory.train.tuner"), ModuleType("llamafactory.hparams")
    tuner.run_exp = lambda args=None, callbacks=None: calls.append((args, callbacks))

    def read_args(args=None):
        name, *overrides = sys.argv[1:]
        assert name == "train.yaml"
        return {"stage": "sft"} | dict(word.split("=") for word in overrides)

    hparams.read_args = read_args
    for module in (ModuleType("llamafactory"), ModuleType("llamafactory.train"), tuner, hparams):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_the_command(stub):
    words = list(sys.argv)
    main(["train.yaml", "logitless_budget=1000000", "cutoff_len=512"])
    ((arguments, (callback,)),) = stub
    assert arguments == {"stage": "sft", "cutoff_len": "512"} and sys.argv == words
    assert isinstance(callback, LogitlessCallback) and callback.logits_budget == 1_000_000
    assert callback.fused_layers is False
    main(["train.yaml", "logitless_fused_layers=true"])
    assert stub[1][1][0].fused_layers is True
    main(["train.yaml", "logitless_fused_layers=false"])
    assert stub[2][1][0].fused_layers is False
    with pytest.raises(ValueError, match="^use_dft_loss: expected unset with logitless"):
        main(["train.yaml", "use_dft_loss=true"])
    assert len(stub) == 3
    assert logging.getLogger("logitless").level == logging.INFO  # LLaMA-Factory shows its own loggers alone
    with another_version():
        main(["train.yaml"])


def test_arguments_without_a_file(monkeypatch, stub):
    monkeypatch.setattr(sys.modules["llamafactory.hparams"], "read_args", lambda args=None: sys.argv[1:])
    with pytest.raises(ValueError, match="^arguments: expected train.yaml, then name=value, got --stage"):
        main(["--stage", "sft"])


def test_names_and_parameters():
    folder = require("llamafactory")
    check_text(folder / "hparams" / "__init__.py", "read_args")
    check_text(folder / "train" / "tuner.py", "def run_exp(args: Optional[dict[str, Any]] = None, callbacks:")
    check_text(folder / "train" / "tuner.py", "generating_args, callbacks)")
    text = "".join(path.read_text() for path in (folder / "hparams").glob("*.py"))
    missing = [key for key in INCOMPATIBLE_KEYS if key not in text]
    assert not missing, f"hparams moved: expected {missing} among its keys ({REQUIRED})"


def test_the_yaml_of_the_page_has_keys_of_llamafactory():
    (text,) = re.findall(r"```yaml\n(stage: .*?)```", PAGE, re.DOTALL)
    arguments = yaml.safe_load(text)
    check_arguments(arguments)
    folder = require("llamafactory") / "hparams"
    known = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)} | {"do_train"}
    for path in folder.glob("*_args.py"):
        known |= set(re.findall(r"^    (\w+): ", path.read_text(), re.MULTILINE))
    assert arguments.keys() <= known
