"""Compute the loss and the gradients of a call chunk by chunk. The engine does not depend on any loss class.

`call` represents the call of a head. `plan` and `budget` decide how the call is cut into chunks,
`rows` and `choose` which rows are projected. `base` runs the chunks with `projection`, `gradients` and one of
`readers`, under autograd; `operators` connects it to torch.compile.
The losses, `tools`, `models` and `trl_integration` import the engine. Authors of custom losses only need
`logitless.losses.base`.
"""
