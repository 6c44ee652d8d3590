"""Products with the head for Hopper (compute capability 9), with an epilogue on the fp32 accumulators.

`fused_projection_triton` computes the statistics of a row and its unscaled gradient. `fused_gradient_triton`
computes the gradient of rows from their statistics. Both use the product of `product_tiles_triton`.
`kernels.fused_products` documents what such a package has, and loads this one on such a GPU, and in a plan
for one. `kernels/fused_projection.py` is its only caller. `read` and `write` load Triton, which a plan does
without.
"""

import importlib

import torch

# The dtypes with which the kernels were tested.
DTYPES = (torch.bfloat16,)
# Columns of a tile, and the largest number of partial sums per row and tile.
BLOCK_N, PARTIALS = 256, 5
_KERNELS = {"read": "fused_projection_triton", "write": "fused_gradient_triton"}


def row_bytes(V: int, *, stored: bool) -> int:
    return 4 * PARTIALS * -(-V // BLOCK_N) + (2 * V if stored else 0)


def __getattr__(name: str):
    """Import `read` or `write` on first use."""
    if name not in _KERNELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    launcher = getattr(importlib.import_module(f"{__name__}.{_KERNELS[name]}"), name)
    globals()[name] = launcher
    return launcher
