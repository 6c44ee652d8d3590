"""Project a chunk and read its logits in one kernel, so that no chunk of logits exists.

    read     hidden, weight -> log p(target), log-sum-exp, entropy and arg-max hit and, if asked for,
             d log p(target) / d logits up to a factor per row: `project` and `logprob_gradient` in one
    write    hidden, weight -> d loss / d logits from the gradients of the per-token numbers: `project` and
             `logits_gradient` in one

The logits are those of the accumulators, in fp32 and never rounded. Whoever reads the same rows twice, with
another grad mode or another number of rows, must see the same logits: hence one rule of device, dtypes and
head says whether the kernels run (`serves`), and what they cannot do beside them is done from logits in fp32.
A GPU generation has kernels of its own, and most have none (`kernels.fused_products`). There is no twin:
elsewhere `project` and the row kernels of `head/cross_entropy.py` do the same, which is what the tests
compare with.
"""

import torch
from torch import Tensor

from logitless.kernels import fused_products, uses_triton
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import Head


def serves(dtype: torch.dtype, H: int, *heads: Tensor | None) -> bool:
    """Whether the kernels multiply (C, H) in `dtype` with these heads, or with their copies in that dtype.

    Rows start at multiples of 16 bytes; of LoRA on a head, H has more columns than the head, and a reference
    model's may have others.
    """
    return H * dtype.itemsize % 16 == 0 and all(
        (products := fused_products(head.device)) is not None
        and dtype in products.DTYPES
        and uses_triton(head.device, dtype)
        and head.shape[-1] * dtype.itemsize % 16 == 0
        and head.is_contiguous()
        and head.storage_offset() * head.itemsize % 16 == 0
        for head in heads
        if head is not None
    )


def row_bytes(device: torch.device, V: int, *, stored: bool) -> int:
    """Memory that a row takes: partial sums, and its gradient where that is stored."""
    return fused_products(device).row_bytes(V, stored=stored)


def new_place(weight: Tensor, rows: int) -> Tensor:
    """Room for a gradient (rows, V) in the dtype of the products; rows start at multiples of 16 bytes."""
    V, step = weight.shape[0], 16 // weight.itemsize
    room = weight.new_empty((rows, -(-V // step) * step))
    return room if room.shape[1] == V else room[:, :V]


def head_sums(weight: Tensor, bias: Tensor | None, head: Head) -> Tensor | None:
    """(H + 1,) fp32: the sum of the head's rows, and that of its bias. A row's sum of logits is hidden times
    it, so no kernel need add up the logits themselves; not with a soft cap: None."""
    if head.softcap is not None:
        return None
    biases = weight.new_zeros(1, dtype=torch.float32) if bias is None else bias.float().sum()[None]
    return torch.cat((weight.sum(0, dtype=torch.float32), biases))


def read(
    hidden: Tensor,  # (C, H)
    weight: Tensor,  # (V, H), in hidden's dtype
    targets: Tensor,  # (C,) int64
    out: TokenBuffers,  # (C,) each, written; sum_logits without weights
    *,
    gradient: Tensor | None,  # (C, V) from `new_place`, written; None: nothing is stored
    head: Head,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    sums: Tensor | None = None,  # from `head_sums`; None: the kernel adds up every logit
) -> Tensor | None:
    """Fill `out` and `gradient`, and return `row_scale` (C,): d logp / d logits = row_scale[:, None] *
    gradient."""
    options = {"gradient": gradient, "head": head, "bias": bias, "ignore_index": ignore_index}
    return fused_products(hidden.device).read(hidden, weight, targets, out, **options, sums=sums)


def write(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: TokenBuffers,
    grads: TokenBuffers,
    *,
    gradient: Tensor,
    head: Head,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,  # (V,) of sum_logits
    ignore_index: int = -100,
) -> None:
    """Fill `gradient` with d loss / d logits; ignored rows get zeros."""
    options = {"gradient": gradient, "head": head, "bias": bias, "ignore_index": ignore_index}
    products = fused_products(hidden.device)
    products.write(hidden, weight, targets, stats, grads, class_weights=class_weights, **options)
