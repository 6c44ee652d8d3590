"""From a call's tensors to its loss and gradients, chunk by chunk; it knows no loss by name.

`call` and `packing` describe one head's call; `plan` and `budget` decide how the call is cut into chunks;
`rows` and `choose` decide which rows are projected. `passes` and `loop` run the chunks with `projection`,
`gradients` and one of `objectives`; autograd and torch.compile see `function` and `operators`. The losses,
`tools` and `models` call the engine; the author of a loss needs `logitless.losses.base` alone.
"""
