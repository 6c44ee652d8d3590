"""The Medusa example, smaller and in fewer steps than by default."""

import pytest
import torch

from tests.commands import example, output_of

pytest.importorskip("transformers")
medusa = example("medusa")


@pytest.mark.slow
def test_heads_learn_in_both_stages(monkeypatch):
    for name, size in {"HIDDEN": 96, "LAYERS": 1, "ROWS": 4, "CORPUS": 2**19}.items():
        monkeypatch.setattr(medusa, name, size)
    arguments = ["--backbone-steps", "50", "--head-steps", "25", "--device", "cpu"]
    with torch.random.fork_rng():
        assert "stage 2" in output_of(medusa.main, *arguments)
