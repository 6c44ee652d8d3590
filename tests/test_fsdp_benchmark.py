"""`python -m benchmarks fsdp` on CPUs: two ranks train in shards and learn what stock learns; a rank that
raises, dies or hangs ends its run with the reason, and the other runs go on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("trl")

from benchmarks import fsdp, steps  # noqa: E402
from benchmarks.__main__ import TABLES, app  # noqa: E402
from tests.ranks import forked  # noqa: E402

SETTINGS = steps.Settings("cpu", 0, logged=1, timed=1)
OK = {"verdict": "ok", "times": [20.0, 10.0, 30.0], "ms": 20.0, "peak_bytes": 3 * 2**30}
OK |= {"losses": [8.0, 7.0, 6.0], "grad_norms": [4.0, 3.0, 2.0]}
OURS = "our loss + our layers"


def job(**changes) -> fsdp.Job:
    given = {"trainer": "SFT", "model": fsdp.QUICK["SFT"], "configuration": steps.Configuration()}
    return fsdp.Job(**given | {"settings": SETTINGS, "ranks": 2, "seconds": 60.0} | changes)


def invoke(*arguments: str):
    given = ["fsdp", "--device", "cpu", "--quick", *arguments]
    return CliRunner().invoke(app, given, catch_exceptions=False)


@pytest.fixture
def faked(monkeypatch):
    """Runs of the command are what a function of (trainer, whose) says: "stock", "ours" or "liger"."""

    def fake(run):
        def one_run(job):
            whose = "ours" if job.configuration.loss else job.configuration.layers or "stock"
            found = run(job.trainer, whose) or {}
            return found if "verdict" in found else OK | found

        monkeypatch.setattr(fsdp, "one_run", one_run)

    monkeypatch.setattr(steps, "package_version", lambda name: "1.0")
    monkeypatch.setattr(fsdp, "prepare", lambda: None)
    return fake


def test_two_ranks_learn_the_same(tmp_path):
    """The whole command, in a process of its own: its ranks are forked from one that has imported TRL."""
    out = tmp_path / "fsdp.json"
    command = [sys.executable, "-m", "benchmarks", "fsdp", "--quick", "--device", "cpu"]
    command += ["--skip", "Liger's layers", "--out", str(out)]
    root = Path(fsdp.__file__).parents[1]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(out.read_text())
    assert written["complete"] and written["ranks"] == 2
    assert [section["trainer"] for section in written["sections"]] == ["SFT", "DPO"]
    H, F, V, layers = 64, 128, 517, 2
    whole = 2 * V * H + H + layers * (3 * H * H + 3 * H * F + 2 * H)
    for section in written["sections"]:
        stock, ours = section["rows"]
        assert (stock["verdict"], ours["verdict"]) == ("ok", "ok")
        assert "plan" in ours and "plan" not in stock
        assert len(ours["losses"]) == 2 and min(stock["grad_norms"]) > 0.1
        # In bf16; what differs shows that they were computed apart.
        assert 0 < ours["grad_norm_difference"] < 1e-2 and ours["loss_difference"] < 1e-2
        for row in (stock, ours):
            tokens = 2 * section["sequences"] * section["tokens"]
            assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["ms"])
            assert whole / 2 <= row["parameters_of_rank"] < 0.51 * whole


def raising(job, rank, folder):
    if rank == 1:
        found = {"verdict": "failed", "reason": "rank 1: ValueError: the cause"}
        Path(folder, "1.json").write_text(json.dumps(found))
        os._exit(1)
    time.sleep(60)


def dying(job, rank, folder):
    if rank == 1:
        Path(folder, "1.log").write_text("much\nsegmentation fault\n")
        os._exit(3)
    time.sleep(60)


def hanging(job, rank, folder):
    os.setsid()
    if rank == 1:
        time.sleep(60)
    Path(folder, "0.json").write_text(json.dumps({"verdict": "ok"}))
    os._exit(0)


def nothing(rank: int) -> None:
    pass


@pytest.mark.parametrize(
    ("ranks", "seconds", "reason"),
    [
        (raising, 60.0, "rank 1: ValueError: the cause"),
        (dying, 60.0, "rank 1, exit status 3: segmentation fault"),
        (hanging, 1.0, "did not end within 1 s"),
    ],
)
def test_a_rank_that_breaks_down_ends_its_run(monkeypatch, ranks, seconds, reason):
    forked(nothing, (), 1)  # starts the server as other tests need it
    monkeypatch.setattr(fsdp, "in_rank", ranks)
    started = time.perf_counter()
    assert fsdp.one_run(job(seconds=seconds)) == {"verdict": "failed", "reason": reason}
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize(
    ("verdicts", "codes", "rank"),
    [
        ({2: "failed", 1: "out of memory"}, [9, 1, 1], 2),  # in the order in which they were written
        ({0: "ok"}, [0, None, -9], 2),
        ({0: "ok"}, [None, None], 1),  # the first has written, and has not ended yet
    ],
)
def test_whose_fault_it_is(verdicts, codes, rank):
    assert fsdp.culprit({at: {"verdict": verdict} for at, verdict in verdicts.items()}, codes) == rank


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), {"verdict": "out of memory", "reason": "rank 1"}),
        (ValueError("no such\nthing"), {"verdict": "failed", "reason": "rank 1: ValueError: no such thing"}),
    ],
)
def test_what_fails_inside_of_a_rank(monkeypatch, error, found):
    from benchmarks import fsdp_process

    def failing(*args):
        raise error

    monkeypatch.setattr(fsdp_process, "in_group", failing)
    assert fsdp_process.attempt(job(), 1, "") == found


def test_the_slowest_rank_and_the_largest_memory_count():
    ranks = [
        {"times": times, "peak_bytes": peak, "losses": [1.0]}
        for times, peak in (([1.0, 9.0, 3.0], 5), ([2.0, 4.0, 4.0], 7))
    ]
    found = fsdp.together(ranks)
    assert found["times"] == [2.0, 9.0, 4.0] and found["ms"] == 4.0
    assert found["peak_bytes"] == 7 and found["peak_bytes_of_ranks"] == [5, 7]
    assert fsdp.together([ranks[0] | {"peak_bytes": None}] * 2)["peak_bytes"] is None


@pytest.mark.parametrize(
    ("trainer", "losses", "right"),
    [
        ("SFT", [8.0, 7.0, 6.2], False),  # its worst step counts
        ("DPO", [8.0, 7.0, 6.2], True),  # its median step
        ("DPO", [8.0, 7.2, 6.2], False),
        ("DPO", [8.0, 7.0, float("nan")], False),
    ],
)
def test_a_run_that_learns_something_else_is_wrong(faked, trainer, losses, right):
    faked(lambda name, whose: {"losses": losses} if (name, whose) == (trainer, "ours") else None)
    result = invoke()
    assert result.exit_code == (0 if right else 1)
    assert (f"not right: {trainer}, {OURS}: wrong" in result.output) is not right


def test_norms_count_and_what_learns_nothing_is_wrong(faked):
    faked(lambda name, whose: {"grad_norms": [4.0, 3.0, 1.8]} if whose == "ours" else None)
    assert f"not right: SFT, {OURS}: wrong" in invoke().output
    faked(lambda name, whose: {"grad_norms": [0.0, 3.0, 2.0]})
    assert "stock: wrong" in invoke("--only", "stock").output


def test_runs_that_fail_leave_the_others(faked, tmp_path):
    failure = {"verdict": "failed", "reason": "rank 1: ValueError: no"}
    broken = {("SFT", "liger"), ("DPO", "liger"), ("DPO", "stock")}
    faked(lambda trainer, whose: failure if (trainer, whose) in broken else None)
    out = tmp_path / "fsdp.json"
    result = invoke("--out", str(out))
    assert result.exit_code == 1 and "not right: DPO, stock: failed rank 1: ValueError: no" in result.output
    assert "Liger" not in result.output.partition("not right")[2]
    written = json.loads(out.read_text())
    assert written["complete"]
    verdicts = [row["verdict"] for section in written["sections"] for row in section["rows"]]
    assert verdicts == ["ok", "ok", "failed", "failed", "ok", "failed"]
    # Nothing to compare with.
    assert "loss_difference" not in written["sections"][1]["rows"][1]


def test_no_run_begins_that_might_not_end_in_time(faked, monkeypatch, tmp_path):
    clock, limits = [0.0], []
    monkeypatch.setattr(fsdp, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    faked(lambda trainer, whose: None)
    complete = fsdp.one_run

    def slow(job):
        clock[0] += 20
        limits.append(job.seconds)
        return complete(job)

    monkeypatch.setattr(fsdp, "one_run", slow)
    out = tmp_path / "fsdp.json"
    result = invoke("--minutes", "1", "--limit", "50", "--out", str(out))
    assert limits == [50, 40, 20]
    assert result.exit_code == 0 and "stopped: another run might not end within 1 minutes" in result.output
    written = json.loads(out.read_text())
    assert not written["complete"] and len(written["sections"][0]["rows"]) == 3


def test_the_table(faked, tmp_path):
    out = tmp_path / "fsdp.json"
    faked(lambda trainer, whose: {"verdict": "out of memory"} if whose == "liger" else None)
    assert invoke("--layers", "8", "--out", str(out)).exit_code == 0
    written = json.loads(out.read_text())
    text = TABLES["fsdp"](written, "benchmarks/results/fsdp.json")
    # 2 ranks x 2 x 32 tokens in 20 ms.
    row = f"| {OURS} | 20 | 6,400 | 3.0 | 0e+00 | 0e+00 |"
    assert row in " ".join(text.split()) and "out of memory" in text
    assert "layers 8, H 64, V 517" in text and "the median of 1 behind 1" in text
    assert "From `benchmarks/results/fsdp.json`, by `python -m benchmarks" in text


def test_bad_options(monkeypatch):
    assert "expected one of SFT, DPO, got GRPO" in " ".join(invoke("--trainer", "GRPO").output.split())
    assert invoke("--only", "nobody").exit_code == 2 and invoke("--ranks", "1").exit_code == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert fsdp.enough_gpus(torch.device("cuda"), 2) and not fsdp.enough_gpus(torch.device("cuda"), 4)
    monkeypatch.setattr(fsdp, "enough_gpus", lambda device, ranks: False)
    assert "expected at most 2, the GPUs of this machine, got 4" in " ".join(
        invoke("--ranks", "4").output.replace("│", " ").split()
    )


def test_liger_is_absent_where_it_is_not_installed(faked, monkeypatch):
    faked(lambda trainer, whose: None)
    monkeypatch.setattr(steps, "package_version", lambda name: None)
    result = invoke("--trainer", "SFT")
    assert result.exit_code == 0 and "absent: Liger's layers: liger-kernel is not installed" in result.output
