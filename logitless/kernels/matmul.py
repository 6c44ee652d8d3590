"""The three products of a chunk, each written to its destination and rounded once.

    logits    = hidden @ weight.T     [C, V]
    d_hidden  = d_logits @ weight     [C, H], summed in fp32
    d_weight += d_logits.T @ hidden   [V, H], accumulated in place

On CUDA, `out_dtype` makes cuBLAS read half precision and write fp32. Other devices upcast one piece of the
vocabulary at a time to fp32, so that there is no upcast copy of a whole chunk or head.
"""

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from logitless.kernels import plans_elsewhere


@functools.cache
def has_out_dtype(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the device multiplies `dtype` matrices with fp32 results, determined by a small product."""
    with unset_fake_temporarily():  # a product of fake tensors succeeds on every device
        try:
            probe = torch.ones(16, 16, device=device_type, dtype=dtype)
            wide = torch.ones(16, 16, device=device_type, dtype=torch.float32)
            torch.mm(probe, probe, out_dtype=torch.float32)
            torch.addmm(wide, probe, probe, out_dtype=torch.float32, out=wide)
        except (RuntimeError, NotImplementedError, TypeError, AssertionError):  # the last: no such device
            return False
    return True


def _piece(V: int) -> int:
    return max(256, V // 32)


def _vocabulary_pieces(V: int):
    step = _piece(V)
    return (slice(start, min(start + step, V)) for start in range(0, V, step))


def piece_bytes(device: torch.device, dtype: torch.dtype, logits_dtype: torch.dtype, V: int, H: int) -> int:
    """Bytes of the upcast piece of the head; 0 if the products do not upcast."""
    wide = torch.promote_types(logits_dtype, torch.float32)
    if dtype == wide:
        return 0
    # All GPUs that can be planned for from another machine support products with fp32 results.
    if wide == torch.float32 and (plans_elsewhere() or has_out_dtype(device.type, dtype)):
        return 0
    return min(V, _piece(V)) * H * wide.itemsize


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """`out[C, V] = hidden @ weight.T`, in the dtype of `out`: that of the operands or a wider dtype."""
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, weight.t(), out=out)
    if out.dtype == torch.float32 and has_out_dtype(hidden.device.type, hidden.dtype):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
    wide = hidden.to(out.dtype)
    for piece in _vocabulary_pieces(weight.shape[0]):
        # With `out`, autocast does not apply to the product. It would round the result.
        torch.mm(wide, weight[piece].to(out.dtype).t(), out=out[:, piece])
    return out


def hidden_gradient(d_logits: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """`out[C, H] = d_logits @ weight`, summed in at least fp32, in the dtype of `out`, which may be wider."""
    device = d_logits.device.type
    dtype = d_logits.dtype
    if out.dtype == dtype and (device != "cpu" or dtype == torch.promote_types(dtype, torch.float32)):
        return torch.mm(d_logits, weight, out=out)
    if out.dtype == torch.float32 != dtype and has_out_dtype(device, dtype):
        return torch.mm(d_logits, weight, out_dtype=torch.float32, out=out)
    # CPUs may sum the long rows of half-precision products in half precision.
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for piece in _vocabulary_pieces(weight.shape[0]):
        total.addmm_(d_logits[:, piece].float(), weight[piece].float())
    return out.copy_(total)


def accumulate(total: Tensor, d_logits: Tensor, hidden: Tensor, *, first: bool) -> None:
    """`total[V, H] (+)= d_logits.T @ hidden`; see `add_product`."""
    add_product(total, d_logits.t(), hidden, first=first)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """`total (+)= a @ b`, without a temporary of the size of `total`, whose dtype may be wider.

    The first product overwrites `total`, and later ones add to it.
    """
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif total.dtype == torch.float32 and has_out_dtype(total.device.type, b.dtype):
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        wide = b.to(total.dtype)
        for piece in _vocabulary_pieces(total.shape[0]):
            total[piece].addmm_(a[piece].to(total.dtype), wide, beta=0 if first else 1)
