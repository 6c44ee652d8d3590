"""Where the kernels' tests run: on the GPU if there is one, else on the CPU, as twins or (TRITON_INTERPRET=1) in Triton's interpreter."""

import os

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and DEVICE == "cpu"


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory as nobody left it: whatever is not written stays NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as a kernel stores it: Triton's interpreter cuts fp32 off to bf16 where hardware rounds."""
    if INTERPRETED and dtype == torch.bfloat16 and x.dtype != dtype:
        return (x.float().view(torch.int32) & -(2**16)).view(torch.float32).to(dtype)
    return x.to(dtype)
