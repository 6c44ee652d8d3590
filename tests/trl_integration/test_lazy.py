"""A name is imported when it is first used, in a process that has imported nothing else."""

import subprocess
import sys

import pytest

import logitless.trl_integration as ours

SCRIPT = """
import sys
loaded = lambda: [m for m in sys.modules if m == "trl" or m.startswith("trl.experimental.")]
from logitless.trl_integration import head_of, patch_model
print(loaded())
from logitless.trl_integration import SFTConfig, SFTTrainer
print(loaded())
"""


def test_what_an_import_loads():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "['trl']"]
    assert "TRLExperimentalWarning" not in done.stderr


WITHOUT = """
import sys
for name in ("trl", "transformers"):
    sys.modules[name] = None  # as if it were not installed
from importlib import metadata
known = metadata.version
def version(name):
    if name in ("trl", "transformers"):
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
from logitless.trl_integration import SFTConfig
"""


@pytest.mark.slow
def test_without_trl_the_message_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: transformers: expected >=5.17,<6, got no installation; "
        "pip install 'transformers>=5.17,<6'."
    )


def test_names():
    assert len(ours.PAIRS) == 20 and {"apply_to", "patch_model", "head_of", "GKDConfig"} <= set(dir(ours))
    assert ours.GKDTrainer is ours.GKDTrainer and ours.GKDTrainer.__module__ == "logitless.trl_integration"
    with pytest.raises(ImportError, match="PPOTrainer: expected a Config or Trainer of A2PO, .* TRL's own"):
        ours.PPOTrainer  # noqa: B018
