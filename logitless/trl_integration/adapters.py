"""Every trainer that the flag covers, by name."""

from . import deferred, distillation, per_token
from .adapter import Adapter

MODULES = (per_token, distillation, deferred)
ADAPTERS: dict[str, Adapter] = {
    found.name: found for module in MODULES for found in vars(module).values() if isinstance(found, Adapter)
}
