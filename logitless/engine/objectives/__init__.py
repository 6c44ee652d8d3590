"""Objectives: compute statistics of a chunk of logits, evaluate the loss, write the gradient of the logits.

`base` is the protocol that the chunk loop calls. `tokens` is for losses of per-token statistics, `logits` for
functions of the logits, `ids` for log-probabilities of several ids per token, `support` for the ids of
student and teacher in distillation, and `gathered` for losses that need only k logits per token, which are
computed without all other logits. A loss class names its objective; the loop and the passes call the
objective, and the oracle of `tools` checks its kind.
"""
