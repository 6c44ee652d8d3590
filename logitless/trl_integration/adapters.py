"""Every trainer that the flag covers, by name."""

from . import deferred, distillation, per_token, preference
from .adapter import Adapter

MODULES = (per_token, preference, distillation, deferred)
ADAPTERS: dict[str, Adapter] = {
    found.name: found for module in MODULES for found in vars(module).values() if isinstance(found, Adapter)
}
