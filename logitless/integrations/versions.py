"""Checks the installed version of a framework, and replaces its functions.

Another minor version than the tested one is accepted with a warning. A name that a framework does not have
raises ImportError.
"""

import logging
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from logitless.errors import message, to_bytes, warn
from logitless.integrations import FRAMEWORKS

logger = logging.getLogger(__name__)
NOT_INSTALLED = "no installation"


def installed_version(framework: str) -> str:
    """Return the installed version of `framework`, which is a key of `FRAMEWORKS`.

    `NOT_INSTALLED` if it is not installed.
    """
    try:
        return version(FRAMEWORKS[framework].package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def check_version(framework: str) -> None:
    """Warn, once per framework, if another minor version than the tested one is installed."""
    installed = installed_version(framework)
    if installed != NOT_INSTALLED and not _has_tested_minor(framework, installed):
        _warn_once(framework, installed)


def _has_tested_minor(framework: str, installed: str) -> bool:
    return installed.split(".")[:2] == FRAMEWORKS[framework].tested.split(".")[:2]


def unavailable_error(framework: str, problem: object) -> ImportError:
    """The error for a framework that is not installed, lacks a dependency, or does not have a name.

    Args:
        framework: a key of `FRAMEWORKS`.
        problem: the error that its import raised, or a text that says what is missing.
    """
    entry = FRAMEWORKS[framework]
    installed = installed_version(framework)
    missing = (getattr(problem, "name", None) or "").partition(".")[0]
    is_missing = missing and sys.modules.get(missing) is None and find_spec(missing) is None
    owners = [name.replace("_", "-") for name in packages_distributions().get(missing, ())]
    is_own = entry.package in owners  # the module is a part of the framework itself
    if installed != NOT_INSTALLED and is_missing and not is_own:
        expected = f"{missing}, which {entry.package} {installed} imports"
        return ImportError(message(entry.package, expected, NOT_INSTALLED, f"install {missing}"))
    expected = "a complete installation" if _has_tested_minor(framework, installed) else entry.minor
    return ImportError(message(entry.package, expected, f"{installed} ({problem})", entry.install))


def import_owner(framework: str, path: str) -> tuple[Any, str]:
    """Import `path` and return (module or class, attribute name).

    Args:
        framework: a key of `FRAMEWORKS`.
        path: "module:name" or "module:Class.name".

    Raises:
        ImportError: the framework cannot be imported, or has no such name.
    """
    module, qualified_name = path.split(":")
    *classes, name = qualified_name.split(".")
    try:
        owner = import_module(module)
    except ImportError as error:
        raise unavailable_error(framework, error) from error
    check_version(framework)
    try:
        for cls in classes:
            owner = getattr(owner, cls)
        getattr(owner, name)
    except AttributeError:
        raise unavailable_error(framework, f"nothing at {path}") from None
    return owner, name


def replace_attribute(owners: list[Any], name: str, replacement: Any) -> Callable[[], None]:
    """Set the attribute `name` of each owner to `replacement`; returns a function that restores them.

    An owner whose attribute has been set to something else since is left as it is.
    """
    originals = [getattr(owner, name) for owner in owners]
    for owner in owners:
        setattr(owner, name, replacement)

    def undo() -> None:
        for owner, original in zip(owners, originals, strict=True):
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

    return undo


def replace_function(package: str, owner: ModuleType, name: str, replacement: Any) -> Callable[[], None]:
    """Replace the function `name` of the module `owner` in every module of `package` that has imported it by
    name; returns a function that restores it.

    Modules that import the function later import the replacement from `owner`; it is restored there too.
    """
    original = getattr(owner, name)

    def replace_in_modules(old: Any, new: Any) -> None:
        for module_name, module in list(sys.modules.items()):
            if module_name.split(".")[0] == package and vars(module).get(name) is old:
                setattr(module, name, new)

    replace_in_modules(original, replacement)
    return lambda: replace_in_modules(replacement, original)


def log_replacement(
    framework: str,
    replaced: str,
    logits_budget: int | str | None = None,
    *,
    logger: logging.Logger = logger,
) -> None:
    """Log in one INFO line what was replaced.

    Args:
        framework: its name, as users write it.
        replaced: what was replaced in it.
        logits_budget: bytes, or text such as "2GiB"; None for the default.
        logger: default the one of this module.
    """
    budget = "the default"
    if logits_budget is not None:
        budget = f"{to_bytes('logits_budget', logits_budget) / 2**30:.3g} GiB"
    logger.info("logitless: %s's %s replaced, logits_budget %s", framework, replaced, budget)


@cache
def _warn_once(framework: str, installed: str) -> None:
    entry = FRAMEWORKS[framework]
    expected = f"{entry.minor}, with which logitless was tested"
    warn(f"{entry.package}: expected {expected}, got {installed}; {entry.install}.", UserWarning)
