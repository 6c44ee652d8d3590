"""A committed list of small breakages, each of which the tests must notice: `make mutants` applies them one
by one."""

from tests.mutants import (
    beyond_eager,
    calls,
    distillation,
    estimating,
    foundation,
    fused_layers,
    fused_projection,
    models,
    multi_token,
    parallel,
    policy,
    preference,
    several_ids,
    surface,
    trainers,
)

MODULES = (
    foundation,
    preference,
    policy,
    distillation,
    multi_token,
    parallel,
    beyond_eager,
    calls,
    several_ids,
    models,
    trainers,
    fused_layers,
    fused_projection,
    estimating,
    surface,
)
MUTANTS = [mutant for module in MODULES for mutant in module.MUTANTS]
