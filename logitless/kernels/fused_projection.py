"""Project a chunk and compute its statistics in one kernel, without materializing the logits.

    read     hidden, weight -> log p(target), log-sum-exp, entropy, top-1 flag and, if requested,
             d log p(target) / d logits up to a factor per row: `project` and `logprob_gradient` in one kernel
    write    hidden, weight -> d loss / d logits from the gradients of the per-token statistics: `project` and
             `logits_gradient` in one kernel

The logits are the fp32 accumulators of the product, and are never rounded. Two passes over the same rows must
use the same logits, even if the grad mode or the number of rows differs. Therefore only device, dtypes and
head (`serves`) and the loss (`Reader.takes_fp32_logits`) decide whether a call uses them. These kernels
cannot evaluate the loss between the statistics and the gradient of a chunk, compute weighted sums of logits,
or return predictions (`readers.tokens.can_fuse_epilogue`). In these cases, a pass writes the logits of the
chunk to memory in fp32. Each GPU generation needs separate kernels, and most have none
(`kernels.fused_products`). There is no PyTorch twin: on other devices, `project` and the row kernels of
`head/cross_entropy.py` compute the same results, with which the tests compare.
"""

import torch
from torch import Tensor

from logitless.kernels import fused_products, plans_elsewhere, uses_triton
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import LogitTransform

# Number of rows of a call from which the sum of the head's rows takes less time than the sums of the logits
# in the product's kernel. On an H100 with V 151,936 the former takes 0.25 ms, and the latter 0.01 ms with 512
# rows, 0.2 with 4,096 and 0.5 with 8,192.
HEAD_SUM_ROWS = 6144


def serves(dtype: torch.dtype, H: int, *heads: Tensor | None) -> bool:
    """Whether the kernels support hidden states (C, H) in `dtype` and these heads.

    The caller converts a head of another dtype to `dtype` before the product. Every row must start at a
    multiple of 16 bytes. H and the number of columns of a head may differ: with LoRA on the head, H includes
    the columns of the adapter, and a reference model may have another hidden size.
    """
    return H * dtype.itemsize % 16 == 0 and all(
        (products := fused_products(head.device)) is not None
        and dtype in products.DTYPES
        and uses_triton(head.device, dtype)
        and head.shape[-1] * dtype.itemsize % 16 == 0
        and head.is_contiguous()
        and (plans_elsewhere() or head.data_ptr() % 16 == 0)
        for head in heads
        if head is not None
    )


def row_bytes(device: torch.device, V: int, *, stored: bool) -> int:
    """Bytes per row: its partial sums and, if `stored`, its gradient."""
    return fused_products(device).row_bytes(V, stored=stored)


def new_gradient_buffer(weight: Tensor, rows: int) -> Tensor:
    """Allocate a gradient (rows, V) in the dtype of the products. Its rows start at multiples of 16 bytes."""
    V = weight.shape[0]
    step = 16 // weight.itemsize
    room = weight.new_empty((rows, -(-V // step) * step))
    return room if room.shape[1] == V else room[:, :V]


def head_sums(weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor | None:
    """(H + 1,) fp32: the sum of the head's rows, followed by the sum of its bias; None with a softcap.

    The sum of the logits of a row is the product of its hidden state with this vector, so that no kernel
    needs to sum the logits.
    """
    if transform.softcap is not None:
        return None
    biases = weight.new_zeros(1, dtype=torch.float32) if bias is None else bias.float().sum()[None]
    return torch.cat((weight.sum(0, dtype=torch.float32), biases))


def read(
    hidden: Tensor,  # (C, H)
    weight: Tensor,  # (V, H), in hidden's dtype
    targets: Tensor,  # (C,) int64
    out: TokenBuffers,  # (C,) each, written; sum_logits is unweighted
    *,
    gradient: Tensor | None,  # (C, V) from `new_gradient_buffer`, written; None: no gradient is stored
    transform: LogitTransform,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    sums: Tensor | None = None,  # from `head_sums`; None: the kernel sums the logits
) -> Tensor | None:
    """Compute the logits `hidden @ weight.T` tile by tile, and write their statistics to `out`.

    The statistics of ignored rows are 0. A target of V or more belongs to another shard: its row gets -inf as
    logps and the row's largest logit as is_top1, as in `cross_entropy.token_statistics`. With `gradient`,
    also write an unscaled gradient to it.

    Returns:
        row_scale (C,), with d logp / d logits = row_scale[:, None] * gradient; None if `gradient` is None.
    """
    options = {"gradient": gradient, "transform": transform, "bias": bias, "ignore_index": ignore_index}
    return fused_products(hidden.device).read(hidden, weight, targets, out, **options, sums=sums)


def write(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: TokenBuffers,
    grads: TokenBuffers,
    *,
    gradient: Tensor,
    transform: LogitTransform,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,  # (V,) of sum_logits
    ignore_index: int = -100,
) -> None:
    """Recompute the logits tile by tile, and write d loss / d logits to `gradient`; zeros in ignored rows."""
    options = {"gradient": gradient, "transform": transform, "bias": bias, "ignore_index": ignore_index}
    products = fused_products(hidden.device)
    products.write(hidden, weight, targets, stats, grads, class_weights=class_weights, **options)
