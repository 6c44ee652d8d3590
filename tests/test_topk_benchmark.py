"""`python -m benchmarks topk` runs on any device, checks before it times, and gives wrong rows no time."""

import dataclasses
import json

import torch
from typer.testing import CliRunner

from benchmarks import topk
from benchmarks.__main__ import app


def test_quick_run(tmp_path):
    out = tmp_path / "topk.json"
    command = ["topk", "--quick", "--device", "cpu", "--out", str(out)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["complete"] and written["shape"] == {"N": 96, "H": 32, "V": 2000, "k": 8}
    assert len(written["rows"]) == 2 * len(topk.TASKS)
    for row in written["rows"]:
        assert row["verdict"] == "ok" and row["ratio"] == row["ms"] / row["bare_ms"] > 0
    ours = [row for row in written["rows"] if row["name"] == "logitless"]
    assert [row["target"] for row in ours] == [1.17, 4.2, 2.2, 1.25, 0.125]
    assert ours[-1]["products"] == 3 and "d_weight_error" in ours[-1]


def test_a_wrong_row_gets_no_time():
    device = torch.device("cpu")
    x = topk.Inputs.of(topk.QUICK_SHAPE, device, 3)
    expected = topk.truth(x, renormalized=False)
    for task in (topk.TASKS[1], topk.TASKS[3]):
        wrong = dataclasses.replace(task, ours=lambda x, task=task: task.ours(x) + 1)
        row, right = topk.rows_of(wrong, x, expected, device, 0.0)
        if task.gradients:
            # A constant changes no gradient.
            assert row["logps_error"] > 0.05 and row["d_hidden_error"] < 0.01
        assert row["verdict"] == "wrong" and "ms" not in row and right["verdict"] == "ok"
    assert topk.failed({"rows": [row]}) == ["k best"]
