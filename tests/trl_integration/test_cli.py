"""TRL's scripts with our trainers, from local files, as a user would call them."""

import json
import logging
from importlib import import_module

import pytest
import trl
import yaml

import logitless.trl_integration as ours
from logitless.trl_integration.__main__ import COMMANDS, main

from .compare import options
from .kinds import text
from .tiny import tiny_model, words


def files(tmp_path, rows: list[dict]) -> dict:
    """A model and a dataset on disk, and the settings of a run of two steps."""
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer = words()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return options(tmp_path / "out") | {
        "model_name_or_path": str(tmp_path / "model"),
        "datasets": [{"path": "json", "data_files": str(tmp_path / "rows.jsonl")}],
    }


@pytest.mark.parametrize("flag", [True, False])
def test_sft_from_a_yaml_file_and_flags(tmp_path, calls, caplog, flag):
    settings = files(tmp_path, [{"text": line} for line in text(8, 0)])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    stock = trl.SFTTrainer
    flags = ["--use_chunked_loss", "true", "--use_fused_layers"] if flag else []
    with caplog.at_level(logging.INFO, "logitless.trl_integration"):
        main(["sft", "--config", str(tmp_path / "run.yaml"), *flags])
    assert (calls.number > 0) == flag == ("fused in model: 5 LlamaRMSNorm" in caplog.text)
    assert flag == (": fused: " in caplog.text) and "compute_loss" not in vars(ours.SFTTrainer)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert trl.SFTTrainer is stock


def test_dpo(tmp_path, calls):
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in zip(text(8, 0), text(8, 1), text(8, 2))]
    settings = files(tmp_path, rows)
    settings |= {"use_chunked_loss": True, "logits_budget": 2**16, "loss_type": ["ipo"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    main(["dpo", "--config", str(tmp_path / "run.yaml")])
    assert calls.number > 0 and (tmp_path / "out" / "model.safetensors").exists()


def test_unknown_commands_and_help(capsys):
    with pytest.raises(SystemExit, match="command: expected one of sft, dpo"):
        main(["orpo"])  # TRL has no script of it
    with pytest.raises(SystemExit, match="command: expected one of"):
        main([])
    main(["--help"])
    assert "--use_chunked_loss true" in capsys.readouterr().out
    with pytest.raises((SystemExit, ValueError)):
        main(["sft", "--no_such_option", "1"])


def test_every_command_is_a_script_of_trl():
    for command, pair in COMMANDS.items():
        module = import_module(f"trl.scripts.{command}")
        assert callable(module.make_parser) and callable(module.main)
        assert hasattr(trl, f"{pair}Config") and hasattr(ours, f"{pair}Config")
