"""Operators on a chunk of logits: Triton kernels on any GPU that has Triton, PyTorch twins anywhere.

`transform` is the head transform between product and logits, `cross_entropy` the per-token statistics and
their gradients, `divergence` compares student and teacher, `select` finds the k largest logits, `shards`
merges the statistics of a sharded vocabulary, `targets` counts and checks targets, `scale`, `sums` and
`exponentials_triton` are arithmetic. `row_partials_triton` merges the partial sums of products with an
epilogue, for every GPU generation. Called by the engine and `parallel`.
"""
