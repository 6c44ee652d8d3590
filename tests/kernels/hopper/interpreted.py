"""The dispatch to the Hopper kernels in Triton's interpreter, with tiles that it computes in a short time."""

import torch


def replacements(BM: int, BN: int, BK: int) -> list[tuple[object, str, object]]:
    """(object, attribute, value) to set in a process that has TRITON_INTERPRET=1."""
    from logitless import kernels
    from logitless.kernels import hopper
    from logitless.kernels.hopper import fused_gradient_triton, fused_projection_triton, product_tiles_triton

    sizes = {"BM": BM, "BN": BN, "BK": BK}
    return [
        (kernels, "_generation", lambda device: 9),
        (hopper, "DTYPES", (torch.float32,)),  # the interpreter's products take no bf16
        *((product_tiles_triton, f"BLOCK_{name[1]}", size) for name, size in sizes.items()),
        (fused_projection_triton, "BLOCK_N", BN),
        *(
            (module, "TILE", sizes)
            for module in (product_tiles_triton, fused_projection_triton, fused_gradient_triton)
        ),
    ]
