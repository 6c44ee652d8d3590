"""The TRL and transformers releases this integration was read against and is tested with, stated once."""

from importlib.metadata import PackageNotFoundError, version

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
