"""Several ids per token: their logits and the entries of their gradients.

`slots` reads the k ids of each token from a chunk of logits and writes their gradients to it; `gathered`
multiplies by those k rows of the head alone, without a chunk. Each has launchers, PyTorch twins, and Triton
kernels in `*_triton.py`. Called by the engine's objectives for several ids, and by the checks of the losses.
"""
