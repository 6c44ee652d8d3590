"""`python -m logitless doctor`: content with this machine, and not with a loss that is wrong."""

from dataclasses import dataclass

import pytest
import torch

from logitless import Term, TokenLoss
from logitless.__main__ import main
from logitless.tools import doctor
from tests.support import DEVICE

pytestmark = pytest.mark.usefixtures("uncompiled")


def test_the_doctor_is_content(capsys):
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in told and "WRONG" not in told
    for name in ("CrossEntropyLoss", "DPOLoss", "KTOLoss", "GRPOLoss", "JSDLoss"):
        assert f"{name:16}  ok" in told
    if DEVICE.type == "cpu":  # dtypes that the twins compute
        assert "bfloat16, float16, float32, float64" in told


@dataclass(frozen=True, kw_only=True)
class DependsOnItsChunk(TokenLoss):
    def terms(self, stats, batch):
        return {"loss": Term((stats.logps - stats.logps.mean()) ** 2)}, {}


def test_the_doctor_finds_a_wrong_loss(capsys, monkeypatch):
    right = doctor.main_losses(DEVICE, torch.float32)
    wrong = [(DependsOnItsChunk(), right[0][1]), *right[:1]]
    monkeypatch.setattr(doctor, "main_losses", lambda *_: wrong)
    assert main(["doctor"]) == 1
    assert "DependsOnItsChunk  WRONG" in capsys.readouterr().out
