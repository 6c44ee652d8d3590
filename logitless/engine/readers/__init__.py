"""Readers compute statistics of a chunk of logits, evaluate the loss, and write the gradient of the logits.

`base` contains the base class. `tokens` is for losses of per-token statistics, `logits` for functions of the
logits, `ids` for log-probabilities of several ids per token, `support` for the ids of student and teacher in
distillation, `gathered` for losses that only need k logits per token, `replay` for calls with a sampling
mask, and `speculator` for draft models. A loss class names its reader. The chunk loop calls the reader, and
the oracle of `tools` checks its kind.
"""
