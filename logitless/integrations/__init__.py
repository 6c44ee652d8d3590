"""One module per training framework, which puts our losses in the place of that framework's own.

`FRAMEWORKS` names the modules. Importing this package imports none of them, and no framework. A module
imports its own framework alone. What replaces a name of a framework does so when `patch()` or `register()` is
called, and `undo()` restores the name; `verl_on` alone patches when it is imported.

Only users import this package: nothing else in the library does.
"""

from typing import NamedTuple


class Framework(NamedTuple):
    """A framework that has a module here.

    Attributes:
        package: the name of its distribution.
        tested: the version that the module's tests run with.
        source: where to get it if no package index has it.
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
        return (
            f"install it from {self.source}"
            if self.source
            else f"pip install '{self.package}=={self.minor}.*'"
        )


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
