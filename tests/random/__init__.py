"""Random differential tests: losses against full logits in fp64, trainers against stock TRL.

`make test` runs a fixed set of examples. `python -m tests.random --seed 1 --minutes 20` searches for others.
"""
