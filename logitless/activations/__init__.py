"""Activation budgets: how many bytes the decoder layers of a model save for their backward pass.

`fit` has `fit_activations`, which limits these bytes, and the handle of a model. `plan` chooses the level of
each layer: what it keeps and what it recomputes. `saved_tensors` runs a layer at its level. `table` predicts
the bytes of a configuration, for the command line. Users call `fit_activations` from `logitless.models`, and
trainers of TRL by a flag. The package imports the fused layers, and no loss.
"""
