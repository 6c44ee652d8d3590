"""Every trainer that the flag covers, by name."""

from . import distillation, divergences, per_token, preference, sft
from . import triple_preference as tpo
from .adapter import Adapter

MODULES = (sft, per_token, preference, tpo, distillation, divergences)
ADAPTERS: dict[str, Adapter] = {
    found.name: found for module in MODULES for found in vars(module).values() if isinstance(found, Adapter)
}
