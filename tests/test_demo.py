"""The demo: its verdict on made-up results, and one small comparison from the first line to the picture."""

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.commands import example, invoke
from tests.ranks import script

pytest.importorskip("trl")
demo = example("demo")

from demo_report import BOTH, FULL, OURS, RUNS, STOCK, Result, failures  # noqa: E402


def results(whose: str, **ours) -> dict[str, Result]:
    """Four runs that keep every promise, but for what `ours` changes in one of them."""
    losses, seconds = [9.0, 8.0, 7.0, 6.0], [1.0] * 4
    good = {"losses": losses, "step_seconds": seconds, "step_bytes": [10] * 4, "held_out": [9.1, 6.2]}
    good |= {"strategy": "fused", "chunks": 16, "plan": "fused: …"}
    return {
        FULL: Result(losses, seconds, [100] * 4),
        STOCK: Result(losses, seconds, [400] * 4),
        OURS: Result(**good | (ours if whose == OURS else {})),
        BOTH: Result(**good | {"fused": "2 x norm"} | (ours if whose == BOTH else {})),
    }


# What changes in the results of one run -> the promises that are broken.
CHANGES = {
    "good": ({}, []),
    "near": ({"losses": [9.0, 8.0009, 7.0, 6.0]}, []),
    "off": ({"losses": [9.0, 8.002, 7.0, 6.0]}, ["curves"]),
    "nan": ({"losses": [9.0, 8.0, float("nan"), 6.0]}, ["curves"]),
    "rising": ({"losses": [6.0, 7.0, 8.0, 9.0]}, ["curves"]),
    "unseen": ({"held_out": [9.1, 9.2]}, ["loss"]),
    "memory": ({"step_bytes": [10, 10, 10, 100]}, ["memory"]),
    "warm_up": ({"step_bytes": [500, 500, 10, 10]}, []),
    "no_engine": ({"strategy": None, "chunks": 0, "plan": None}, ["engine"]),
    "one_chunk": ({"chunks": 1}, ["engine"]),
    "strategy": ({"strategy": "recompute"}, ["engine"]),
}
CASES = [(whose, *change) for whose in (OURS, BOTH) for change in CHANGES.values()]
CASES += [(BOTH, {"fused": None}, ["layers"])]


@pytest.mark.parametrize(("whose", "ours", "names"), CASES)
def test_verdict(whose, ours, names):
    said = failures(results(whose, **ours), tolerance=1e-3)
    assert [text.split(": ")[:2] for text in said] == [[whose, name] for name in names]


def test_default_on_a_cpu_is_large_enough_to_show_something():
    setup = demo.default_setup("cpu")
    assert setup.vocab >= 32_000 and setup.rows * setup.row_tokens >= 2048
    assert setup.logits_budget <= setup.logits_bytes / 8


def run_demo(monkeypatch, *options: str) -> object:
    """Its runs are processes of their own, without the imports' time, and on less text."""
    setup = demo.default_setup
    monkeypatch.setattr(demo, "default_setup", lambda device: replace(setup(device), corpus_chars=2**19))
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(Popen=script, PIPE=subprocess.PIPE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return invoke(demo.main, "--device", "cpu", *options, env={"COLUMNS": "120"})


def test_small_comparison(monkeypatch, tmp_path):
    options = ["--steps", "4", "--rows", "2", "--vocab", "8000", "--output", str(tmp_path)]
    done = run_demo(monkeypatch, *options)
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in RUNS) and "logitless: fused" in done.output
    assert "stock TRL: chunks of up to 4,096 tokens x 32,768 columns of the head" in done.output
    assert "this small batch is one chunk" in done.output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_steps(monkeypatch, tmp_path):
    done = run_demo(monkeypatch, "--steps", "2", "--output", str(tmp_path))
    assert done.exit_code != 0 and "steps: expected more than" in done.output.replace("\n", " ")
