"""Tools for users: whether a loss is correct, and how much memory and time it takes.

`check` compares a loss with its definition over full logits, which `oracle` computes on copies of the
arguments (`leaves`). `estimate` plans a call without allocating tensors, also for the GPUs listed in `cards`.
`doctor` prints which kernels run on this machine, and checks the main losses. `samples` draws random
arguments of a call for `doctor` and the command line. Users call `logitless.check`, `logitless.estimate` and
`python -m logitless`. No other package of the library imports this one, and `import logitless` does not load
it.
"""
