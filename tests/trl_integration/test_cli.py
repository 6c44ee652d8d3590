"""TRL's scripts with our trainers, from local files, as a user would call them."""

import json

import pytest
import trl
import yaml

from logitless.losses import engine
from logitless.trl_integration.__main__ import COMMANDS, main

from .test_log_prob_trainers import text, words
from .tiny import tiny_model


def files(tmp_path, rows: list[dict]) -> dict:
    """A model and a dataset on disk, and the settings of a run of two steps."""
    tiny_model().save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model_name_or_path": str(tmp_path / "model"),
        "datasets": [{"path": "json", "data_files": str(tmp_path / "rows.jsonl")}],
        "output_dir": str(tmp_path / "out"),
        "max_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
    }


@pytest.fixture
def calls(monkeypatch):
    """How often the engine solved, or handed out numbers."""
    found = []
    for name in ("solve", "token_numbers"):
        run = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda *args, run=run, name=name, **options: (found.append(name), run(*args, **options))[1])
    return found


@pytest.mark.parametrize("flag", [True, False])
def test_sft_from_a_yaml_file_and_a_flag(tmp_path, calls, flag):
    settings = files(tmp_path, [{"text": line} for line in text(8, 0)])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    stock = trl.SFTTrainer
    main(["sft", "--config", str(tmp_path / "run.yaml"), *(["--use_chunked_loss", "true"] if flag else [])])
    assert bool(calls) == flag
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert trl.SFTTrainer is stock


def test_dpo(tmp_path, calls):
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in zip(text(8, 0), text(8, 1), text(8, 2))]
    settings = files(tmp_path, rows) | {"use_chunked_loss": True, "logits_budget": 2**16, "loss_type": ["ipo"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    main(["dpo", "--config", str(tmp_path / "run.yaml")])
    assert "token_numbers" in calls and (tmp_path / "out" / "model.safetensors").exists()


def test_unknown_commands_and_help(capsys):
    with pytest.raises(SystemExit, match="command: expected one of sft, dpo"):
        main(["ppo"])
    with pytest.raises(SystemExit, match="command: expected one of"):
        main([])
    main(["--help"])
    assert "--use_chunked_loss true" in capsys.readouterr().out
    with pytest.raises((SystemExit, ValueError)):
        main(["sft", "--no_such_option", "1"])


def test_every_command_is_a_script_of_trl():
    from importlib import import_module

    for command, name in COMMANDS.items():
        module = import_module(f"trl.scripts.{command}")
        assert callable(module.make_parser) and callable(module.main)
        assert hasattr(trl, f"{name}Config")
