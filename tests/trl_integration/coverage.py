"""Which trainers and options the parity tests of this folder cover, read from the tests themselves:

    python -m tests.trl_integration.coverage            # prints the table
    python -m tests.trl_integration.coverage --write    # into docs/trl_tests.md

A parity test is one that calls a function named `assert_same…`, itself or through another. Which trainer it
is about says a parameter with the trainer's name (`kind`), or else its own name or its file's
(`test_online_dpo`: OnlineDPO). Parameters that are dictionaries hold options, `family` is a model, and what
else there is to say the test's name says.
"""

import contextlib
import io
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEADERS = ("trainer", "options", "models", "further tests")
# Settings of a run, which no loss depends on
NOT_OPTIONS = {"per_device_train_batch_size", "max_steps", "max_length"}


@dataclass
class Covered:
    options: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    models: set[str] = field(default_factory=set)
    also: set[str] = field(default_factory=set)
    default_loss: bool = False  # whether a test takes the loss type that the config has by itself

    def cells(self) -> tuple[str, str, str]:
        options = []
        for name, values in sorted(self.options.items()):
            # As code, or the page would make links of addresses.
            given = ", ".join(f"`{value}`" for value in sorted(values - {""}))
            options.append(f"`{name}`" + (f" ({given})" if given else ""))
        return ", ".join(options), ", ".join(sorted(self.models)), ", ".join(sorted(self.also))


class Collected:
    """A plugin that keeps what pytest collects."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def collect() -> list[pytest.Function]:
    plugin, output = Collected(), io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)], plugins=[plugin]
        )
    if code:
        raise SystemExit(output.getvalue())
    return plugin.items


def trainers() -> dict[str, type]:
    """Name -> Config of every pair."""
    import logitless.trl_integration as ours

    names = (name.removesuffix("Trainer") for name in ours.__all__ if name.endswith("Trainer"))
    return {name: getattr(ours, f"{name}Config") for name in names if hasattr(ours, f"{name}Config")}


def is_parity(function: Callable, depth: int = 3) -> bool:
    for name in function.__code__.co_names:
        if name.startswith("assert_same"):
            return True
        called = function.__globals__.get(name)
        if (
            depth
            and hasattr(called, "__code__")
            and called.__module__.startswith(__package__)
            and is_parity(called, depth - 1)
        ):
            return True
    return False


def split(words: list[str], names: dict[str, type]) -> tuple[str | None, list[str]]:
    """The longest trainer's name among consecutive words, and the words without it."""
    lowered = {name.lower(): name for name in names}
    for length in range(len(words), 0, -1):
        for start in range(len(words) - length + 1):
            found = lowered.get("".join(words[start : start + length]))
            if found:
                return found, words[:start] + words[start + length :]
    return None, words


def parts(item: pytest.Function, names: dict[str, type]) -> tuple[str | None, list[str], dict[str, Any]]:
    """(trainer, what is left of the test's name, its parameters)."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    words = item.originalname.removeprefix("test_").split("_")
    by_name, rest = split(words, names)
    given = next((value for value in params.values() if isinstance(value, str) and value in names), None)
    by_file = split(item.module.__name__.rpartition(".")[2].split("_"), names)[0]
    return (
        given or by_name or by_file,
        words if given else rest,
        {name: x for name, x in params.items() if x is not given},
    )


def shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value))
    return "" if value is True else str(value)


def flat(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        yield from value.items() if isinstance(value, dict) else [(name, value)]


def covered() -> tuple[dict[str, Covered], list[str]]:
    """What is covered by trainer, and the parity tests that name none."""
    names = trainers()
    found, unnamed = {name: Covered() for name in names}, []
    for item in filter(lambda item: is_parity(item.function), collect()):
        trainer, words, params = parts(item, names)
        for each in params.pop("kinds", ()):
            found[each].also.add(" ".join(words))  # one model goes through several
            trainer = each
        if trainer is None:
            unnamed.append(item.nodeid)
            continue
        entry, known = found[trainer], {option.name: option for option in fields(names[trainer])}
        if words:
            entry.also.add(" ".join(words))
        given = dict(flat(params))
        entry.default_loss |= "loss_type" not in given
        for name, value in given.items():
            if name == "family":
                entry.models.add(value)
            elif name in known and name not in NOT_OPTIONS:
                entry.options[name].add(shown(value))
    for trainer, entry in found.items():
        if entry.default_loss and "loss_type" in entry.options:
            default = next(option for option in fields(names[trainer]) if option.name == "loss_type")
            entry.options["loss_type"].add(
                shown(default.default if default.default is not MISSING else default.default_factory())
            )
    return found, unnamed


def table() -> str:
    found, unnamed = covered()
    if unnamed:
        raise SystemExit(
            f"parity tests: expected a trainer's name in each one's name, file or parameters, got "
            f"{', '.join(unnamed)}."
        )
    rows = [
        HEADERS,
        ["---"] * len(HEADERS),
        *((name, *entry.cells()) for name, entry in sorted(found.items())),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str]) -> None:
    body = table()
    if "--write" not in arguments:
        print(body)
        return
    from benchmarks.pages import rewrite

    rewrite(ROOT / "docs" / "trl_tests.md", "trl", body, kind="tests")


if __name__ == "__main__":
    main(sys.argv[1:])
