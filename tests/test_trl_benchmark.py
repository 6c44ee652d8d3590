"""`python -m benchmarks trl` on a CPU: both trainers learn the same, running out of memory is a result, and
the table says so."""

import gc
import json
import os
import weakref

import pytest
import torch
from typer.testing import CliRunner

trl = pytest.importorskip("trl")

from transformers import TrainerState  # noqa: E402

from benchmarks import report, trainer_steps, trainers  # noqa: E402
from benchmarks.__main__ import app  # noqa: E402
from logitless.trl_integration import versions  # noqa: E402

CPU = torch.device("cpu")
STEPS = trainers.WARM + trainers.QUICK.timed
OK = {"verdict": "ok", "ms": 12.4, "peak_bytes": 3 * 2**30, "losses": [2.0, 1.0], "grad_norms": [4.0, 3.0]}
OURS = OK | {"strategy": "fused", "plan": "fused: one chunk"}
EXHAUSTED = {"verdict": "out of memory"}


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["trl", "--device", "cpu", "--quick", *arguments], catch_exceptions=False)


def faked(monkeypatch, measure) -> None:
    """`measure(size, ours)` in place of training, at three sizes."""
    monkeypatch.setattr(trainers, "QUICK", trainers.Scale(trainers.TINY, 32, (64, 128, 256), (4, 12), (8,)))
    monkeypatch.setattr(trainer_steps, "save_model", lambda *given: None)
    monkeypatch.setattr(
        trainer_steps, "measure", lambda case, scale, size, *given, ours: dict(measure(size, ours))
    )


def test_both_trainers_learn_the_same(tmp_path):
    out = tmp_path / "trl.json"
    result = invoke("--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert (
        written["complete"]
        and written["benchmark"] == "trl"
        and written["versions"]["trl"] == trl.__version__
    )
    # What is absent is said so; peft is in the tests' environment.
    assert [section["trainer"] for section in written["sections"]] == list(trainers.CASES) and not written[
        "absent"
    ]
    strategies = {}
    for section in written["sections"]:
        stock, ours = section["rows"]
        assert (stock["name"], stock["verdict"], ours["name"], ours["verdict"]) == (
            "TRL",
            "ok",
            "logitless",
            "ok",
        )
        assert (
            len(stock["losses"]) == len(ours["losses"]) == STEPS and stock["rounds"] == trainers.QUICK.timed
        )
        # The data make a loss and a gradient. That ours come from the engine is shown by the plan, below:
        # the numbers may be the same bits, where both project the same rows in one product.
        assert min(stock["grad_norms"]) > 1e-3
        assert section["loss_difference"] < 1e-5 and section["grad_norm_difference"] < 1e-5
        assert "strategy" not in stock and ours["plan"]
        strategies[section["trainer"]] = ours["strategy"]
    assert strategies["SFT"] == "fused"
    assert strategies["GRPO"] == "recompute" and strategies["GRPO, LoRA"] == "row_scaled"
    assert "[RANK" not in result.output and "GRPO, LoRA, batch size 8: logitless" in result.output


def test_running_out_of_memory_is_recorded_and_larger_sizes_are_skipped(monkeypatch, tmp_path):
    tried = []

    def measure(size, ours):
        tried.append((size, ours))
        return OURS if ours else OK if size < 128 else EXHAUSTED

    faked(monkeypatch, measure)
    out = tmp_path / "trl.json"
    result = invoke("--only", "ORPO", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert tried == [(64, False), (64, True), (128, False), (128, True), (256, True)]
    written = json.loads(out.read_text())
    assert written["complete"]
    assert [[row["verdict"] for row in section["rows"]] for section in written["sections"]] == [
        ["ok", "ok"],
        ["out of memory", "ok"],
        ["out of memory", "ok"],
    ]
    assert [("loss_difference" in section) for section in written["sections"]] == [True, False, False]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")],
)
def test_a_run_that_exhausts_memory_frees_its_model(monkeypatch, tmp_path, error):
    trainer_steps.save_model(trainers.TINY, tmp_path, CPU, 0)
    case, models = trainers.CASES["SFT"], []
    step = trl.SFTTrainer.training_step

    def exhausting(self, *args, **kwargs):
        models.append(weakref.ref(self.model))
        if len(models) == 3:
            raise error
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trl.SFTTrainer, "training_step", exhausting)
        row = trainer_steps.measure(case, trainers.QUICK, 64, tmp_path, CPU, 0, ours=False)
    error.__traceback__ = None
    gc.collect()
    assert row == EXHAUSTED and len(models) == 3 and models[0]() is None
    assert trainer_steps.measure(case, trainers.QUICK, 64, tmp_path, CPU, 0, ours=True)["verdict"] == "ok"


def test_a_trainer_that_fails_says_why_and_the_others_run(monkeypatch, tmp_path):
    trainer_steps.save_model(trainers.TINY, tmp_path, CPU, 0)

    def failing(*args, **kwargs):
        raise ValueError("no such\nthing")

    monkeypatch.setattr(trl.SFTTrainer, "training_step", failing)
    row = trainer_steps.measure(trainers.CASES["SFT"], trainers.QUICK, 64, tmp_path, CPU, 0, ours=True)
    assert row == {"verdict": "failed", "reason": "ValueError: no such thing"}


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"losses": [2.0, 1.06]}, "SFT, tokens 64: wrong"),
        ({"grad_norms": [4.0, 3.3]}, "SFT, tokens 64: wrong"),
        ({"grad_norms": [4.0, float("nan")]}, "SFT, tokens 64: wrong"),
        ({"verdict": "failed", "reason": "ValueError: no"}, "SFT, tokens 64: failed ValueError: no"),
    ],
)
def test_a_run_of_ours_that_learns_something_else_fails(monkeypatch, ours, said):
    faked(monkeypatch, lambda size, mine: OURS | ours if mine else OK)
    result = invoke("--only", "SFT")
    assert result.exit_code == 1 and said in result.output


def test_a_little_rounding_is_not_wrong(monkeypatch):
    faked(
        monkeypatch,
        lambda size, mine: OURS | {"losses": [2.0, 1.02], "grad_norms": [4.0, 3.1]} if mine else OK,
    )
    result = invoke("--only", "SFT")
    assert result.exit_code == 0 and "2e-02, 3e-02" in result.output


def test_a_run_cut_off_keeps_what_it_has(monkeypatch, tmp_path):
    def measure(size, ours):
        if size == 128 and ours:
            raise KeyboardInterrupt
        return OURS if ours else OK

    faked(monkeypatch, measure)
    out = tmp_path / "trl.json"
    invoke("--only", "DPO", "--out", str(out))
    written = json.loads(out.read_text())
    assert not written["complete"]
    assert [len(section["rows"]) for section in written["sections"]] == [2]


def test_absent_trl_or_unknown_names_end_in_one_message(monkeypatch):
    result = invoke("--only", "nobody")
    assert result.exit_code == 2 and "nobody" in result.output
    monkeypatch.setitem(versions.SUPPORTED, "no-such-distribution", ">=1")
    result = invoke()
    assert result.exit_code == 2 and "no-such-distribution: expected >=1, got no installation" in " ".join(
        result.output.split()
    )


def test_without_peft_the_other_trainers_are_measured(monkeypatch, tmp_path):
    faked(monkeypatch, lambda size, ours: OURS if ours else OK)
    monkeypatch.setattr("benchmarks.peers.package_version", lambda name: None if name == "peft" else "1.0")
    out = tmp_path / "trl.json"
    assert invoke("--only", "GRPO", "--only", "LoRA", "--out", str(out)).exit_code == 0
    written = json.loads(out.read_text())
    assert written["absent"] == {"GRPO, LoRA": "peft is not installed"}
    assert {section["trainer"] for section in written["sections"]} == {"GRPO"}


def test_the_peak_is_that_of_the_timed_steps(monkeypatch):
    waits, resets = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: resets.append(step))
    watch = trainer_steps.Watch(torch.device("cuda"))
    for step in range(STEPS):
        watch.on_step_begin(None, TrainerState(global_step=step), None)
        watch.on_step_end(None, TrainerState(global_step=step + 1), None)
    assert resets == [trainers.WARM]
    assert len(watch.ms) == STEPS and len(waits) == 2 * STEPS


def test_step_by_step_both_take_turns(tmp_path, monkeypatch):
    """TRL, ours, ours, TRL; a ratio of each process; a failure is one of both."""
    began, begin = [], trainer_steps.Watch.on_step_begin

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        began.append(self.number)

    monkeypatch.setattr(trainer_steps.Watch, "on_step_begin", noted)
    out = tmp_path / "trl.json"
    result = invoke("--only", "DPO", "--step-by-step", "--rounds", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert began[: 4 * (STEPS // 2)] == [0, 1, 1, 0] * (STEPS // 2) and len(began) == 4 * STEPS
    [section] = json.loads(out.read_text())["sections"]
    stock, ours = section["rows"]
    assert len(stock["times"]) == len(ours["times"]) == 2 * trainers.QUICK.timed
    assert len(section["ratios"]) == 2 and 0.2 < min(section["ratios"]) and stock["peak_bytes"] is None
    assert section["loss_difference"] < 1e-5 and section["grad_norm_difference"] < 1e-5
    assert "ours / TRL" in result.output and ours["plan"]

    monkeypatch.setattr(trl.DPOTrainer, "training_step", lambda *args, **kwargs: 1 / 0)
    assert "logitless failed; ZeroDivisionError" in invoke("--only", "DPO", "--step-by-step").output


def doubled(x: int, *, plus: int) -> dict:
    return {"found": 2 * x + plus, "process": os.getpid()}


def test_a_run_apart_has_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(trainers, "PRELOADED", [])
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # put back behind the test
    found = [trainers.apart(doubled, 20, plus=2) for _ in range(2)]
    assert [each["found"] for each in found] == [42, 42]
    assert len({os.getpid(), *(each["process"] for each in found)}) == 3


def test_the_pairs_are_as_long_as_they_should_be():
    words = trainer_steps.tokenizer()
    rows = trainer_steps.preferences(3, 64, torch.Generator().manual_seed(0))
    for row in rows:
        for answer in (row["chosen"], row["rejected"]):
            ids = words(row["prompt"] + answer + "</s>")["input_ids"]
            assert len(ids) == 64 and ids[-1] == trainer_steps.EOS and trainer_steps.PAD not in ids
    assert len(set(rows["prompt"])) == 3


def test_the_page_has_a_table_for_each_trainer(tmp_path):
    sections = [
        {
            "trainer": "SFT",
            "unit": "tokens",
            "size": 4096,
            "rows": [OK, OURS | {"ms": 10.6}],
            "loss_difference": 1e-4,
        }
        | {"grad_norm_difference": 2e-3},
        {"trainer": "SFT", "unit": "tokens", "size": 8192, "rows": [EXHAUSTED, OURS]},
        {
            "trainer": "GRPO",
            "unit": "batch size",
            "size": 8,
            "rows": [OK, OURS | {"peak_bytes": None, "verdict": "wrong"}],
        },
    ]
    head = report.new_document("trl", CPU, quick=False) | {
        "model": trainers.QWEN3,
        "steps": 8,
        "timed_steps": 5,
    }
    written = head | {
        "absent": {"GRPO, LoRA": "peft is not installed"},
        "sections": sections,
        "complete": True,
    }
    report.write_json(tmp_path / "trl.json", written)
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text("<!-- benchmarks:trl -->\n<!-- /benchmarks:trl -->\n")
    (tmp_path / "README.md").write_text("<!-- benchmarks:help -->\n<!-- /benchmarks:help -->\n")
    arguments = ["--results", str(tmp_path), "--root", str(tmp_path)]
    assert CliRunner().invoke(app, ["plot", *arguments]).exit_code == 0
    text = page.read_text()
    tables = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert tables == [
        ["tokens", "TRL", "logitless", "strategy", "loss, gradient norm differ by"],
        ["4,096", "12 ms, 3.0 GiB", "11 ms, 3.0 GiB", "fused", "1e-04, 2e-03"],
        ["8,192", "out of memory", "12 ms, 3.0 GiB", "fused", ""],
        ["batch size", "TRL", "logitless", "strategy", "loss, gradient norm differ by"],
        ["8", "12 ms, 3.0 GiB", "wrong", "fused", ""],
    ]
    for part in (
        "\nSFT:\n\n|",
        "\nGRPO:\n\n|",
        "GRPO, LoRA: peft is not installed",
        "H 1,024, V 151,936",
        "benchmarks/results/trl.json",
    ):
        assert part in text


def test_runs_in_turns(monkeypatch, tmp_path):
    """The times of all runs count; one that went wrong counts for all."""
    ran = []

    def measure(size, ours):
        ran.append((size, ours))
        if size == 256 and ours and len(ran) > 6:
            return {"verdict": "failed", "reason": "the second time"}
        times = [float(len(ran)), 10.0]
        return (OURS if ours else OK) | {"times": times, "ms": 5.0, "rounds": 2}

    faked(monkeypatch, measure)
    out = tmp_path / "trl.json"
    result = invoke(*("--only", "ORPO", "--size", "128", "--size", "256", "--rounds", "2", "--out", str(out)))
    turns = [False, True, True, False]
    assert ran == [(size, ours) for size in (128, 256) for ours in turns]
    assert result.exit_code == 1 and "the second time" in result.output
    first, second = json.loads(out.read_text())["sections"]
    stock, ours = first["rows"]
    assert stock["times"] == [1.0, 10.0, 4.0, 10.0] and stock["ms"] == 7.0 and stock["rounds"] == 4
    assert ours["times"] == [2.0, 10.0, 3.0, 10.0] and ours["verdict"] == "ok"
    assert [row["verdict"] for row in second["rows"]] == ["ok", "failed"]
