"""Statistics and gradients of a softmax over the kept ids of each token (a sampling mask).

    slot_products      x[s] = hidden[row of s] . weight[id of s]
    picked_logits      z[s] = the logit of slot s, from a chunk of logits
    set_statistics     logits of the slots -> log p(target), log-sum-exp, entropy and top-1 flag of each row
    set_gradient       gradients of the statistics -> d loss / d product of each slot
    scatter_gradient   set_gradient, with the result stored in the columns of a chunk's gradient
    slot_rows          d_hidden[n] = sum over the slots of row n of g[s] weight[id of s]
    add_slot_rows      d_weight[v] += sum over the slots with the id v of g[s] hidden[row of s]

The number of ids differs between rows. A slot holds one id of a row, and the slots of row n are
`bounds[n]:bounds[n + 1]` (`distinct.slots_of`). With the target's logit z_y and d = z - z_y:

    m = max(0, max d)     R = sum over s != y of exp(d_s - m)     log p(y) = -log(exp(-m) + R) - m

so that log p(y) and 1 - p(y) of a nearly certain token are accurate. No sum is atomic, and the sums of a row
depend only on its slots. The Triton kernels are in `sets_triton.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.cross_entropy import TokenBuffers
from logitless.kernels.head.transform import LogitTransform

# Bytes of rows of the head that a twin copies at a time.
TWIN_BYTES = 4 * 2**20


class Slots(NamedTuple):
    """The slots of n rows."""

    ids: (
        Tensor  # (S,) int32 ids of the vocabulary, or rows of this rank's head, negative for other ranks' ids
    )
    rows: Tensor  # (S,) int32 the row of each slot; n for unused slots
    bounds: Tensor  # (n + 1,) int64: the slots of row i are bounds[i]:bounds[i + 1]
    own: Tensor  # (n,) int64 slot of the row's target; arbitrary for rows without slots

    def of_rows(self, start: int, stop: int) -> "Slots":
        """Return the slots of rows start:stop. `ids` and `rows` are still those of all rows."""
        return self._replace(bounds=self.bounds[start : stop + 1], own=self.own[start:stop])


def _runs(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels run. Matrices without contiguous rows, such as a transposed head, use the twins."""
    contiguous = all(each.stride(1) == 1 or each.shape[1] == 1 for each in (x, *others))
    return uses_triton(x.device, x.dtype) and contiguous


def _pieces(slots: Slots, H: int, size: int):
    """Yield slices of the slots, so that a twin copies few rows at a time."""
    step = max(1, TWIN_BYTES // (8 * H))
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def slot_products(hidden: Tensor, weight: Tensor, slots: Slots, dtype: torch.dtype) -> Tensor:
    """(S,) products of each slot's row of the head and the hidden state of its row; 0 for negative ids."""
    size = slots.ids.shape[0]
    out = torch.zeros(size, dtype=dtype, device=hidden.device)
    if size and _runs(weight, hidden) and dtype == torch.float32:
        from logitless.kernels.ids import sets_triton

        return sets_triton.slot_products(hidden, weight, slots, out)
    for piece in _pieces(slots, weight.shape[1], size):
        ids, rows = slots.ids[piece], slots.rows[piece]
        there = ids >= 0
        x = hidden[torch.where(there, rows, 0)].to(dtype)
        out[piece] = torch.where(there, (weight[ids.clamp(min=0)].to(dtype) * x).sum(1), 0.0)
    return out


def picked_logits(
    logits: Tensor,  # (C, V)
    slots: Slots,  # of the chunk's rows
    z: Tensor,  # (S,); the entries of these slots are written
    *,
    transform: LogitTransform,
    bias: Tensor | None = None,  # (V,)
) -> None:
    """Write the logits of a chunk's slots to `z`; 0 for negative ids."""
    if uses_triton(logits.device, logits.dtype):
        from logitless.kernels.ids import sets_triton

        sets_triton.picked_logits(logits, slots, z, transform=transform, bias=bias)
        return
    part, rows = _of_chunk(slots)
    ids = slots.ids[part]
    columns = ids.clamp(min=0).long()
    picked, _ = transform.logits(logits[rows, columns], None if bias is None else bias[columns])
    z[part] = torch.where(ids >= 0, picked, 0.0).to(z.dtype)


def _of_chunk(slots: Slots) -> tuple[slice, Tensor]:
    """Return (the slots of these rows; the row of each of these slots, relative to the first row)."""
    first, last = slots.bounds[[0, -1]].tolist()
    lengths = slots.bounds.diff()
    return slice(first, last), torch.repeat_interleave(lengths, output_size=last - first)


def set_statistics(z: Tensor, slots: Slots, out: TokenBuffers) -> None:
    """Write the statistics of rows that have slots to `out`. The entries of other rows are unchanged."""
    if not slots.own.shape[0] or not z.shape[0]:
        return
    if uses_triton(z.device, z.dtype):
        from logitless.kernels.ids import sets_triton

        sets_triton.set_statistics(z, slots, out)
        return
    part, rows = _of_chunk(slots)
    n = slots.own.shape[0]
    filled = slots.bounds.diff() > 0
    z_y = z[slots.own]
    is_own = torch.arange(part.start, part.stop, device=z.device) == slots.own[rows]
    d = torch.where(is_own, 0.0, z[part] - z_y[rows])
    top = z.new_zeros(n).scatter_reduce(0, rows, d, "amax")
    others = _summed(torch.where(is_own, 0.0, (d - top[rows]).exp()), rows, n)
    log_total = torch.where(top > 0, ((-top).exp() + others).log(), others.log1p())
    logps = -(log_total + top)
    lse = z_y - logps
    stats = {"logps": logps, "lse": lse}
    stats["lse_residual"] = torch.where(lse.isfinite(), (z_y - lse) - logps, 0.0)
    if out.entropy is not None:
        log_p = d + logps[rows]
        p = log_p.exp()
        stats["entropy"] = -_summed(torch.where(p > 0, p * log_p, p), rows, n)
        # Among equal logits, the lowest id is the arg-max. The ids of a row are in ascending order.
        before = torch.arange(part.start, part.stop, device=z.device) < slots.own[rows]
        beaten = _summed(((d > 0) | (before & (d == 0))).to(z.dtype), rows, n)
        stats["is_top1"] = (beaten == 0).to(z.dtype)
    for name, buffer in out.items():
        buffer.copy_(torch.where(filled, stats[name].to(buffer.dtype), buffer))


def _summed(x: Tensor, rows: Tensor, n: int) -> Tensor:
    """(n,) sums of x by row. Unlike index_add_, this is deterministic on CUDA."""
    return x.new_zeros(n).index_put_((rows,), x, accumulate=True)


def set_gradient(
    z: Tensor, slots: Slots, stats: TokenBuffers, grads: TokenBuffers, transform: LogitTransform
) -> Tensor:
    """(S,) d loss / d product of each slot."""
    out = torch.zeros_like(z)
    if not z.shape[0]:
        return out
    if uses_triton(z.device, z.dtype):
        from logitless.kernels.ids import sets_triton

        sets_triton.set_gradient(z, slots, stats, grads, transform, out)
        return out
    part, values = _entries(z, slots, stats, grads, transform)
    out[part] = values
    return out


def scatter_gradient(
    gradient: Tensor,  # (C, V); the entries of the slots are written
    z: Tensor,
    slots: Slots,  # of the chunk's rows
    stats: TokenBuffers,  # (C,) each
    grads: TokenBuffers,
    transform: LogitTransform,
) -> None:
    """Store d loss / d product of the slots in the columns of their ids."""
    if not z.shape[0]:
        return
    if uses_triton(z.device, z.dtype):
        from logitless.kernels.ids import sets_triton

        sets_triton.set_gradient(z, slots, stats, grads, transform, gradient)
        return
    part, values = _entries(z, slots, stats, grads, transform)
    _, rows = _of_chunk(slots)
    there = slots.ids[part] >= 0
    gradient[rows[there], slots.ids[part][there].long()] = values[there].to(gradient.dtype)


def _entries(
    z: Tensor, slots: Slots, stats: TokenBuffers, grads: TokenBuffers, transform: LogitTransform
) -> tuple[slice, Tensor]:
    """Return (the slots of these rows, d loss / d product of these slots)."""
    part, rows = _of_chunk(slots)
    is_own = torch.arange(part.start, part.stop, device=z.device) == slots.own[rows]
    logps = stats.logps[rows]
    log_p = torch.where(is_own, logps, (z[part] - z[slots.own][rows]) + logps)
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if grads.logps is not None:
        g = grads.logps[rows]
        gradient += torch.where(is_own, -g * torch.expm1(logps), -g * p)
    if grads.lse is not None:
        gradient += grads.lse[rows] * p
    if grads.entropy is not None:
        gradient -= grads.entropy[rows] * torch.where(p > 0, p * (log_p + stats.entropy[rows]), p)
    return part, gradient * transform.derivative_at(z[part])


def slot_rows(weight: Tensor, slots: Slots, coefficients: Tensor, out: Tensor) -> Tensor:
    """For each row, write the sum over its slots of coefficient * weight[id] to `out` (n, H)."""
    if _runs(weight, out) and coefficients.dtype == torch.float32:
        from logitless.kernels.ids import sets_triton

        return sets_triton.slot_rows(weight, slots, coefficients, out)
    wide = coefficients.dtype
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    for piece in _pieces(slots, weight.shape[1], slots.ids.shape[0]):
        there = slots.ids[piece] >= 0
        share = weight[slots.ids[piece].clamp(min=0)].to(wide)
        share *= torch.where(there, coefficients[piece], 0.0)[:, None]
        total.index_put_((torch.where(there, slots.rows[piece], 0).long(),), share, accumulate=True)
    return out.copy_(total)


def add_slot_rows(
    total: Tensor,  # (V, H): its rows of the ids are added to
    slots: Slots,
    coefficients: Tensor,  # (S,)
    hidden: Tensor,  # (n, H)
    *,
    first: bool,  # whether `total` is uninitialized
) -> None:
    """For every slot with an id of 0 or more, add coefficient * hidden to the row of its id in `total`.

    The order of the sum is the same in every run, and a row's sum is rounded to its dtype once.
    """
    size = slots.ids.shape[0]
    if size and _runs(hidden, total) and total.dtype != torch.float64 and hidden.dtype != torch.float64:
        from logitless.kernels.ids import gathered_triton

        gathered_triton.add_rows(
            total, slots.ids[:, None], coefficients[:, None], hidden, first=first, tokens=slots.rows
        )
        return
    if first:
        total.zero_()
    touched, numbers = slots.ids.clamp(min=0).unique(return_inverse=True)
    wide = torch.promote_types(coefficients.dtype, torch.float32)
    sums = torch.zeros(touched.shape[0], hidden.shape[1], dtype=wide, device=total.device)
    for piece in _pieces(slots, hidden.shape[1], size):
        there = slots.ids[piece] >= 0
        share = hidden[torch.where(there, slots.rows[piece], 0)].to(wide)
        share *= torch.where(there, coefficients[piece], 0.0)[:, None]
        sums.index_put_((numbers[piece],), share, accumulate=True)
    touched = touched.long()
    total[touched] = (total[touched].to(wide) + sums).to(total.dtype)
