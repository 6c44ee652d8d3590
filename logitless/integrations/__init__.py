"""One module per training framework, which replaces the framework's loss by one of logitless.

The keys of `FRAMEWORKS` are the names of the modules. Importing this package imports no module of it, and no
framework; a module imports only its framework. A module patches its framework only when `patch()` or
`register()` is called; the function that these return restores the original. The exception is `verl_on`,
which patches verl when it is imported.

Only users import this package: nothing else in the library does.
"""

from typing import NamedTuple


class Framework(NamedTuple):
    """A framework that this package has a module for.

    Attributes:
        package: the name of its distribution.
        tested: the version that the module's tests run with.
        source: where to install it from if it is on no package index.
    """

    package: str
    tested: str
    source: str | None = None

    @property
    def minor(self) -> str:
        """The tested minor version, such as "0.9"."""
        return ".".join(self.tested.split(".")[:2])

    @property
    def install(self) -> str:
        """How to install the tested version."""
        if self.source is not None:
            return f"install it from {self.source}"
        return f"pip install '{self.package}=={self.minor}.*'"


FRAMEWORKS = {
    "axolotl": Framework("axolotl", "0.21.0"),
    "llamafactory": Framework("llamafactory", "0.9.5"),
    "megatron": Framework("megatron-core", "0.19.2"),
    "ms_swift": Framework("ms-swift", "4.6.0"),
    "nemo_automodel": Framework("nemo-automodel", "0.7.0"),
    "nemo_rl": Framework("nemo-rl", "0.6.0", "https://github.com/NVIDIA-NeMo/RL, main of 2026-08-22"),
    "torchtitan": Framework("torchtitan", "0.3.0"),
    "verl": Framework("verl", "0.9.1"),
}

__all__ = ["FRAMEWORKS", "Framework"]
