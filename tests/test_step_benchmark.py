"""`python -m benchmarks step` on a CPU: every configuration learns the same, and a process that breaks down
or hangs is a result."""

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from typer.testing import CliRunner

pytest.importorskip("trl")

from benchmarks import forked, recipes, step_process, steps, usecase  # noqa: E402
from benchmarks.__main__ import app  # noqa: E402
from benchmarks.options import picked  # noqa: E402

MODEL = steps.QUICK["tiny Qwen3"]
SETTINGS = steps.Settings("cpu", 0, logged=2, timed=1)
LIMITS = steps.Limits(120, 10)
OK = {"verdict": "ok", "ms": 20.0, "peak_bytes": 2**30, "losses": [2.0, 1.0], "grad_norms": [4.0, 3.0]}
OK |= {"tokens_per_step": 64.0}


def invoke(*arguments: str, command: str = "step"):
    given = [command, "--device", "cpu", "--quick", *arguments]
    return CliRunner().invoke(app, given, catch_exceptions=False)


def faked(monkeypatch, run) -> None:
    monkeypatch.setattr(steps, "package_version", lambda name: "1.0")
    monkeypatch.setattr(steps, "one_run", lambda model, made, settings, seconds: dict(run(made, settings)))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_every_configuration_learns_the_same(tmp_path, monkeypatch, checkpointing):
    monkeypatch.chdir(tmp_path)
    settings = replace(SETTINGS, checkpointing=checkpointing)
    found = {
        name: step_process.train(MODEL, steps.CONFIGURATIONS[name], settings)
        for name in ("stock", "our layers", "our loss + our layers")
    }
    stock = found["stock"]
    assert len(stock["losses"]) == 3 and min(stock["grad_norms"]) > 1e-3
    for each in found.values():
        assert each["verdict"] == "ok" and 0 < each["ms"] < 60_000
        assert steps.furthest(stock["losses"], each["losses"]) < 1e-5
        assert steps.furthest(stock["grad_norms"], each["grad_norms"]) < 1e-4


def test_a_process_writes_its_numbers(tmp_path):
    out = tmp_path / "step.json"
    result = invoke("--only", "our loss + our layers", "--checkpointing", "off", "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    [section] = written["sections"]
    [row] = section["rows"]
    assert written["complete"] and written["benchmark"] == "step" and not section["checkpointing"]
    assert row["verdict"] == "ok" and row["ms"] > 0 and len(row["runs"][0]["losses"]) == 3


def breaks_down(*told):
    os._exit(3)


def test_a_process_that_hangs_or_breaks_down(monkeypatch):
    late = steps.one_run(MODEL, steps.Configuration(), SETTINGS, 0.2)
    assert late == {"verdict": "failed", "reason": "did not end within 0.2 s"}
    monkeypatch.setattr(steps, "in_process", breaks_down)
    broken = steps.one_run(MODEL, steps.Configuration(), SETTINGS, 60)
    assert broken == {"verdict": "failed", "reason": "exit status 3: no output"}


def hangs(*told):
    forked.detach(f"{told[-1]}/log")
    Path(told[0]).write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '600']).pid}")
    time.sleep(600)


def test_a_process_does_not_outlive_who_started_it(monkeypatch, tmp_path):
    """Ended from outside, as by `timeout`; the process has started one itself."""
    pids = tmp_path / "pids"

    def interrupt():
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(steps, "in_process", hangs)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(SystemExit):
        steps.one_run(str(pids), steps.Configuration(), SETTINGS, 60)
    deadline = time.monotonic() + 10
    while running := [pid for pid in pids.read_text().split() if alive(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def alive(pid: str) -> bool:
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), {"verdict": "out of memory"}),
        (ValueError("no such\nthing"), {"verdict": "failed", "reason": "ValueError: no such thing"}),
    ],
)
def test_what_fails_inside_of_a_process(monkeypatch, error, verdict):
    def failing(*args):
        raise error

    monkeypatch.setattr(step_process, "train", failing)
    assert step_process.attempt(MODEL, steps.Configuration(), SETTINGS) == verdict


@pytest.mark.parametrize("change", [{"losses": [2.0, 1.1]}, {"grad_norms": [4.0, float("nan")]}])
def test_a_configuration_that_learns_something_else_is_wrong(monkeypatch, change):
    faked(monkeypatch, lambda made, settings: OK | change if made.layers == "ours" else OK)
    result = invoke()
    assert (
        result.exit_code == 1 and "our layers: wrong" in result.output and "stock: wrong" not in result.output
    )


def test_gradients_of_zero_are_wrong(monkeypatch):
    faked(monkeypatch, lambda made, settings: OK | {"grad_norms": [0.0, 0.0]})
    assert "stock: wrong" in invoke("--only", "stock").output


def test_rounds_take_turns_and_make_a_median(monkeypatch, tmp_path):
    order = []

    def run(made, settings):
        order.append((made.loss, made.layers, settings.checkpointing))
        return OK | {"ms": float(len(order))}

    faked(monkeypatch, run)
    out = tmp_path / "step.json"
    result = invoke("--only", "stock", "--only", "our layers", "--rounds", "3", "--out", str(out))
    assert result.exit_code == 0, result.output
    one = [(False, layers, on) for on in (True, False) for layers in (None, "ours")]
    assert order == one * 3
    written = json.loads(out.read_text())
    assert [row["ms"] for row in written["sections"][0]["rows"]] == [5.0, 6.0]
    assert "5.0 (1.0 to 9.0)" in result.output


def test_no_process_begins_that_might_not_end_in_time(monkeypatch, tmp_path):
    faked(monkeypatch, lambda made, settings: OK)
    out = tmp_path / "step.json"
    result = invoke("--minutes", "1", "--limit", "61", "--out", str(out))
    assert (
        result.exit_code == 0 and "stopped: another process might not end within 1 minutes" in result.output
    )
    written = json.loads(out.read_text())
    assert not written["complete"] and not any(row["runs"] for row in written["sections"][0]["rows"])


def test_liger_is_absent_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(steps, "package_version", lambda name: None)
    monkeypatch.setattr(steps, "one_run", lambda *given: dict(OK))
    result = invoke()
    assert result.exit_code == 0 and "absent: Liger's layers: liger-kernel is not installed" in result.output


def test_names():
    names = list(steps.CONFIGURATIONS)
    assert picked(names, ["our layers"]) == ["our layers"] and picked(names, None) == names
    assert picked(names, ["Liger"]) == ["Liger's layers", "our loss + Liger's layers"]
    assert invoke("--only", "nobody").exit_code == 2 and invoke("--checkpointing", "maybe").exit_code == 2


def test_the_use_case_of_five_models(monkeypatch, tmp_path):
    """Every model at every batch size in every configuration; a table of tokens per second for each model."""
    ran = []

    def one_run(model, made, settings, seconds):
        ran.append((model.config, model.sequences, made.liger, made.loss, made.layers))
        if made.liger and model.sequences == 128:
            return {"verdict": "out of memory"}
        return OK | {"ms": 1e3}

    monkeypatch.setattr(steps, "package_version", lambda name: "1.0")
    monkeypatch.setattr(steps, "one_run", one_run)
    monkeypatch.setattr(usecase, "QUICK_SHAPES", usecase.SHAPES)
    out = tmp_path / "usecase.json"
    result = invoke("--batch", "16", "--batch", "128", "--out", str(out), command="usecase")
    assert result.exit_code == 0, result.output
    each = [(False, False, None), (True, False, None), (False, True, "ours")]
    names = ["LlamaConfig", "Qwen2Config", "GemmaConfig", "MistralConfig", "Phi3Config"]
    assert ran == [(name, batch, *how) for name in names for batch in (16, 128) for how in each]
    document = json.loads(out.read_text())
    assert document["benchmark"] == "usecase" and document["complete"]
    assert "512 tokens/s, 1.0 GiB" in result.output and "4,096 tokens/s" in result.output
    assert result.output.count("out of memory") >= len(names)
    assert result.output.count("both our flags") >= len(names)


def test_a_model_that_is_not_there():
    result = invoke("--model", "no such", command="usecase")
    assert result.exit_code == 2 and "expected a name" in result.output


@pytest.mark.parametrize("name", usecase.SHAPES)
def test_the_models_of_the_use_case_are_built(name):
    """Their configs take these sizes."""
    config, sizes = usecase.SHAPES[name]
    made = getattr(transformers, config)(**sizes)
    assert {key: getattr(made, key) for key in sizes} == sizes


@pytest.mark.parametrize("name", [name for name, made in recipes.RECIPES.items() if made.layers == "ours"])
def test_recipes_train(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    found = step_process.train(MODEL, recipes.RECIPES[name], SETTINGS)
    most = MODEL.sequences * MODEL.tokens
    assert found["verdict"] == "ok" and min(found["grad_norms"]) > 1e-3
    assert most / 8 <= found["tokens_per_step"] <= most
    assert (found["tokens_per_step"] == most) == (not recipes.RECIPES[name].uneven)


def test_lora_plus_has_a_rate_of_its_own():
    model = step_process.with_lora(step_process.causal_lm(MODEL, SETTINGS, torch.device("cpu")))
    optimizer = step_process.lora_plus(model, 1e-4, fused=False)
    rates = {group["lr"] for group in optimizer.param_groups if group["params"]}
    assert sorted(rates) == pytest.approx([1e-4, 16e-4])


def test_the_table_of_recipes(monkeypatch, tmp_path):
    def run(made, settings):
        return {"verdict": "failed", "reason": "no such product"} if made.fp8 else OK

    faked(monkeypatch, run)
    result = invoke("--out", str(tmp_path / "recipes.json"), command="recipes")
    assert result.exit_code == 1 and "FP8, compiled layers, our loss: no such product" in result.output
    assert result.output.count("3,200") == len(recipes.RECIPES) - 1 and "2.000 to 1.000" in result.output
    monkeypatch.setattr(steps, "package_version", lambda name: None if name == "torchao" else "1.0")
    result = invoke(command="recipes")
    assert result.exit_code == 0 and "torchao is not installed" in result.output
