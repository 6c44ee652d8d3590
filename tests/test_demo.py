"""The demo: its verdict on made-up results, and one small comparison from the first line to the picture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
from demo_report import FULL, OURS, RUNS, STOCK, Result, failures  # noqa: E402


def results(**ours) -> dict[str, Result]:
    """Three runs that keep every promise, but for what `ours` changes."""
    losses, seconds = [9.0, 8.0, 7.0, 6.0], [1.0] * 4
    good = {"losses": losses, "step_seconds": seconds, "step_bytes": [10] * 4, "held_out": [9.1, 6.2]}
    engine = {"strategy": "fused", "chunks": 16, "plan": "fused: …"}
    return {
        FULL: Result(losses, seconds, [100] * 4),
        STOCK: Result(losses, seconds, [400] * 4),
        OURS: Result(**good | engine | ours),
    }


@pytest.mark.parametrize(
    ("ours", "names"),
    [
        ({}, []),
        ({"losses": [9.0, 8.0009, 7.0, 6.0]}, []),
        ({"losses": [9.0, 8.002, 7.0, 6.0]}, ["curves"]),
        ({"losses": [9.0, 8.0, float("nan"), 6.0]}, ["curves"]),
        ({"losses": [6.0, 7.0, 8.0, 9.0]}, ["curves"]),
        ({"held_out": [9.1, 9.2]}, ["loss"]),
        ({"step_bytes": [10, 10, 10, 100]}, ["memory"]),
        ({"step_bytes": [500, 500, 10, 10]}, []),
        ({"strategy": None, "chunks": 0, "plan": None}, ["engine"]),
        ({"chunks": 1}, ["engine"]),
        ({"strategy": "recompute"}, ["engine"]),
    ],
    ids=[
        "good",
        "near",
        "off",
        "nan",
        "rising",
        "unseen",
        "memory",
        "warm_up",
        "no_engine",
        "one_chunk",
        "strategy",
    ],
)
def test_verdict(ours, names):
    assert [text.split(":")[0] for text in failures(results(**ours), tolerance=1e-3)] == names


def test_default_on_a_cpu_is_large_enough_to_show_something():
    setup = demo.default_setup("cpu")
    assert setup.vocab >= 32_000 and setup.rows * setup.row_tokens >= 2048
    assert setup.logits_budget <= setup.logits_bytes / 8


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess:
    # one thread: on a busy machine two wait for each other longer than they work
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [
        sys.executable,
        str(EXAMPLES / "demo.py"),
        "--device",
        "cpu",
        "--output",
        str(folder),
        *options,
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_small_comparison(tmp_path):
    done = run_demo(tmp_path, "--steps", "4", "--rows", "2", "--vocab", "8000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in RUNS) and "logitless: fused" in done.stdout
    assert "stock TRL: all tokens x 8,000 columns of the head at a time" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_steps(tmp_path):
    done = run_demo(tmp_path, "--steps", "2")
    assert done.returncode != 0 and "steps: expected more than" in done.stderr.replace("\n", " ")
