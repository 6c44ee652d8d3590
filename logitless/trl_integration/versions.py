"""The releases of TRL and transformers that this integration supports and is tested with."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from logitless.errors import message

SUPPORTED = {"transformers": ">=5.17,<6", "trl": ">=1.15,<1.17"}
# For the trainers that call `require_newest_minor`
NEWEST_TRL = ">=1.16,<1.17"
NOT_INSTALLED = "no installation"


def require_supported() -> None:
    """Raise `ImportError` unless every package of `SUPPORTED` is installed in a supported version.

    The integration replaces functions inside TRL's trainers, so an unsupported version could silently train
    with another loss.
    """
    for package, specifier in SUPPORTED.items():
        installed = installed_version(package)
        if not _matches(installed, specifier):
            raise ImportError(message(package, specifier, installed, f"pip install '{package}{specifier}'"))


def require_newest_minor(trainer: Any) -> None:
    """Raise `ImportError` unless TRL is of the newest minor version; for trainers tested with that alone."""
    installed = installed_version("trl")
    if not _matches(installed, NEWEST_TRL):
        expected = f"trl {NEWEST_TRL}"
        got = f"trl {installed}"
        remedy = f"pip install 'trl{NEWEST_TRL}'"
        raise ImportError(message(type(trainer).__name__, expected, got, remedy))


def _matches(installed: str, specifier: str) -> bool:
    if installed == NOT_INSTALLED:
        return False
    # comes with transformers, so it is imported only if that is installed
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(installed, prereleases=True)


def installed_version(package: str) -> str:
    """The version of a package, or `NOT_INSTALLED`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def import_from_trl(path: str) -> Any:
    """Import "module:name" or "module:Class.name" from TRL; ImportError if this version does not have it."""
    owner, name = import_owner(path)
    return getattr(owner, name)


def import_owner(path: str) -> tuple[Any, str]:
    """Import `path` as `import_from_trl` does; returns (module or class, attribute name)."""
    module, qualified_name = path.split(":")
    *classes, name = qualified_name.split(".")
    try:
        owner = import_module(module)
        for cls in classes:
            owner = getattr(owner, cls)
        getattr(owner, name)
    except (ModuleNotFoundError, AttributeError):
        raise missing_name_error(path) from None
    return owner, name


def missing_name_error(path: str) -> ImportError:
    """The error for a path that the installed TRL does not have."""
    specifier = SUPPORTED["trl"]
    got = f"trl {installed_version('trl')} without it"
    return ImportError(message(path, f"in trl {specifier}", got, f"pip install 'trl{specifier}'"))
