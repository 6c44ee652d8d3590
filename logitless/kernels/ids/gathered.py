"""Products with k rows of the head per token, without a tensor `(N, k, H)` of these rows.

    wrong_slots       mark tokens with an invalid id or log-probability
    first_slots       the row of the head for each slot, without duplicates
    gathered_logits   z[n, j] = hidden[n] . weight[ids[n, j]]
    weighted_rows     d_hidden[n] = sum_j g[n, j] weight[ids[n, j]] (+ factor[n] base[n])
    add_rows          d_weight[v] += sum over the slots (n, j) with the id v of g[n, j] hidden[n]

A negative id is an empty slot; in `wrong_slots` and `first_slots`, -inf marks empty slots. All sums are
computed in promote(dtype, fp32), and in the same order in every run: `add_rows` sorts the slots by id, and
writes each row of d_weight without atomics. The Triton kernels (`gathered_triton.py`) read k rows of the head
per token. The PyTorch twins process one slot of all tokens at a time.
"""

import torch
from torch import Tensor

from logitless.kernels import uses_triton

# Tolerance for log-probabilities above 0: a server may have rounded them.
ROUNDING = 1e-3


def _runs(x: Tensor, ids: Tensor, *others: Tensor) -> bool:
    """Whether the kernels run. Matrices without contiguous rows, such as a transposed head, use the twins."""
    rows = all(each.stride(1) == 1 or each.shape[1] == 1 for each in (x, *others))
    return uses_triton(x.device, x.dtype) and ids.numel() > 0 and rows


def wrong_slots(
    ids: Tensor,  # (n, k) integers
    values: Tensor,  # (n, k) log-probabilities, -inf in empty slots, which may hold any id
    V: int,
) -> Tensor:
    """(2, n) bool: tokens with an id outside [0, V); tokens with a log-probability above 0 or a NaN."""
    if uses_triton(values.device, values.dtype) and ids.numel():
        from logitless.kernels.ids import gathered_triton

        return gathered_triton.wrong_slots(ids, values, V, ROUNDING)
    outside = ((ids < 0) | (ids >= V)) & (values != -torch.inf)
    return torch.stack((outside.any(1), ~(values <= ROUNDING).all(1)))


def first_slots(
    ids: Tensor,  # (n, k) integers
    values: Tensor,  # (n, k), -inf in empty slots
    start: int,
    width: int,
    dtype: torch.dtype,  # dtype of the returned values
) -> tuple[Tensor, Tensor]:
    """Remove duplicate ids: an id keeps its first slot, and its other slots become empty.

    Returns:
        (n, k) int32 rows of a head that has the ids start:start + width, negative for other ids and for empty
        slots; (n, k) values, -inf in empty slots.
    """
    if dtype == torch.float32 and uses_triton(values.device, values.dtype) and ids.numel():
        from logitless.kernels.ids import gathered_triton

        return gathered_triton.first_slots(ids, values, start, width)
    first = values != -torch.inf
    for slot in range(1, ids.shape[1]):
        same = (ids[:, :slot] == ids[:, slot : slot + 1]) & first[:, :slot]
        first[:, slot] &= ~same.any(1)
    rows = ids - start
    rows = torch.where(first & (rows >= 0) & (rows < width), rows, -1)
    return rows.to(torch.int32), torch.where(first, values.to(dtype), -torch.inf)


def gathered_logits(
    hidden: Tensor,  # (n, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (n, k) int32 or int64
    out: Tensor,  # (n, k), written
) -> Tensor:
    """Write the product of each slot's row of the head and the hidden state to `out`; 0 in empty slots."""
    if _runs(weight, ids, hidden):
        from logitless.kernels.ids import gathered_triton

        return gathered_triton.gathered_logits(hidden, weight, ids, out)
    wide = hidden.to(out.dtype)
    for slot in range(ids.shape[1]):
        rows = weight[ids[:, slot].clamp(min=0)].to(out.dtype)
        out[:, slot] = torch.where(ids[:, slot] >= 0, (rows * wide).sum(1), 0.0)
    return out


def weighted_rows(
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (n, k) int32 or int64
    coefficients: Tensor,  # (n, k)
    out: Tensor | None = None,  # (n, H), written
    *,
    base: Tensor | None = None,  # (n, H)
    factor: Tensor | None = None,  # (n,) of the base
) -> Tensor:
    """Return the sum (n, H) over the slots of coefficients * weight[ids], plus factor * base unless `base` is
    None.

    The result is `out`, or a new tensor in the dtype of the coefficients if `out` is None.
    """
    if out is None:
        out = coefficients.new_empty(ids.shape[0], weight.shape[1])
    if _runs(weight, ids):
        from logitless.kernels.ids import gathered_triton

        return gathered_triton.weighted_rows(weight, ids, coefficients, out, base, factor)
    coefficients = torch.where(ids >= 0, coefficients, 0.0)
    total = torch.zeros(out.shape, dtype=coefficients.dtype, device=out.device)
    for slot in range(ids.shape[1]):
        rows = weight[ids[:, slot].clamp(min=0)].to(total.dtype)
        total.addcmul_(rows, coefficients[:, slot, None])
    if base is not None:
        total.addcmul_(base.to(total.dtype), factor[:, None])
    return out.copy_(total)


def add_rows(
    total: Tensor,  # (V, H): its rows of the ids are added to
    ids: Tensor,  # (n, k) int32 or int64
    coefficients: Tensor,  # (n, k)
    hidden: Tensor,  # (n, H)
    *,
    first: bool,  # whether `total` is uninitialized
) -> None:
    """For every slot, add coefficient * hidden to the row of its id in `total`."""
    if _runs(hidden, ids, total) and total.dtype != torch.float64:
        from logitless.kernels.ids import gathered_triton

        gathered_triton.add_rows(total, ids, coefficients, hidden, first=first)
        return
    if first:
        total.zero_()
    touched, numbers = ids.clamp(min=0).unique(return_inverse=True)
    sums = coefficients.new_zeros(touched.shape[0], hidden.shape[1])
    wide = hidden.to(sums.dtype)
    for slot in range(ids.shape[1]):
        # Deterministic on CUDA, unlike index_add_.
        share = torch.where(ids[:, slot, None] >= 0, wide * coefficients[:, slot, None], 0.0)
        sums.index_put_((numbers[:, slot],), share, accumulate=True)
    total[touched] = (total[touched].to(sums.dtype) + sums).to(total.dtype)
