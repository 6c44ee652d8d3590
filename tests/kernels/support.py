"""Where the kernels' tests run: on the GPU if there is one, else on the CPU, as twins or (TRITON_INTERPRET=1)
in Triton's interpreter."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and DEVICE == "cpu"


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory as nobody left it: whatever is not written stays NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, as a kernel stores it: Triton's interpreter cuts fp32 off to bf16 where hardware
    rounds."""
    if INTERPRETED and dtype == torch.bfloat16 and x.dtype != dtype:
        return (x.float().view(torch.int32) & -(2**16)).view(torch.float32).to(dtype)
    return x.to(dtype)


def strided(x: Tensor) -> Tensor:
    """`x` as every second number of a tensor whose others are wrong: no index for integers, NaN for the
    rest."""
    junk = torch.full_like(x, float("nan")) if x.is_floating_point() else ~x
    return torch.stack((x, junk), dim=-1)[..., 0]


def offset(x: Tensor) -> Tensor:
    """`x` in the middle of something longer."""
    junk = torch.full_like(x[:1], float("nan")) if x.is_floating_point() else ~x[:1]
    return torch.cat((junk, x, junk))[1:-1]


def expanded(x: Tensor) -> Tensor:
    """The first number of every row of `x`, seen as a whole row of them (of a vector: the first number of
    all)."""
    return x[..., :1].expand(x.shape)


# How an operand may lie in memory. `strided` and `offset` keep its values, `expanded` does not.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"strided": strided, "offset": offset, "expanded": expanded}
