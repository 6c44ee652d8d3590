"""The TRL and transformers releases this integration was read against and is tested with, stated once."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED = {"transformers": ">=5.17,<6", "trl": "~=1.16.0"}


def require_supported() -> None:
    """Raises `ImportError` unless every package of `SUPPORTED` is installed in a supported version.

    The integration replaces names inside TRL's trainers, so another version could train with another loss and
    not say so.
    """
    for package, wanted in SUPPORTED.items():
        remedy = f"pip install '{package}{wanted}'"
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ImportError(f"{package}: expected {wanted}, got no installation; {remedy}.") from None

        # comes with transformers, so it is imported once that is known to be here
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(wanted).contains(found, prereleases=True):
            raise ImportError(f"{package}: expected {wanted}, got {found}; {remedy}.")


def found_in_trl(place: str) -> Any:
    """What TRL has at `place`, "module:name".

    Raises:
        ImportError: this version of TRL has nothing of that name there.
    """
    module, name = place.split(":")
    try:
        return getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError):
        raise ImportError(moved(place)) from None


def moved(place: str) -> str:
    """The message for a name of TRL that is not where it was."""
    wanted = SUPPORTED["trl"]
    found = installed("trl")
    return f"{place}: expected in trl {wanted}, got trl {found} without it; pip install 'trl{wanted}'."


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
