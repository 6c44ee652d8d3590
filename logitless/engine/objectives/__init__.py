"""What happens to a chunk of logits: how it is read, how the loss is evaluated, how the gradient is written.

`base` is the protocol that the chunk loop calls. `tokens` is for losses of statistics per token, `logits` for
functions of the logits, `ids` for log-probabilities of several ids per token, `support` for those beside a
teacher's, and `gathered` for losses of a few columns of the head, which multiplies with these alone. A loss
class names its objective; the loop and the passes call it, and the oracle of `tools` asks for its kind.
"""
