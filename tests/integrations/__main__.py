"""`make test-frameworks`: the tests of each framework's module with that framework's own wheel, on the CPU.

    python -m tests.integrations                          every framework, in the versions of frameworks.txt
    python -m tests.integrations verl torchtitan          two of them
    python -m tests.integrations --newest --summary out.md          the newest versions; a Markdown table

A wheel is installed without its dependencies, beside the few of them that the tests import, into a folder of
its own. Seconds and some 20 MB; a second run takes the same folders.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated

import typer

from logitless.integrations import FRAMEWORKS
from tests.integrations.support import REQUIRED

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "frameworks.txt"
# Module -> the distributions of which its tests import something.
WHEELS = {
    "axolotl": ["axolotl", "addict", "art", "termcolor", "colorama"],
    "llamafactory": ["llamafactory"],
    "megatron": ["megatron-core"],
    "ms_swift": ["ms-swift"],
    "nemo_automodel": ["nemo-automodel"],
    "torchtitan": [
        *("torchtitan", "absl-py", "docstring_parser", "einops", "protobuf", "shtab", "spmd_types"),
        *("tensorboard", "torch_checkpointing", "torchdata", "typeguard", "tyro"),
    ],
    "verl": ["verl", "megatron-core"],
}


def test_of(name: str) -> Path:
    return ROOT / "tests" / "integrations" / f"test_{name}.py"


def pins_of(name: str) -> str:
    """The lines of frameworks.txt for the wheels of a framework."""
    lines = CONSTRAINTS.read_text().splitlines()
    return "\n".join(line for line in lines if line.partition("==")[0] in WHEELS[name])


def install(name: str, *, newest: bool) -> Path:
    """The folder with the wheels of a framework; installed on first use, and again when a pin changes."""
    folder = ROOT / ".venv" / "frameworks" / ("newest" if newest else "pinned") / name
    stamp, pins = folder / "pins.txt", pins_of(name)
    if not newest and stamp.exists() and stamp.read_text() == pins:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    # Some wheels are made for Python 3.12 and later; what the tests import of them runs with 3.11.
    python = max(sys.version_info[:2], (3, 12))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    command += ["--python-version", ".".join(map(str, python)), "--ignore-requires-python"]
    command += ["--only-binary=:all:"]
    command += [] if newest else ["--constraint", str(CONSTRAINTS)]
    subprocess.run([*command, *WHEELS[name]], check=True)
    stamp.write_text(pins)
    return folder


def run(name: str, folder: Path | None) -> tuple[bool, str]:
    """Whether the tests of a module pass, and their output."""
    paths = [str(ROOT), *([str(folder)] if folder else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), REQUIRED: "1"}
    command = [sys.executable, "-m", "pytest", "--verbose", "-rfEs", "--tb=short", str(test_of(name))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode == 0, done.stdout + done.stderr


def result_of(output: str) -> str:
    """How many tests passed, failed and were skipped, with the reason of each that was skipped."""
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)\b", output.strip().splitlines()[-1])
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)", output, re.MULTILINE)
    return ", ".join(counts) + "".join(f"; not run: {reason}" for reason in skipped)


def version_in(folder: Path | None, name: str) -> str:
    """The version of a framework that was installed; the pinned one if nothing was."""
    package = FRAMEWORKS[name].package
    if folder is not None:
        for actual in distributions(path=[str(folder)]):
            if re.sub(r"[-_.]+", "-", actual.name).lower() == package:
                return actual.version
    return FRAMEWORKS[name].tested


def reason_of(output: str) -> str:
    """The functions that moved; else what could not be imported; else the tests that failed."""
    kinds = (
        r"^E +AssertionError: (\S+ moved: .*)",
        r"^E +(?:ImportError|ModuleNotFoundError): (.*)",
        r"^(?:FAILED|ERROR) (\S+)",
    )
    for kind in kinds:
        actual = re.findall(kind, output, re.MULTILINE)
        if actual:
            return "; ".join(sorted(set(actual)))
    return output.strip().splitlines()[-1]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Modules; all of them by default.")] = None,
    newest: Annotated[bool, typer.Option(help="The newest versions, not those of frameworks.txt.")] = False,
    summary: Annotated[Path | None, typer.Option(help="Write a Markdown table of the results.")] = None,
) -> None:
    rows, failed = [], False
    for name in names or [name for name in sorted(FRAMEWORKS) if test_of(name).exists()]:
        package = FRAMEWORKS[name].package
        try:
            folder = install(name, newest=newest) if name in WHEELS else None
        except subprocess.CalledProcessError as error:
            passed, output, version = False, f"{package} could not be installed: {error}", "?"
        else:
            version = version_in(folder, name)
            passed, output = run(name, folder)
        failed |= not passed
        result = result_of(output) if passed else f"failed: {reason_of(output)}"
        if not passed:
            print(output)
        print(f"{package} {version}: {result}", flush=True)
        rows.append((package, version, result))
    if summary is not None:
        lines = ["| framework | version | result |", "|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        summary.write_text("\n".join(lines) + "\n")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
