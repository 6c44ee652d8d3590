"""Operators on a chunk of logits, with Triton kernels for every GPU that Triton supports, and PyTorch twins.

`transform` is the head transform from products to logits. `cross_entropy` computes per-token statistics and
their gradients, `divergence` compares student and teacher, `select` finds the k largest logits, `shards`
merges the statistics of a sharded vocabulary, and `targets` counts and checks targets. `scale`, `sums` and
`exponentials_triton` are arithmetic. `row_partials_triton` merges the partial sums of products with an
epilogue, for all GPU generations. The engine and `parallel` call this package.
"""
