"""Patches verl when it is imported: `actor_rollout_ref.model.external_lib=logitless.integrations.verl_on`."""

from logitless.integrations import verl

verl.patch()
