"""Every trainer that the flag covers, by name."""

from . import distillation, per_token, preference, self_distillation, sft, teacher_distillation
from . import triple_preference as tpo
from .adapter import Adapter

MODULES = (sft, per_token, preference, tpo, distillation, self_distillation, teacher_distillation)
ADAPTERS: dict[str, Adapter] = {
    found.name: found for module in MODULES for found in vars(module).values() if isinstance(found, Adapter)
}
