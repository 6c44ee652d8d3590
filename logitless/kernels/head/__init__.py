"""What reads and writes a chunk of logits, on any GPU with Triton and, by PyTorch twins, anywhere.

`transform` is what comes between the product and the logits, `cross_entropy` the statistics per token and
their gradients, `divergence` and `select` other readings of a chunk, `shards` and `targets` what a sharded
vocabulary and the targets take, `scale` and `exponentials_triton` arithmetic. `row_partials_triton` merges
the partial sums of products with an epilogue, of any GPU generation. Called by the engine and `parallel`.
"""
