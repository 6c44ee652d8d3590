"""The TRL examples, in fewer steps than by default: the tiny run, and a model and data that are given by
name."""

import json
import re

import pytest
import torch

from tests.cases import usually
from tests.commands import EXAMPLES, example, output_of

pytest.importorskip("trl")
tiny_start = example("tiny_start")
pytestmark = pytest.mark.usefixtures("uncompiled")

# metric, whether it rises, and the strategies that its loss may run with
SCRIPTS = {
    "sft": ("loss", False, "fused"),
    "dpo": ("rewards/accuracies", True, "recompute"),
    "grpo": ("reward", True, "recompute"),
    "distill": ("loss", False, "fused"),
}


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """The examples take a GPU where there is one; how far a dozen steps get is known of the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", usually(["sft", "dpo", "grpo"], SCRIPTS))
def test_tiny_run(name):
    metric, rises, strategies = SCRIPTS[name]
    output = output_of(example(name).main, "--steps", "12")
    actual = re.search(rf"{metric} ([\d.]+) -> ([\d.]+); ({strategies}): .* projected tokens", output)
    assert actual, output[-1000:]
    before, after = map(float, actual.groups()[:2])
    assert (after > before) == rises


def test_a_loop_without_a_trainer():
    """Old log-probabilities, a reference, a correction and an entropy bonus."""
    output = output_of(example("grpo").main, "--own-loop", "--steps", "8", "--completion-tokens", "16")
    actual = re.search(r"reward ([\d.]+) -> ([\d.]+); fused: .* projected tokens", output)
    assert actual and float(actual[2]) > float(actual[1]), output[-1000:]


@pytest.mark.parametrize("name", usually(["distill"], SCRIPTS))
def test_named_model_and_data(tmp_path, name):
    """As at real size, from a folder; with TRL's own loss, and the model kept."""
    path = tiny_start.tiny_model(tmp_path)
    columns = {"sft": ["text"], "dpo": ["prompt", "chosen", "rejected"]}.get(name, ["prompt"])
    rows = tiny_start.data("", columns).select(range(8)).to_list()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--model", path, "--dataset", str(tmp_path / "rows"), "--output", str(tmp_path / "out")]
    given += ["--teacher", path] if name == "distill" else []
    output = output_of(example(name).main, *given, "--steps", "2", "--no-use-chunked-loss")
    assert "; TRL's own loss" in output
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_tiny_model_is_made_before_the_process_group():
    """The config joins a launcher's group, in which transformers saves a model on the first rank alone."""
    for name in SCRIPTS:
        source = (EXAMPLES / f"{name}.py").read_text()
        assert source.index("or tiny_model(") < source.index("Config(\n") and source.count("tiny_model(") < 3
