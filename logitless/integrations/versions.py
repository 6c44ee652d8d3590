"""Which version of a framework is installed, and what it has in the places that a module replaces.

Another minor version than the tested one is taken, with a warning. A name that is not in its place raises
ImportError.
"""

import logging
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from logitless.errors import warn
from logitless.integrations import FRAMEWORKS

logger = logging.getLogger(__name__)
MISSING = "no installation"


def installed(name: str) -> str:
    """The installed version of a framework of `FRAMEWORKS`, or `MISSING`."""
    try:
        return version(FRAMEWORKS[name].package)
    except PackageNotFoundError:
        return MISSING


def check_version(name: str) -> None:
    """Warn once per framework if another minor version is installed than the tested one."""
    found = installed(name)
    if found != MISSING and found.split(".")[:2] != FRAMEWORKS[name].tested.split(".")[:2]:
        _warn_once(name, found)


def unavailable(name: str, problem: object) -> ImportError:
    """The error for a framework that is not installed, or in which a name is missing.

    Args:
        name: of `FRAMEWORKS`.
        problem: the error that its import raised, or what is missing.
    """
    framework = FRAMEWORKS[name]
    got = f"{installed(name)} ({problem})"
    return ImportError(f"{framework.package}: expected {framework.minor}, got {got}; {framework.install}.")


def find(name: str, place: str) -> tuple[Any, str]:
    """The owner of a name of a framework (a module or a class), and the name in it.

    Args:
        name: of `FRAMEWORKS`.
        place: "module:name" or "module:Class.name".

    Raises:
        ImportError: the framework cannot be imported, or has no such name in that place.
    """
    module, path = place.split(":")
    *classes, last = path.split(".")
    try:
        owner = import_module(module)
    except ImportError as error:
        raise unavailable(name, error) from error
    check_version(name)
    try:
        for cls in classes:
            owner = getattr(owner, cls)
        getattr(owner, last)
    except AttributeError:
        raise unavailable(name, f"nothing at {place}") from None
    return owner, last


def replace(owners: list[Any], name: str, replacement: Any) -> Callable[[], None]:
    """Set the attribute `name` of each owner to `replacement`; return a function that restores it.

    An owner whose attribute has been set to something else in the meantime is left as it is.
    """
    originals = [(owner, getattr(owner, name)) for owner in owners]
    for owner in owners:
        setattr(owner, name, replacement)

    def undo() -> None:
        for owner, before in originals:
            if getattr(owner, name) is replacement:
                setattr(owner, name, before)

    return undo


def replace_function(package: str, owner: ModuleType, name: str, replacement: Any) -> Callable[[], None]:
    """Replace a function of a framework in every module of it that has imported the function by name.

    Modules that import the function later get `replacement` from `owner`; undoing restores these too.
    """
    original = getattr(owner, name)

    def exchange(before: Any, after: Any) -> None:
        for place, module in list(sys.modules.items()):
            if place.split(".")[0] == package and vars(module).get(name) is before:
                setattr(module, name, after)

    exchange(original, replacement)
    return lambda: exchange(replacement, original)


def announce(
    framework: str,
    replaced: str,
    logits_budget: int | None = None,
    *,
    logger: logging.Logger = logger,
) -> None:
    """Log in one INFO line what a module has replaced, in the framework's own logger if need be."""
    budget = "the default" if logits_budget is None else f"{logits_budget / 2**30:.3g} GiB"
    logger.info("logitless: %s's %s replaced, logits_budget %s", framework, replaced, budget)


@cache
def _warn_once(name: str, found: str) -> None:
    framework = FRAMEWORKS[name]
    expected = f"{framework.minor}, with which logitless was tested"
    warn(f"{framework.package}: expected {expected}, got {found}; {framework.install}.", UserWarning)
