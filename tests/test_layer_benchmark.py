"""The layer benchmark runs on any device, checks before it times, and gives wrong operators no time."""

import dataclasses
import json
import sys

import torch

from benchmarks import layer_kernels
from benchmarks.layer_operators import Maker, operators


def test_tiny_run(monkeypatch, tmp_path, capsys):
    out = tmp_path / "rows.json"
    command = [
        "layer_kernels",
        "--tiny",
        "--device",
        "cpu",
        "--only",
        "fp32 residual",
        "qk_norm_rope 2x3x(16",
        "packed",
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    layer_kernels.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["operator"].split()[0] for row in rows] == ["add_rms_norm", "qk_norm_rope", "gated"]
    for row in rows:
        assert not row["wrong"] and row["forward"]["us"]["ours"] > 0 and row["backward"]["us"]["copy"] > 0
    assert capsys.readouterr().out.count("TB/s") == 6


def test_a_wrong_operator_gets_no_time():
    make = Maker(torch.device("cpu"), tiny=True)
    operator = next(operators(make))
    wrong = dataclasses.replace(
        operator, ours=lambda **given: tuple(1.05 * y for y in operator.ours(**given))
    )
    row = layer_kernels.row(wrong, make.device, compiled=False)
    assert "result 0" in row["wrong"] and "d_x" in row["wrong"] and "forward" not in row
    assert "WRONG" in layer_kernels.describe(row)
