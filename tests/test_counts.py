"""The counts of warm calls are those of `benchmarks/results/counts.json`."""

import copy
import json
import os
import subprocess
import sys

import pytest

from benchmarks.regressions import counts

COMMITTED = json.loads(counts.FILE.read_text())


def test_counts_are_those_of_the_file(tmp_path, everything):
    """The command runs in a separate process, which imports and patches the library alone. Without --all, the
    test compares the counts of the simulated GPU."""
    out = tmp_path / "counts.json"
    command = [sys.executable, "-m", "benchmarks", "counts", "--out", str(out)]
    command += [] if everything else ["--machine", "simulated Hopper"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=counts.FILE.parents[2], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    actual = counts.differences(json.loads(out.read_text()), COMMITTED)
    assert not actual, "\n".join(["if meant, write the file: `python -m benchmarks counts`", *actual])


@pytest.mark.parametrize("change", [-0.1, 0.1])
@pytest.mark.parametrize("name", counts.NUMBERS)
def test_more_and_fewer_are_seen(name, change):
    fresh = copy.deepcopy(COMMITTED)
    row = fresh["machines"]["CPU"]["DPO, reference head"]
    before, row[name] = row[name], round(row[name] * (1 + change))
    expected = f"CPU, DPO, reference head: {name} {before} -> {row[name]}"
    assert counts.differences(fresh, COMMITTED) == [expected]
    fresh["versions"]["python"] = "3.99.0"
    assert counts.differences(fresh, COMMITTED) == ([] if name in counts.OF_VERSIONS else [expected])


def test_another_order_of_launches_is_seen():
    fresh = copy.deepcopy(COMMITTED)
    launches = fresh["machines"]["simulated Hopper"]["CE"]["launches"]
    assert launches[0] == "clean_kernel" and launches.count("read_kernel") == launches.count("mm") == 2
    launches.reverse()
    (actual,) = counts.differences(fresh, COMMITTED)
    assert actual.startswith("simulated Hopper, CE: launches ['clean_kernel', ") and str(launches) in actual
