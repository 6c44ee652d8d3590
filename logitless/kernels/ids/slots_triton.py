"""Triton kernels of `slots.py`. One program computes one row, and holds all k slots of the row.

To find slots with the same id, a program compares all slots of the row with PIECE slots at a time. This needs
no sort and few registers. The kernels access only k logits of a row, so they take little more time than their
launch.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import complement, head_logits, log1p, vocabulary_arguments
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, check_written, dense

PIECE = tl.constexpr(16)
# Number of slots of the smallest kernel. Smaller kernels would be additional variants without being faster.
FEWEST, WARPS = 16, 4


@triton.jit
def slots_of(ids_ptr, row, k, start, K: tl.constexpr):
    """Return K slots of a row, and their ids; -1 after the last slot."""
    slot = start + tl.arange(0, K)
    # A vocabulary has fewer than 2^31 ids; every negative number is an empty slot.
    ids = tl.load(ids_ptr + row * k + slot, mask=slot < k, other=-1)
    return slot, tl.where(ids < 0, -1, ids).to(tl.int32)


@triton.jit
def distinct(ids_ptr, x_ptr, row, k, slot, ids, K: tl.constexpr, SUM: tl.constexpr):
    """Return whether each slot is the first slot with its id.

    With SUM, also return the sum of x over all slots with the same id, which is bitwise equal in these slots.
    x in an empty slot, which may be NaN, does not affect other slots.
    """
    repeated = tl.zeros([K], tl.int32)
    total = tl.zeros([K], tl.float32)
    for start in range(0, k, PIECE):
        other, its_id = slots_of(ids_ptr, row, k, start, PIECE)
        same = ids[:, None] == its_id[None, :]
        repeated += tl.sum((same & (other[None, :] < slot[:, None])).to(tl.int32), 1)
        if SUM:
            x = tl.load(x_ptr + row * k + other, mask=its_id >= 0, other=0.0)
            total += tl.sum(tl.where(same, x[None, :], 0.0), 1)
    return (ids >= 0) & (repeated == 0), total


@triton.jit
def finite(x):
    return tl.abs(x) < float("inf")  # False for NaN


@cached_launch
@triton.jit(**OF_CHUNKS)
def pop_logits_kernel(
    logits_ptr,
    ids_ptr,
    bias_ptr,
    z_ptr,
    logits_stride,
    V,
    k,
    taken,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, ids = slots_of(ids_ptr, row, k, 0, K)
    there = (ids >= 0) & (ids < V)
    place = logits_ptr + row * logits_stride + ids
    x = tl.load(place, mask=there, other=0.0)
    z, _ = head_logits(x, bias_ptr, ids, there, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
    tl.store(z_ptr + row * k + slot, tl.where(there, z, -float("inf")), mask=slot < k)
    # All slots with an id must have read its logit before a thread overwrites it.
    tl.debug_barrier()
    tl.store(place, tl.full([K], taken, tl.float32).to(logits_ptr.dtype.element_ty), mask=there)


@cached_launch
@triton.jit(**OF_CHUNKS)
def slot_statistics_kernel(
    z_ptr,
    ids_ptr,
    bias_ptr,
    targets_ptr,
    read_lse_ptr,
    read_residual_ptr,
    read_entropy_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    rest_ptr,
    entropy_ptr,
    V,
    k,
    ignore_index,
    taken,
    gain,
    squash,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXTRA: tl.constexpr,
    K: tl.constexpr,
):
    """`read_*`: statistics of the chunk in which `taken` replaces the products of the ids."""
    row = tl.program_id(0).to(tl.int64)
    slot, ids = slots_of(ids_ptr, row, k, 0, K)
    if tl.load(targets_ptr + row) == ignore_index:
        tl.store(logps_ptr + row * k + slot, tl.zeros([K], tl.float32), mask=slot < k)
        tl.store(lse_ptr + row, 0.0)
        tl.store(lse_residual_ptr + row, 0.0)
        tl.store(rest_ptr + row, 0.0)
        if EXTRA:
            tl.store(entropy_ptr + row, 0.0)
        return

    z = tl.load(z_ptr + row * k + slot, mask=slot < k, other=-float("inf"))
    first, _ = distinct(ids_ptr, z_ptr, row, k, slot, ids, K, False)
    own = tl.where(first, z, -float("inf"))

    # `read_lse` includes the entries that `pop_logits` overwrote with `taken`. Their probability is 0 without
    # a softcap but not with one, which bounds them at -cap. Subtract it to get the log-sum-exp of the other
    # ids.
    read_lse = tl.load(read_lse_ptr + row)
    inside = first & (ids < V)
    x = tl.full([K], taken, tl.float32)
    out, _ = head_logits(x, bias_ptr, ids, inside, gain, squash, cap, HAS_BIAS, HAS_SOFTCAP)
    out -= read_lse
    share = tl.where(inside, tl.exp(out), 0.0)
    left = 1.0 - tl.sum(share, 0)
    none = (left <= 0.0) | (tl.sum(inside.to(tl.int32), 0) == V)  # a NaN is not nothing
    left = tl.where(none, 1.0, left)
    log_left = tl.log(left)
    others_lse = tl.where(none, -float("inf"), read_lse + log_left)
    residual = tl.load(read_residual_ptr + row)
    residual = tl.where(finite(others_lse) & finite(residual), residual, 0.0)

    # The sum of all parts except the largest, of which only the rounding error is added.
    top_own = tl.max(own, 0)
    top = tl.maximum(top_own, others_lse)
    top = tl.where(top == -float("inf"), 0.0, top)
    largest = tl.min(tl.where(own == top_own, slot, K), 0)
    rest_is_top = others_lse >= top_own
    e = tl.where((slot == largest) & (rest_is_top == 0), 0.0, tl.exp(own - top))
    e_rest = tl.where(rest_is_top, -complement(residual), tl.exp((others_lse - top) + residual))
    log_total = log1p(tl.sum(e, 0) + e_rest)
    lse = top + log_total
    rest = ((others_lse - top) + residual) - log_total
    tl.store(logps_ptr + row * k + slot, (z - top) - log_total, mask=slot < k)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_residual_ptr + row, tl.where(finite(lse), (top - lse) + log_total, 0.0))
    tl.store(rest_ptr + row, rest)
    if EXTRA:
        gone = tl.sum(tl.where(share > 0.0, share * out, 0.0), 0)
        of_others = (tl.load(read_entropy_ptr + row) + gone) / left + log_left
        P = tl.exp(rest)
        log_p = (own - top) - log_total
        surprise = tl.where(log_p > -float("inf"), tl.exp(log_p) * log_p, 0.0)
        tl.store(entropy_ptr + row, tl.where(P == 0.0, 0.0, P * (of_others - rest)) - tl.sum(surprise, 0))


@cached_launch
@triton.jit(**OF_CHUNKS)
def sparse_grad_kernel(
    ids_ptr,
    targets_ptr,
    logps_ptr,
    lse_ptr,
    rest_ptr,
    entropy_ptr,
    g_logps_ptr,
    g_lse_ptr,
    g_rest_ptr,
    g_entropy_ptr,
    columns_ptr,
    entries_ptr,
    factor_ptr,
    k,
    ignore_index,
    least,
    gain,
    cap,
    LOGPS: tl.constexpr,
    LSE: tl.constexpr,
    REST: tl.constexpr,
    EXTRA: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, ids = slots_of(ids_ptr, row, k, 0, K)
    supervised = tl.load(targets_ptr + row) != ignore_index
    there = (ids >= 0) & supervised
    logps = tl.load(logps_ptr + row * k + slot, mask=slot < k, other=0.0)
    p = tl.exp(logps)
    # The gradient of an empty slot, whose log-probability is -inf, may be NaN.
    first, g = distinct(ids_ptr, g_logps_ptr, row, k, slot, ids, K, LOGPS)
    total = tl.sum(tl.where(first, g, 0.0), 0)
    d_z = g * complement(logps) - (total - g) * p
    factor = -total
    if LSE:
        g_lse = tl.load(g_lse_ptr + row)
        d_z += g_lse * p
        factor += g_lse
    if REST:
        g_rest = tl.load(g_rest_ptr + row)
        rest = tl.load(rest_ptr + row)
        d_z -= g_rest * p
        factor += g_rest * complement(rest) * tl.exp(-tl.maximum(rest, least))
    if EXTRA:
        entropy = tl.load(entropy_ptr + row)
        d_z -= tl.load(g_entropy_ptr + row) * tl.where(p > 0.0, p * (logps + entropy), 0.0)
    slope = gain
    if HAS_SOFTCAP:
        # `LogitTransform.derivative_at` the logit.
        squashed = (logps + tl.load(lse_ptr + row)) / cap
        slope = gain * (1.0 - squashed * squashed)
    last = row * k + slot
    tl.store(columns_ptr + last, tl.where(first & supervised, ids, -1).to(tl.int64), mask=slot < k)
    tl.store(entries_ptr + last, tl.where(there, d_z * slope, 0.0), mask=slot < k)
    tl.store(factor_ptr + row, tl.where(supervised, factor, 0.0))


@cached_launch
@triton.jit(**OF_CHUNKS)
def scatter_kernel(
    grad_ptr,
    ids_ptr,
    values_ptr,
    grad_stride,
    V,
    k,
    value,
    SAME: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot, ids = slots_of(ids_ptr, row, k, 0, K)
    there = (ids >= 0) & (ids < V)
    if SAME:
        values = tl.full([K], value, tl.float32)
    else:
        values = tl.load(values_ptr + row * k + slot, mask=there, other=0.0)
    place = grad_ptr + row * grad_stride + ids
    tl.store(place, values.to(grad_ptr.dtype.element_ty), mask=there)


def sizes(k: int) -> dict[str, int]:
    """The constexprs and launch options of a kernel for k slots."""
    K = max(FEWEST, triton.next_power_of_2(k))
    return {"K": K, "num_warps": WARPS if K < 128 else 2 * WARPS}


def _transform(transform, bias: Tensor | None, unused: Tensor):
    """Return the head transform as kernel arguments: pointer, scalars and constexprs."""
    (bias, _), scalars, flags = vocabulary_arguments(transform, bias, None, unused)
    return bias, scalars, {name: flags[name] for name in ("HAS_BIAS", "HAS_SOFTCAP")}


def pop_logits(logits: Tensor, ids: Tensor, taken: float, *, transform, bias: Tensor | None) -> Tensor:
    check_rows(logits=logits)
    n, k = ids.shape
    z = torch.empty((n, k), dtype=torch.float32, device=logits.device)
    bias, scalars, flags = _transform(transform, bias, z)
    operands = logits, dense(ids), bias, z, logits.stride(0), logits.shape[1], k, taken, *scalars
    pop_logits_kernel[(n,)](*operands, **flags, **sizes(k))
    return z


def statistics(
    z: Tensor,
    ids: Tensor,
    stats,
    out: Mapping[str, Tensor],
    taken: float,
    V: int,
    *,
    transform,
    bias,
    targets,
    ignore_index,
) -> None:
    check_written(**out)
    n, k = ids.shape
    bias, scalars, flags = _transform(transform, bias, z)
    extra = "entropy" in out
    slot_statistics_kernel[(n,)](
        dense(z),
        dense(ids),
        bias,
        dense(targets),
        dense(stats.lse),
        dense(stats.lse_residual),
        dense(stats.entropy) if extra else z,
        # The kernel also writes results that are not requested, to scratch tensors.
        out["logps"],
        *(out[name] if name in out else z.new_empty(n) for name in ("lse", "lse_residual", "rest")),
        out["entropy"] if extra else z,
        V,
        k,
        ignore_index,
        taken,
        *scalars,
        **flags,
        EXTRA=extra,
        **sizes(k),
    )


def sparse_grad(
    stats: Mapping[str, Tensor], upstream, *, transform, targets, ignore_index, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    ids, logps = dense(stats["ids"]), dense(stats["logps"])
    n, k = ids.shape
    columns, entries = torch.empty_like(ids), torch.empty_like(logps)
    factor = logps.new_empty(n)
    _, (gain, _, cap), flags = _transform(transform, None, logps)
    used = {"rest": upstream.rest is not None, "entropy": upstream.entropy is not None}
    sparse_grad_kernel[(n,)](
        ids,
        dense(targets),
        logps,
        dense(stats["lse"]),
        *(dense(stats[name]) if wanted else logps for name, wanted in used.items()),
        *(logps if g is None else dense(g, torch.float32) for g in upstream),
        columns,
        entries,
        factor,
        k,
        ignore_index,
        least,
        gain,
        cap,
        LOGPS=upstream.logps is not None,
        LSE=upstream.lse is not None,
        REST=used["rest"],
        EXTRA=used["entropy"],
        HAS_SOFTCAP=flags["HAS_SOFTCAP"],
        **sizes(k),
    )
    return columns, entries, factor


def scatter(matrix: Tensor, columns: Tensor, values: Tensor | float) -> None:
    check_rows(matrix=matrix)
    n, k = columns.shape
    same = not isinstance(values, Tensor)
    value, values = (values, matrix.new_empty(1, dtype=torch.float32)) if same else (0.0, values)
    operands = matrix, dense(columns), dense(values, torch.float32), matrix.stride(0), matrix.shape[1]
    scatter_kernel[(n,)](*operands, k, value, SAME=same, **sizes(k))
