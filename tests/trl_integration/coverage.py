"""Which options of each trainer are compared with stock TRL, read from the tables of the tests:

python -m tests.trl_integration.coverage            # prints the table
python -m tests.trl_integration.coverage --write    # into docs/trl_tests.md
"""

import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import logitless.trl_integration as ours

from . import test_async_trainers, test_parity

PAGE = Path(__file__).parents[2] / "docs" / "trl_tests.md"
ROWS = test_parity.ROWS | test_async_trainers.ROWS
# Settings of a run, which no loss depends on
NOT_OPTIONS = {"per_device_train_batch_size", "max_length", "learning_rate", "optim"}


def shown(value: Any) -> str:
    """As code, or the page would make links of addresses."""
    if isinstance(value, (list, tuple)):
        value = "+".join(map(str, value))
    return f"`{value}`"


def row(kind: str) -> str:
    known = {option.name for option in fields(getattr(ours, f"{kind}Config"))} - NOT_OPTIONS
    options, models = defaultdict(set), set()
    for changes in ROWS[kind]:
        models |= {changes.get("family", "llama")} | ({"LoRA"} if "lora" in changes else set())
        for name in changes.keys() & known:
            options[name].add("" if changes[name] is True else f" {shown(changes[name])}")
    cells = []
    for name, values in sorted(options.items()):
        given = ",".join(sorted(values - {""}))
        cells.append(f"`{name}`" + (f" ({given.strip()})" if given else ""))
    return f"| {kind} | {', '.join(cells)} | {', '.join(sorted(models))} |"


def table() -> str:
    lines = ["| trainer | options | models |", "| --- | --- | --- |"]
    return "\n".join(lines + [row(kind) for kind in sorted(ROWS)])


if __name__ == "__main__":
    print(table())
    if "--write" in sys.argv:
        from benchmarks.harness.report import rewrite

        rewrite(PAGE, "trl", table(), kind="tests")
