"""Runs the commands of scripts, which typer makes of their functions, and imports the examples."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    """A module of the examples, which import each other by name."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return import_module(name)


def invoke(main: Callable, *arguments: str, **options):
    """The result of a command: `exit_code` and `output`. Options are those of typer's `CliRunner.invoke`."""
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments, **options)


def output_of(main: Callable, *arguments: str) -> str:
    """What a command prints, which succeeds."""
    done = invoke(main, *arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output
