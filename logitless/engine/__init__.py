"""From a call's tensors to its loss and gradients, chunk by chunk; it knows no loss by name.

`call` and `packing` describe one head's call, `plan` and `budget` decide how it is cut into chunks, `rows`
and `choose` which rows count. `passes` and `loop` walk the chunks with `projection`, `gradients` and one of
`objectives`; `function` and `operators` are what autograd and torch.compile see. Called by the losses, and by
`tools` and `models`; authors of losses need `logitless.losses.base` alone.
"""
