"""Operators for several ids per token: their logits, and the entries of their gradients.

`slots` reads the logits of k ids per token from a chunk of logits, and writes their gradients to it.
`gathered` computes only the products with k rows of the head per token, without a chunk of logits. `distinct`
and `sets` are for sampling masks, with a different number of ids per token. Each contains launchers, PyTorch
twins, and Triton kernels in `*_triton.py`. The readers of the engine and the checks of the losses call
this package.
"""
