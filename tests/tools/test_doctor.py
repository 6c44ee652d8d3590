"""`python -m logitless doctor`: content with this machine, and not with a loss that is wrong."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from logitless import Term, TokenLoss
from logitless.__main__ import main
from logitless.tools import doctor
from logitless.tools.cards import COMPILED, SUPPORT, TESTED, find_support
from tests.kernels.offline import TARGETS
from tests.support import DEVICE

pytestmark = pytest.mark.usefixtures("uncompiled")


def test_the_doctor_is_content(capsys):
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in told and "WRONG" not in told
    for name in ("CrossEntropyLoss", "DPOLoss", "KTOLoss", "GRPOLoss", "JSDLoss"):
        assert f"{name:16}  ok" in told
    row = find_support(DEVICE)
    assert f"{row.devices} ({row.architecture}): {row.kernels}; {row.state}" in told
    if DEVICE.type == "cpu":  # dtypes that the twins compute
        assert "bfloat16, float16, float32, float64" in told and "CPU (cpu)" in told


def test_the_block_for_an_issue(capsys):
    main(["doctor"])
    _, block, _ = capsys.readouterr().out.split("```")
    assert block.startswith("text\nlogitless") and "not installed" not in block
    assert "device: " in block and block.endswith("torch.compile: ok\n")


def test_rows_of_devices_are_those_that_kernels_are_compiled_for():
    dotted = [row.architecture for row in SUPPORT if row.state in (TESTED, COMPILED)]
    names = {f"{target[:-1]}.{target[-1]}" if kind == "cuda" else target for kind, target in TARGETS}
    assert names == set(dotted) - {"cpu"} and len({row.architecture for row in SUPPORT}) == len(SUPPORT)


@pytest.mark.parametrize(
    ("hip", "properties", "devices"),
    [
        (None, {"major": 8, "minor": 0}, "A100"),
        (None, {"major": 9, "minor": 0}, "H100, H200"),
        (None, {"major": 12, "minor": 1}, "other NVIDIA GPUs"),
        ("7.0", {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, "AMD MI300"),
        ("7.0", {"major": 9, "minor": 0, "gcnArchName": "gfx90a:sramecc+"}, "other AMD GPUs"),
    ],
)
def test_the_row_of_a_gpu(hip, properties, devices, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    assert find_support(torch.device("cuda")).devices == devices


@dataclass(frozen=True, kw_only=True)
class DependsOnItsChunk(TokenLoss):
    def terms(self, stats, batch):
        return {"loss": Term((stats.logps - stats.logps.mean()) ** 2)}, {}


def test_the_doctor_finds_a_wrong_loss(capsys, monkeypatch):
    right = doctor.main_losses(DEVICE, torch.float32)
    wrong = [(DependsOnItsChunk(), right[0][1]), *right[:1]]
    monkeypatch.setattr(doctor, "main_losses", lambda *_: wrong)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "DependsOnItsChunk  WRONG" in told and "WRONG: DependsOnItsChunk\n```" in told
