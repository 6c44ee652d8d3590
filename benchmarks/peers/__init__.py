"""Implementations that logitless is compared with, and the call of each: PyTorch, torch.compile, TRL,
Liger, Cut Cross-Entropy, QuACK, FLA, speculators.

The modules are named after the benchmarks that use them: `ce.py`, `policy.py`, `preference.py`,
`distillation.py`, `medusa.py`, `speculators.py` and `tensor_parallel.py` hold losses, `layers.py` holds
layer operators, and `lora.py` LoRA layers. Read `ce.py` first. The docstring of a module has the signature
that all its implementations share, and the releases that they were checked against. No command belongs to
this package; `--only` and `--skip` of a benchmark select implementations by name.

An implementation is a function that imports its library and returns a callable with that signature,
registered by `@PEERS.add(name, package=..., needs_cuda=...)`. The order of registration is the order of the
table. Each implementation is checked against the truth before it is timed, so a wrong call is reported and
not measured.
"""
