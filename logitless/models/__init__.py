"""What is done to a Hugging Face model that is there."""

from importlib import import_module
from typing import Any

# Public names by the file that has them, which is loaded when one of them is asked for.
_FILES = {
    "fuse_layers": "fuse",
}

__all__ = [*_FILES]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
