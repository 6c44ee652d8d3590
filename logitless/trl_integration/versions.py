"""The releases of TRL and transformers that this integration supports and is tested with."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from logitless.errors import message

SUPPORTED = {"transformers": ">=5.17,<6", "trl": ">=1.15,<1.17"}
MISSING = "no installation"


def require_supported() -> None:
    """Raises `ImportError` unless every package of `SUPPORTED` is installed in a supported version.

    The integration replaces names inside TRL's trainers, so an unsupported version could silently train with
    another loss.
    """
    for package, wanted in SUPPORTED.items():
        found, fits = installed(package), False
        if found != MISSING:
            # comes with transformers, so it is imported once that is known to be here
            from packaging.specifiers import SpecifierSet

            fits = SpecifierSet(wanted).contains(found, prereleases=True)
        if not fits:
            raise ImportError(message(package, wanted, found, f"pip install '{package}{wanted}'"))


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
    wanted, found = SUPPORTED["trl"], installed("trl")
    return ImportError(
        f"{place}: expected in trl {wanted}, got trl {found} without it; pip install 'trl{wanted}'."
    )
