"""Triton kernel of `targets.py`: one launch before the call's sync, where every launch is waited for."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.kernels.launch import OF_CHUNKS, held
from logitless.kernels.layout import dense

BLOCK, WARPS = 1024, 4


@held
@triton.jit(**OF_CHUNKS)
def mark_kernel(
    targets_ptr,
    others_ptr,
    marks_ptr,
    size_ptr,  # () V, where it is SHARDED
    rows,
    V,
    ignore_index,
    SHARDED: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows
    y = tl.load(targets_ptr + at, mask=inside, other=0)
    if SHARDED:
        V = tl.load(size_ptr)
    supervised = y != ignore_index
    outside = supervised & ((y < 0) | (y >= V))
    tl.store(marks_ptr + at, supervised.to(tl.int8), mask=inside)
    at += rows
    tl.store(marks_ptr + at, outside.to(tl.int8), mask=inside)
    for i in tl.static_range(OTHERS):
        other = tl.load(others_ptr + (at + (i - 1) * rows), mask=inside, other=0) != 0
        tl.store(marks_ptr + (at + (i + 1) * rows), (other & supervised).to(tl.int8), mask=inside)


def marked(targets: Tensor, V: int | Tensor, ignore_index: int, others: Tensor | None) -> Tensor:
    N, count = targets.shape[0], 0 if others is None else others.shape[0]
    marks = torch.empty(2 + count, N, dtype=torch.int8, device=targets.device)
    targets, sharded = dense(targets, torch.int64), isinstance(V, Tensor)
    if N:
        mark_kernel[(triton.cdiv(N, BLOCK),)](
            targets,
            marks if others is None else dense(others).view(torch.int8),
            marks,
            V if sharded else targets,
            N,
            0 if sharded else V,
            ignore_index,
            SHARDED=sharded,
            OTHERS=count,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return marks.view(torch.bool)
