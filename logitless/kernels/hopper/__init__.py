"""Products with the head for Hopper (compute capability 9), with an epilogue on the fp32 accumulators.

`fused_projection_triton` computes the statistics of a row and its unscaled gradient. `fused_gradient_triton`
computes the gradient of rows from their statistics. Both use the product of `product_tiles_triton`.
`kernels/fused_projection.py` documents the interface, and is its only caller. `kernels.fused_products` loads
this package, and Triton with it, on such a GPU alone.
"""

import torch

from logitless.kernels.hopper.fused_gradient_triton import write
from logitless.kernels.hopper.fused_projection_triton import read, row_bytes

__all__ = ["DTYPES", "read", "row_bytes", "write"]

# The dtypes with which the kernels were tested.
DTYPES = (torch.bfloat16,)
