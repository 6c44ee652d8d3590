"""The releases of TRL and transformers that this integration supports and is tested with."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from logitless.errors import message

SUPPORTED = {"transformers": ">=5.17,<6", "trl": ">=1.15,<1.17"}
# For trainers that newest_minor checks.
NEWEST = ">=1.16,<1.17"
MISSING = "no installation"


def require_supported() -> None:
    """Raises `ImportError` unless every package of `SUPPORTED` is installed in a supported version.

    The integration replaces names inside TRL's trainers, so an unsupported version could silently train with
    another loss.
    """
    for package, wanted in SUPPORTED.items():
        found = installed(package)
        if not _fits(found, wanted):
            raise ImportError(message(package, wanted, found, f"pip install '{package}{wanted}'"))


def newest_minor(trainer: Any) -> None:
    """Raises `ImportError` for a trainer that was tested with the newer of the two minors of TRL alone."""
    found = installed("trl")
    if not _fits(found, NEWEST):
        expected = f"trl {NEWEST}"
        got = f"trl {found}"
        remedy = f"pip install 'trl{NEWEST}'"
        raise ImportError(message(type(trainer).__name__, expected, got, remedy))


def _fits(version: str, wanted: str) -> bool:
    """Whether an installed version is among those of a specifier."""
    if version == MISSING:
        return False
    # comes with transformers, so it is imported once that is known to be here
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def found_in_trl(place: str) -> Any:
    """What TRL has at `place`, "module:name" or "module:Class.name"; ImportError if this version has nothing
    of that name there."""
    owner, name = owner_in_trl(place)
    return getattr(owner, name)


def owner_in_trl(place: str) -> tuple[Any, str]:
    """(the module or class, the name in it) of a place; ImportError as `found_in_trl`."""
    module, path = place.split(":")
    *classes, name = path.split(".")
    try:
        owner = import_module(module)
        for cls in classes:
            owner = getattr(owner, cls)
        getattr(owner, name)
    except (ModuleNotFoundError, AttributeError):
        raise moved(place) from None
    return owner, name


def moved(place: str) -> ImportError:
    """The error for a name of TRL that is not in its expected place."""
    wanted = SUPPORTED["trl"]
    found = installed("trl")
    return ImportError(
        f"{place}: expected in trl {wanted}, got trl {found} without it; pip install 'trl{wanted}'."
    )
