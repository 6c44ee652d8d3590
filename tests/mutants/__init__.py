"""A committed list of small breakages, each of which the tests must notice: `make mutants` applies them one by one."""

from tests.mutants import beyond_eager, distillation, foundation, multi_token, policy, preference

MUTANTS = [*foundation.MUTANTS, *preference.MUTANTS, *policy.MUTANTS, *distillation.MUTANTS, *multi_token.MUTANTS, *beyond_eager.MUTANTS]
