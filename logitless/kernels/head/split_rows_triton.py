"""Triton kernel that reads logits (C, V) from memory once, and writes the statistics and the gradient of a
loss.

Each row is split into parts, one program each. A program reads its part, publishes the maximum of the logits
z (the shift) and the sum of exp(z - shift), waits until all parts of the row are published, and writes the
gradient. It keeps the logits in registers and computes the exponentials twice. Logits of 16 bits are kept as
they were read, two in a register: more programs then fit on a multiprocessor, and read while others wait.

The programs of a row wait for each other, and do not deadlock in any order in which the GPU starts them. Each
program takes the next number when it starts, and the numbers are those of rows and parts in order. As long as
the programs of the first unfinished row have not all started, fewer programs than parts are running, because
the programs of earlier rows are finished. A GPU with as many multiprocessors as a row has parts then has room
for the next program. `runs_on` requires twice as many, for another such launch on another stream.

Two numbers are published as one word of 64 bits, which is 0 before. A program can therefore read them without
a memory fence, which was slower: it reads a word that is still 0 again. The counter of a row's published
parts is not ordered with the words: when it is full, a word may still be 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.head.cross_entropy_triton import (
    bound_gradient,
    gradient_arguments,
    gradient_launch,
    head_logits,
    statistics_of_row,
    vocabulary_arguments,
    write_gradient,
)
from logitless.kernels.head.exponentials_triton import exp
from logitless.kernels.launch import OF_CHUNKS, cached_launch
from logitless.kernels.layout import check_rows, check_written, dense

LENGTH = 8192  # columns of a part


def length_of(V: int, *, has_softcap: bool) -> int:
    """Columns of a part of rows of V logits."""
    return min(LENGTH // 2 if has_softcap else LENGTH, triton.next_power_of_2(V))


def options_of(
    itemsize: int, *, has_softcap: bool, has_weights: bool, has_sum: bool
) -> dict[str, int | bool | None]:
    """Options of a launch for logits of `itemsize` bytes: the fastest of several on an H100.

    A thread has 64 packed logits, or 32. With `maxnreg` more programs fit on a multiprocessor, and the
    compiler spills at most eight registers.
    """
    if has_softcap:
        return {"PACKED": False, "num_warps": 4, "maxnreg": None if has_sum else 72}
    if itemsize == 4 or has_weights:
        return {"PACKED": False, "num_warps": 8, "maxnreg": 64}
    return {"PACKED": True, "num_warps": 4, "maxnreg": 64}


if triton.knobs.runtime.interpret:

    @triton.jit
    def unknown(word):
        return word

    @triton.jit
    def largest(words, dtype: tl.constexpr, gain, LENGTH: tl.constexpr):
        return tl.max(gain * unpacked(words, dtype, LENGTH), 0)
else:

    @triton.jit
    def unknown(word):
        """The same word, but the compiler does not know it, and cannot keep results of the word instead."""
        same: tl.constexpr = "mov.b32 $0, $1;"
        return tl.inline_asm_elementwise(same, "=r,r", [word], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def larger_bf16(a, b):
        pairs: tl.constexpr = "max.bf16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(pairs, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def larger_fp16(a, b):
        pairs: tl.constexpr = "max.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(pairs, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def largest(words, dtype: tl.constexpr, gain, LENGTH: tl.constexpr):
        """The largest of gain times the numbers of `packed`, two of which an instruction compares."""
        signs = tl.where(gain < 0, -0x7FFF8000, 0)  # flips those of both numbers
        pair = tl.reduce(unknown(words) ^ signs, 0, larger_bf16 if dtype == tl.bfloat16 else larger_fp16)
        low = pair.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return tl.abs(gain) * tl.maximum(low, high)


@triton.jit
def packed(x, LENGTH: tl.constexpr):
    """Pairs of numbers of 16 bits as words of 32 bits."""
    low, high = tl.split(x.to(tl.int16, bitcast=True).reshape(LENGTH // 2, 2))
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def unpacked(words, dtype: tl.constexpr, LENGTH: tl.constexpr):
    """The numbers of `packed`, which are of `dtype`, in fp32."""
    words = unknown(words)
    low = words.to(tl.int16).to(dtype, bitcast=True)
    high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high).reshape(LENGTH).to(tl.float32)


@triton.jit
def publish(word_ptr, high, low):
    """Publish two fp32 numbers in one word. `low` is at least 0: its sign bit, set, makes the word not 0."""
    low = (low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | 0x80000000
    word = (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low
    # A plain store, which reaches the L2 cache on NVIDIA GPUs without a fence. The barrier is for the
    # compiler, which must not move the store behind the loop that waits for it.
    tl.store(word_ptr, word)
    tl.debug_barrier()


@triton.jit
def published(words_ptr, k, count):
    """Wait until `count` words are published. Returns (high, low) of the words k < count, 0 for others."""
    inside = k < count
    words = tl.load(words_ptr + k, mask=inside, other=1, volatile=True)
    while tl.max((words == 0).to(tl.int32), 0) > 0:
        words = tl.load(words_ptr + k, mask=inside, other=1, volatile=True)
    high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = (words & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(inside, high, 0.0), tl.where(inside, low, 0.0)


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
    values_ptr,
    g_logp_ptr,
    g_lse_ptr,
    g_sum_ptr,
    arrivals_ptr,
    words_ptr,
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
    PUBLISH: tl.constexpr,
    FINISH: tl.constexpr,
    PACKED: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """`arrivals`: zeros, the number of programs that have started, and of the published parts of each row.
    `words`: zeros, (rows, PARTS), the shift of the exponentials and their sum without the target; with SUM,
    (rows, 2, PARTS), also the weighted sum of logits and, again, that sum.

    One of PUBLISH and FINISH is False in Triton's interpreter, which runs a program after another: it takes
    two launches.
    """
    ticket = tl.atomic_add(arrivals_ptr, 1, sem="relaxed")
    row = (ticket // PARTS).to(tl.int64)
    part = ticket % PARTS
    logits_ptr += row * logits_stride
    grad_ptr += row * grad_stride
    words_ptr += row * (2 * PARTS if SUM else PARTS)
    begin = part * LENGTH
    cols = begin + tl.arange(0, LENGTH)
    inside = cols < V
    # Issued before the target arrives, although the logits of an ignored row are not needed.
    fill = tl.where(gain < 0, float("inf"), -float("inf"))  # so that its logit is -inf, without a softcap
    x = tl.load(logits_ptr + cols, mask=inside, other=fill)
    y = tl.load(targets_ptr + row)
    if y == ignore_index:
        if FINISH:
            tl.store(grad_ptr + cols, tl.zeros([LENGTH], grad_ptr.dtype.element_ty), mask=inside)
            if part == 0:
                tl.store(logps_ptr + row, 0.0)
                tl.store(lse_ptr + row, 0.0)
                tl.store(lse_residual_ptr + row, 0.0)
                tl.store(values_ptr + row, 0.0)
                if SUM:
                    tl.store(sum_logits_ptr + row, 0.0)
        return

    has_target = (y >= 0) & (y < V)
    is_here = has_target & (y >= begin) & (y < begin + LENGTH)
    x_y = tl.load(logits_ptr + y, mask=has_target, other=0.0)
    g_logp = tl.load(g_logp_ptr + row)
    g_lse = tl.load(g_lse_ptr + row)
    z_y, slope_y = head_logits(x_y, logits_ptr, y, has_target, gain, squash, cap, False, HAS_SOFTCAP)
    z_y = tl.where(has_target, z_y, -float("inf"))
    element: tl.constexpr = logits_ptr.dtype.element_ty
    words = packed(x, LENGTH) if PACKED else x
    slope = gain
    if SUM or not PACKED:
        x = unpacked(words, element, LENGTH) if PACKED else x
        z, slope = head_logits(x, logits_ptr, cols, inside, gain, squash, cap, False, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        z = tl.where(inside, z, -float("inf"))
    if SUM and PUBLISH:
        terms = tl.where(inside, z, 0.0)
        if HAS_WEIGHTS:
            terms *= tl.load(class_weights_ptr + cols, mask=inside, other=0.0)
        weighted = tl.sum(terms, 0)
    top_here = largest(words, element, gain, LENGTH) if PACKED else tl.max(z, 0)
    shift = tl.maximum(top_here, -1e30)  # finite for a part of -inf
    if PUBLISH:
        # Without the target, so that 1 - p of a confident token does not cancel. Each branch computes the
        # exponentials: all of them would be kept from before the branches.
        if is_here:
            is_target = tl.arange(0, LENGTH) == (y - begin).to(tl.int32)
            z = gain * unpacked(words, element, LENGTH) if PACKED else z
            rest = tl.sum(tl.where(is_target, 0.0, exp(z - shift)), 0)
        else:
            z = gain * unpacked(words, element, LENGTH) if PACKED else z
            rest = tl.sum(exp(z - shift), 0)
        if SUM:
            publish(words_ptr + PARTS + part, weighted, rest)
        publish(words_ptr + part, shift, rest)
        if FINISH:
            # One thread polls the counter; all of them would slow the others down.
            arrived = tl.atomic_add(arrivals_ptr + 1 + row, 1, sem="relaxed") + 1
            while arrived < PARTS:
                arrived = tl.atomic_add(arrivals_ptr + 1 + row, 0, sem="relaxed")
    if FINISH:
        k = tl.arange(0, PADDED)
        shifts, sums = published(words_ptr, k, PARTS)
        shifts = tl.where(k < PARTS, shifts, -1e30)
        # The largest logit of the row, unless all are -inf.
        top = tl.max(shifts, 0)
        others = tl.sum(sums * tl.exp(shifts - top), 0)
        total, log_total, logp, lse, residual, entropy = statistics_of_row(others, 0.0, z_y - top, top)
        if part == 0:
            tl.store(logps_ptr + row, logp)
            tl.store(lse_ptr + row, lse)
            tl.store(lse_residual_ptr + row, residual)
            # g_lse is 0 if the loss does not depend on lse, which is infinite for an infinite logit.
            value = g_logp * logp + tl.where(g_lse == 0.0, 0.0, g_lse * lse)
            if SUM:
                all_weighted, unused = published(words_ptr + PARTS, k, PARTS)
                sum_logits = tl.sum(all_weighted, 0)
                tl.store(sum_logits_ptr + row, sum_logits)
                value += tl.load(g_sum_ptr + row) * sum_logits
            tl.store(values_ptr + row, value)
        scale = (g_lse - g_logp) / total
        z = gain * unpacked(words, element, LENGTH) if PACKED else z
        if HAS_SOFTCAP:
            # The slope is 1 - (z / cap)^2.
            below = (cap - tl.abs(z)) * (1.0 / cap)
            slope = gain * (below * (2.0 - below))
        g = exp(z - top) * (scale * slope)
        if SUM:
            g_sum = tl.load(g_sum_ptr + row)
            if HAS_WEIGHTS:
                g += (g_sum * slope) * tl.load(class_weights_ptr + cols, mask=inside, other=0.0)
            else:
                g += g_sum * slope
        tl.store(grad_ptr + cols, g.to(grad_ptr.dtype.element_ty), mask=inside)
        if is_here:
            g_y = (g_lse * tl.exp(z_y - top) + g_logp * others) / total
            if SUM:
                if HAS_WEIGHTS:
                    g_y += g_sum * tl.load(class_weights_ptr + y)
                else:
                    g_y += g_sum
            tl.debug_barrier()  # after the store of the part
            tl.store(grad_ptr + y, (g_y * slope_y).to(grad_ptr.dtype.element_ty))


def runs_on(device: torch.device, V: int, transform) -> bool:
    """Whether the device has two multiprocessors for each part of a row; not tried on other vendors' GPUs.

    Not with a logit scale of 0, with which a logit of -inf would be NaN.
    """
    has_softcap = transform.softcap is not None
    if not has_softcap and abs(transform.logit_scale / transform.temperature) < 1e-37:
        return False
    if device.type == "cpu":
        return True  # in Triton's interpreter
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    parts = triton.cdiv(V, length_of(V, has_softcap=has_softcap))
    return 2 * parts <= torch.cuda.get_device_properties(device).multi_processor_count


def memory_of(tensors: Sequence[Tensor]) -> list[tuple]:
    """Where tensors are; those that hooks of saved tensors return may be elsewhere."""
    return [(x.data_ptr(), x.stride()) for x in tensors]


def statistics_and_gradient(
    logits: Tensor, targets: Tensor, out, grads, *, gradient, class_weights, transform, ignore_index
) -> tuple[Tensor, list[Tensor], Callable[..., None]]:
    check_rows(logits=logits, gradient=gradient)
    check_written(**dict(out.items()))
    N, V = logits.shape
    has_softcap = transform.softcap is not None
    has_sum = grads.sum_logits is not None
    length = length_of(V, has_softcap=has_softcap)
    parts = triton.cdiv(V, length)
    weights = class_weights if has_sum else None
    (_, weights), scalars, flags = vocabulary_arguments(transform, None, weights, out.lse)
    # Words for 1 + N counters of 32 bits; an even number, so that the words behind are aligned to 16 bytes.
    counters = 2 * (N // 4 + 1)
    published = N * parts * (1 + has_sum)
    has_lse = grads.lse is not None
    gradient_of_lse = 0 if has_lse else N // 2 + 1
    words = torch.zeros(counters + published + gradient_of_lse, dtype=torch.int64, device=logits.device)
    arrivals = words[:counters].view(torch.int32)
    if not has_lse:
        grads = replace(grads, lse=words[counters + published :].view(torch.float32)[:N])
    values = torch.empty_like(out.lse)
    interpreted = triton.knobs.runtime.interpret
    for publishes, finishes in ((True, False), (False, True)) if interpreted else ((True, True),):
        split_rows_kernel[(N * parts,)](
            logits,
            gradient,
            dense(targets),
            weights,
            out.logps,
            out.lse,
            out.lse_residual,
            out.sum_logits if has_sum else out.lse,
            values,
            dense(grads.logps),
            dense(grads.lse),
            dense(grads.sum_logits) if has_sum else out.lse,
            arrivals,
            words[counters:],
            logits.stride(0),
            gradient.stride(0),
            V,
            ignore_index,
            *scalars,
            HAS_SOFTCAP=has_softcap,
            HAS_WEIGHTS=flags["HAS_WEIGHTS"],
            SUM=has_sum,
            PARTS=parts,
            PADDED=triton.next_power_of_2(parts),
            PUBLISH=publishes,
            FINISH=finishes,
            LENGTH=length,
            **options_of(
                logits.element_size(),
                has_softcap=has_softcap,
                has_weights=flags["HAS_WEIGHTS"],
                has_sum=has_sum,
            ),
        )
        if interpreted:
            arrivals.zero_()
    tensors, numbers, constants = gradient_arguments(
        logits,
        targets,
        out,
        grads,
        bias=None,
        class_weights=class_weights,
        transform=transform,
        ignore_index=ignore_index,
        gradient=gradient,
    )
    # Several operands may be the same tensor, which autograd saves once.
    distinct = list({id(x): x for x in tensors}.values())
    order = [next(i for i, each in enumerate(distinct) if each is x) for x in tensors]

    # The GPU may wait for the launch of the backward pass, so what can be looked up for it is looked up here.
    launch = bound_gradient(tensors, numbers, constants, values[:1])
    are_dense = all([x.is_contiguous() for x in tensors[2:]])
    saved = memory_of(distinct)

    def write_again(distinct: Sequence[Tensor], upstream: Tensor, *, unless_one: bool) -> None:
        tensors = [distinct[i] for i in order]
        is_same = unless_one and upstream.numel() == 1 and upstream.dtype == torch.float32
        if are_dense and is_same and memory_of(distinct) == saved:
            operands, _ = gradient_launch(tensors, numbers, constants, upstream, unless_one=True)
            launch((N,), *operands)
        else:
            write_gradient(tensors, numbers, constants, upstream, unless_one=unless_one)

    return values, distinct, write_again
