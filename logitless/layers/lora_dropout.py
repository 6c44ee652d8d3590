"""Dropout before the A of LoRA projections of one input x, each with a mask m_i of its own.

    h_i = s (x * m_i) A_i'        d_A_i = d_h_i' (x * m_i)        d_x = sum over i of m_i * (d_h_i A_i)

The masks hold 0 and 1; 1 / (1 - p) is part of s. On a CPU they are drawn as PEFT's are. The Triton kernels
keep a mask as bits, an eighth of a byte an element, and no masked copy of x exists.
"""

import torch
from torch import Tensor

from logitless.kernels.matmul import has_out_dtype
from logitless.kernels.operands import all_triton, on_device

HALF_DTYPES = (torch.bfloat16, torch.float16)
# With more columns, the tiles of a kernel do not fit into the shared memory of a multiprocessor.
MAX_RANK = 128


def project(x: Tensor, p: float, count: int, a: Tensor, scale: float, out: Tensor) -> Tensor:
    """Draw `count` masks of x (N, K), whose elements are 1 with probability 1 - p.

    Write scale * (x * m_i) @ A_i' to r columns of `out` each; `a` has all A_i (r, K) below each other.

    Returns:
        the masks: bools (count, N, K), or bits.
    """
    if x.dtype in HALF_DTYPES and a.shape[0] <= MAX_RANK * count and all_triton(x):
        from logitless.layers import lora_dropout_triton

        with on_device(x):
            return lora_dropout_triton.project(x, p, count, a, scale, out)
    masks = torch.empty(count, *x.shape, dtype=torch.bool, device=x.device)
    for mask, each, part in zip(masks, a.chunk(count), out.chunk(count, 1)):
        mask.bernoulli_(1 - p)
        scaled_product(x * mask, each.t(), scale, part)
    return masks


def backward(
    d_h: Tensor, x: Tensor | None, d_x: Tensor | None, masks: Tensor, a: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Write the sum of m_i * (d_h_i @ A_i) over all i to d_x, unless it is None.

    Returns:
        the gradients of all A_i below each other, in `dtype`; None if x is None.
    """
    if masks.dtype == torch.uint8:
        from logitless.layers import lora_dropout_triton

        with on_device(d_h):
            return lora_dropout_triton.backward(d_h, x, d_x, masks, a, dtype)
    count = masks.shape[0]
    gradients = []
    if d_x is not None:
        d_x.zero_()
    for mask, part, each in zip(masks, d_h.chunk(count, 1), a.chunk(count)):
        if x is not None:
            gradients.append(product(part.t(), x * mask, dtype))
        if d_x is not None:
            d_x.addcmul_(product(part, each, part.dtype), mask)
    return torch.cat(gradients) if gradients else None


def scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * a @ b. Autocast does not apply."""
    torch.addmm(out, a, b, beta=0, alpha=scale, out=out)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b in `dtype`, which may be wider than that of a and b. Autocast does not apply."""
    is_direct = dtype == a.dtype or dtype == torch.float32 and has_out_dtype(a.device.type, a.dtype)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype if is_direct else a.dtype)
    if dtype == a.dtype or not is_direct:
        return torch.mm(a, b, out=out).to(dtype)
    return torch.mm(a, b, out_dtype=dtype, out=out)
