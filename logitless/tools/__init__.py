"""Tools for users: whether a loss is correct, and how much memory and time it takes.

`check` compares a loss with its definition over full logits, which `oracle` computes on the copies that
`leaves` makes; `estimate` plans a call without memory, also for a GPU of `cards`; `doctor` says what runs
fast on this machine. `samples` draws the arguments of a call for `doctor` and the command line.
Called by users, as `logitless.check` and `logitless.estimate`, and by `python -m logitless`. No other package
of the library imports this one, and `import logitless` does not load it.
"""
