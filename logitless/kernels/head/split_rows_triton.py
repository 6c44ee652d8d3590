"""Triton kernel that reads logits (C, V) from memory once, and writes the statistics and the gradient of a
loss.

Each row is split into parts, one program each. A program reads its part for the maximum and the sum of
exponentials, publishes them, waits until all parts of the row are published, and reads its part again, from
the L2 cache, to write the gradient. The parts of all programs that run at a time fit into the cache.

The programs of a row wait for each other, and do not deadlock in any order in which the GPU starts them. Each
program takes the next number when it starts, and the numbers are those of rows and parts in order. As long as
the programs of the first unfinished row have not all started, fewer programs than parts are running, because
the programs of earlier rows are finished. A GPU with as many multiprocessors as a row has parts then has room
for the next program. `runs_on` requires twice as many, for another such launch on another stream.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import (
    DRIFT,
    head_logits,
    statistics_of_row,
    vocabulary_arguments,
)
from logitless.kernels.head.exponentials_triton import exp
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, check_written, dense

# Columns that are read at a time; such blocks of a part; blocks that are read ahead; warps of a program.
BLOCK, BLOCKS, STAGES, WARPS = 2048, 5, 4, 4


@triton.jit
def add_block(
    x,
    start,
    end,
    y,
    shift,
    rest,
    largest,
    weighted,
    logits_ptr,
    class_weights_ptr,
    gain,
    squash,
    cap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    SUM: tl.constexpr,
    MASKED: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a block to the sums per lane: exp(z - shift) without the target, the maximum, weighted logits."""
    cols = start + tl.arange(0, BLOCK)
    z, slope = head_logits(x, logits_ptr, cols, cols < end, gain, squash, cap, False, HAS_SOFTCAP)
    if MASKED:
        z = tl.where(cols < end, z, -float("inf"))
    # Sums of the columns that a thread reads at a time, so that a sum takes few registers.
    largest = tl.maximum(largest, tl.max(tl.reshape(z, [BLOCK // VECTOR, VECTOR]), 1))
    # Without the target, so that 1 - p of a confident token does not cancel.
    e = exp(z - shift)
    if (y >= start) & (y < start + BLOCK):
        e = tl.where(cols == y, 0.0, e)
    rest += tl.sum(tl.reshape(e, [BLOCK // VECTOR, VECTOR]), 1)
    if SUM:
        if HAS_WEIGHTS:
            z *= tl.load(class_weights_ptr + cols, mask=cols < end, other=0.0)
        if MASKED:
            z = tl.where(cols < end, z, 0.0)
        weighted += tl.sum(tl.reshape(z, [BLOCK // VECTOR, VECTOR]), 1)
    return rest, largest, weighted


@triton.jit
def write_block(
    x,
    start,
    end,
    top,
    scale,
    g_sum,
    grad_ptr,
    logits_ptr,
    class_weights_ptr,
    gain,
    squash,
    cap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    SUM: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of a block, except at the target."""
    cols = start + tl.arange(0, BLOCK)
    z, slope = head_logits(x, logits_ptr, cols, cols < end, gain, squash, cap, False, HAS_SOFTCAP)
    g = exp(z - top) * (scale * slope)
    if SUM:
        if HAS_WEIGHTS:
            g += (g_sum * slope) * tl.load(class_weights_ptr + cols, mask=cols < end, other=0.0)
        else:
            g += g_sum * slope
    g = g.to(grad_ptr.dtype.element_ty)
    if MASKED:
        tl.store(grad_ptr + cols, g, mask=cols < end, eviction_policy="evict_first")
    else:
        tl.store(grad_ptr + cols, g, eviction_policy="evict_first")


@cached_launch
@triton.jit(**OF_CHUNKS)
def split_rows_kernel(
    logits_ptr,
    grad_ptr,
    targets_ptr,
    class_weights_ptr,
    logps_ptr,
    lse_ptr,
    lse_residual_ptr,
    sum_logits_ptr,
    g_logp_ptr,
    g_lse_ptr,
    g_sum_ptr,
    partials_ptr,
    arrivals_ptr,
    logits_stride,
    grad_stride,
    V,
    ignore_index,
    gain,
    squash,
    cap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    SUM: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    LENGTH: tl.constexpr,
    PUBLISH: tl.constexpr,
    FINISH: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`arrivals`: zeros, the number of programs that have started, and of the published parts of each row.
    `partials`: (rows, 3, PARTS): the shift of the exponentials, at most DRIFT below the largest logit; their
    sum, without the target; the weighted sum of logits.

    One of PUBLISH and FINISH is False in Triton's interpreter, which runs a program after another: it takes
    two launches.
    """
    ticket = tl.atomic_add(arrivals_ptr, 1, sem="relaxed")
    row = (ticket // PARTS).to(tl.int64)
    part = ticket % PARTS
    logits_ptr += row * logits_stride
    grad_ptr += row * grad_stride
    partials_ptr += row * 3 * PARTS
    begin = part * LENGTH
    end = tl.minimum(begin + LENGTH, V)
    full = begin + (end - begin) // BLOCK * BLOCK
    lane = tl.arange(0, BLOCK)
    # Issued before the target arrives, although the logits of an ignored row are not needed.
    first = tl.load(logits_ptr + begin + lane, mask=begin + lane < end, other=0.0)
    y = tl.load(targets_ptr + row)
    if y == ignore_index:
        if FINISH:
            for start in range(begin, end, BLOCK):
                cols = start + lane
                tl.store(grad_ptr + cols, tl.zeros([BLOCK], grad_ptr.dtype.element_ty), mask=cols < end)
            if part == 0:
                tl.store(logps_ptr + row, 0.0)
                tl.store(lse_ptr + row, 0.0)
                tl.store(lse_residual_ptr + row, 0.0)
                if SUM:
                    tl.store(sum_logits_ptr + row, 0.0)
        return

    has_target = (y >= 0) & (y < V)
    x_y = tl.load(logits_ptr + y, mask=has_target, other=0.0)
    z_y, slope_y = head_logits(x_y, logits_ptr, y, has_target, gain, squash, cap, False, HAS_SOFTCAP)
    z_y = tl.where(has_target, z_y, -float("inf"))
    g_logp = tl.load(g_logp_ptr + row)
    g_lse = tl.load(g_lse_ptr + row)
    g_sum = tl.load(g_sum_ptr + row) if SUM else 0.0
    if PUBLISH:
        z, slope = head_logits(first, logits_ptr, lane, lane < V, gain, squash, cap, False, HAS_SOFTCAP)
        shift = tl.maximum(tl.max(tl.where(begin + lane < end, z, -float("inf")), 0), -1e30)
        rest = tl.zeros([BLOCK // VECTOR], tl.float32)
        weighted = tl.zeros([BLOCK // VECTOR], tl.float32)
        repeats = 1
        # Once, unless a logit is above the largest one of the first block by more than DRIFT.
        while repeats > 0:
            rest = tl.zeros([BLOCK // VECTOR], tl.float32)
            largest = tl.full([BLOCK // VECTOR], -1e30, tl.float32)
            weighted = tl.zeros([BLOCK // VECTOR], tl.float32)
            upcoming = first
            for start in tl.range(begin, full, BLOCK, num_stages=STAGES):
                if STAGES > 1:
                    # Blocks are on their way to shared memory; in registers there is room for one alone.
                    x = tl.load(logits_ptr + start + lane)
                else:
                    x = upcoming
                    # Prefetch the next block, as in `row_kernel`; after the last one the same again, without
                    # a mask, which would take as many instructions as the maximum.
                    after = tl.multiple_of(tl.minimum(start + BLOCK, full - BLOCK), BLOCK)
                    upcoming = tl.load(logits_ptr + after + lane)
                rest, largest, weighted = add_block(
                    x,
                    start,
                    end,
                    y,
                    shift,
                    rest,
                    largest,
                    weighted,
                    logits_ptr,
                    class_weights_ptr,
                    gain,
                    squash,
                    cap,
                    HAS_SOFTCAP,
                    HAS_WEIGHTS,
                    SUM,
                    False,
                    VECTOR,
                    BLOCK,
                )
            if full < end:
                last = tl.load(logits_ptr + full + lane, mask=full + lane < end, other=0.0)
                rest, largest, weighted = add_block(
                    last,
                    full,
                    end,
                    y,
                    shift,
                    rest,
                    largest,
                    weighted,
                    logits_ptr,
                    class_weights_ptr,
                    gain,
                    squash,
                    cap,
                    HAS_SOFTCAP,
                    HAS_WEIGHTS,
                    SUM,
                    True,
                    VECTOR,
                    BLOCK,
                )
            most = tl.max(largest, 0)
            repeats = 0
            if most > shift + DRIFT:
                shift = most
                repeats = 1
                first = tl.load(logits_ptr + begin + lane, mask=begin + lane < end, other=0.0)
        tl.store(partials_ptr + part, shift)
        tl.store(partials_ptr + PARTS + part, tl.sum(rest, 0))
        if SUM:
            tl.store(partials_ptr + 2 * PARTS + part, tl.sum(weighted, 0))
    if PUBLISH and FINISH:
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + 1 + row, 1, sem="acq_rel") + 1
    if FINISH:
        upcoming = tl.load(logits_ptr + begin + lane, mask=begin + lane < end, other=0.0)
    if PUBLISH and FINISH:
        while arrived < PARTS:
            arrived = tl.atomic_add(arrivals_ptr + 1 + row, 0, sem="acquire")
    if FINISH:
        # Loads that bypass the L1 cache, which is not coherent.
        k = tl.arange(0, PADDED)
        shifts = tl.load(partials_ptr + k, mask=k < PARTS, other=-1e30, cache_modifier=".cg")
        sums = tl.load(partials_ptr + PARTS + k, mask=k < PARTS, other=0.0, cache_modifier=".cg")
        # The shift of a part may be below its largest logit, and that of a part of -inf is -1e30.
        top = tl.maximum(tl.max(shifts, 0), z_y)
        others = tl.sum(sums * tl.exp(shifts - top), 0)
        total, log_total, logp, lse, residual, entropy = statistics_of_row(others, 0.0, z_y - top, top)
        if part == 0:
            tl.store(logps_ptr + row, logp)
            tl.store(lse_ptr + row, lse)
            tl.store(lse_residual_ptr + row, residual)
            if SUM:
                parts = tl.load(partials_ptr + 2 * PARTS + k, mask=k < PARTS, other=0.0, cache_modifier=".cg")
                tl.store(sum_logits_ptr + row, tl.sum(parts, 0))
        scale = (g_lse - g_logp) / total
        for start in range(begin, full, BLOCK):
            x = upcoming
            after = start + BLOCK + lane
            upcoming = tl.load(logits_ptr + after, mask=after < end, other=0.0, eviction_policy="evict_first")
            write_block(
                x,
                start,
                end,
                top,
                scale,
                g_sum,
                grad_ptr,
                logits_ptr,
                class_weights_ptr,
                gain,
                squash,
                cap,
                HAS_SOFTCAP,
                HAS_WEIGHTS,
                SUM,
                False,
                BLOCK,
            )
        if full < end:
            last = tl.load(logits_ptr + full + lane, mask=full + lane < end, other=0.0)
            write_block(
                last,
                full,
                end,
                top,
                scale,
                g_sum,
                grad_ptr,
                logits_ptr,
                class_weights_ptr,
                gain,
                squash,
                cap,
                HAS_SOFTCAP,
                HAS_WEIGHTS,
                SUM,
                True,
                BLOCK,
            )
        if (y >= begin) & (y < end):
            g_y = (g_lse * tl.exp(z_y - top) + g_logp * others) / total
            if SUM:
                if HAS_WEIGHTS:
                    g_y += g_sum * tl.load(class_weights_ptr + y)
                else:
                    g_y += g_sum
            tl.debug_barrier()  # after the stores of the loop
            tl.store(grad_ptr + y, (g_y * slope_y).to(grad_ptr.dtype.element_ty))


def runs_on(device: torch.device, V: int) -> bool:
    """Whether the device has two multiprocessors for each part of a row; not tried on other vendors' GPUs."""
    if device.type == "cpu":
        return True  # in Triton's interpreter
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    parts = triton.cdiv(V, BLOCKS * BLOCK)
    return 2 * parts <= torch.cuda.get_device_properties(device).multi_processor_count


def statistics_and_gradient(
    logits: Tensor, targets: Tensor, out, grads, *, gradient, class_weights, transform, ignore_index
) -> None:
    check_rows(logits=logits, gradient=gradient)
    check_written(**dict(out.items()))
    N, V = logits.shape
    block = min(BLOCK, triton.next_power_of_2(V))
    length = min(BLOCKS, triton.cdiv(V, block)) * block
    parts = triton.cdiv(V, length)
    has_sum = grads.sum_logits is not None
    g_lse = torch.zeros_like(out.lse) if grads.lse is None else dense(grads.lse)
    weights = class_weights if has_sum else None
    (_, weights), scalars, flags = vocabulary_arguments(transform, None, weights, out.lse)
    partials = torch.empty(N, 3, parts, dtype=torch.float32, device=logits.device)
    # Only aligned rows are copied to shared memory while others are computed. Class weights would be too, and
    # take its place.
    aligned = (logits.data_ptr() | logits.stride(0) * logits.element_size()) % 16 == 0
    stages = STAGES if aligned and not flags["HAS_WEIGHTS"] else 1
    interpreted = triton.knobs.runtime.interpret
    for publish, finish in ((True, False), (False, True)) if interpreted else ((True, True),):
        arrivals = torch.zeros(1 + N, dtype=torch.int32, device=logits.device)
        split_rows_kernel[(N * parts,)](
            logits,
            gradient,
            dense(targets),
            weights,
            out.logps,
            out.lse,
            out.lse_residual,
            out.sum_logits if has_sum else out.lse,
            dense(grads.logps),
            g_lse,
            dense(grads.sum_logits) if has_sum else out.lse,
            partials,
            arrivals,
            logits.stride(0),
            gradient.stride(0),
            V,
            ignore_index,
            *scalars,
            HAS_SOFTCAP=flags["HAS_SOFTCAP"],
            HAS_WEIGHTS=flags["HAS_WEIGHTS"],
            SUM=has_sum,
            PARTS=parts,
            PADDED=triton.next_power_of_2(parts),
            LENGTH=length,
            PUBLISH=publish,
            FINISH=finish,
            STAGES=stages,
            VECTOR=min(block, 16 // logits.element_size()),
            BLOCK=block,
            num_warps=WARPS,
        )
