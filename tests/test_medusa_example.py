"""The Medusa example, smaller and in fewer steps than by default."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import medusa  # noqa: E402
import typer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402


def test_heads_learn_in_both_stages(monkeypatch):
    for name, size in {"HIDDEN": 96, "LAYERS": 1, "ROWS": 4, "CORPUS": 2**19}.items():
        monkeypatch.setattr(medusa, name, size)
    app = typer.Typer()
    app.command()(medusa.main)
    arguments = ["--backbone-steps", "50", "--head-steps", "25", "--device", "cpu"]
    with torch.random.fork_rng():
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "stage 2" in done.output
