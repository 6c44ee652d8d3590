"""Several ids per token: their logits and the entries of their gradients.

`slots` takes the k ids of each token out of a chunk of logits and puts their gradients there; `gathered`
multiplies with those k rows of the head alone, without a chunk. Each is a launcher with a PyTorch twin, and
its Triton kernels are in `*_triton.py`. Called by the engine's objectives for several ids, and for checks by
the losses.
"""
