"""Products with the head for Hopper (compute capability 9), which read a tile of logits in the accumulators.

`fused_projection_triton` finds the statistics of a row and its unscaled gradient, `fused_gradient_triton` the
gradient of rows whose statistics are known; `product_tiles_triton` is the product of both. What they are for
is told in `kernels/fused_projection.py`, which calls what is named here; nobody else does.
`kernels.fused_products` loads this package, and Triton with it, on such a GPU alone.
"""

import torch

from logitless.kernels.hopper.fused_gradient_triton import write
from logitless.kernels.hopper.fused_projection_triton import read, row_bytes

__all__ = ["DTYPES", "read", "row_bytes", "write"]

# Those that the kernels were tried with.
DTYPES = (torch.bfloat16,)
