"""Products with the head for Hopper (compute capability 9), with an epilogue on the fp32 accumulators.

`fused_projection_triton` computes the statistics of a row and its unscaled gradient, `fused_gradient_triton`
the gradient of rows whose statistics are known, `stored_logits_triton` the normalizers of stored logits; all
use the product of `product_tiles_triton`.
`kernels/fused_projection.py` describes the interface and is its only caller.
`kernels.fused_products` loads this package, and Triton with it, on such a GPU alone.
"""

import torch

from logitless.kernels.hopper.fused_gradient_triton import write
from logitless.kernels.hopper.fused_projection_triton import read, row_bytes
from logitless.kernels.hopper.stored_logits_triton import normalizer_bytes, store

__all__ = ["DTYPES", "normalizer_bytes", "read", "row_bytes", "store", "write"]

# The dtypes with which the kernels were tested.
DTYPES = (torch.bfloat16,)
