"""Operators on targets and masks: mark and count supervised tokens and invalid targets, and convert targets
to columns of a shard.

Each operator is one launch, because all of them run before the first product, while the GPU waits for the
host.
"""

import torch
from torch import Tensor

from logitless.kernels import uses_triton


def runs_kernels(targets: Tensor) -> bool:
    """Whether the functions in this file launch kernels for these targets."""
    return targets.numel() > 0 and uses_triton(targets.device, torch.float32)


def marked(
    targets: Tensor,  # (N,) integers
    V: int,
    ignore_index: int,
    others: Tensor | None = None,  # (m, N) bool
) -> Tensor:
    """(2 + m, N) bool: supervised tokens; those with targets outside [0, V); `others` if supervised."""
    if runs_kernels(targets):
        from logitless.kernels.head import targets_triton

        return targets_triton.marked(targets, V, ignore_index, others)
    supervised = targets != ignore_index
    marks = torch.stack((supervised, supervised & ((targets < 0) | (targets >= V))))
    return marks if others is None else torch.cat((marks, others & supervised))


def masked(targets: Tensor, mask: Tensor, ignore_index: int, wrong: int) -> Tensor:
    """Return int64 targets, with `ignore_index` where the mask is 0 (False).

    The mask has the same shape as the targets, and is bool, integer or float. If a number is neither 0 nor 1,
    the target is `wrong`; in a float mask `wrong + 1` if the number is negative, and `wrong + 2` if it is
    NaN.
    """
    if mask.dtype == torch.bool:
        return torch.where(mask, targets, ignore_index)
    if runs_kernels(targets) and not torch.compiler.is_compiling():
        from logitless.kernels.head import targets_triton

        return targets_triton.masked(targets, mask, ignore_index, wrong)
    others = wrong
    if mask.is_floating_point():
        others = torch.where(mask < 0, wrong + 1, torch.where(mask.isnan(), wrong + 2, wrong))
    return torch.where(mask == 1, targets, torch.where(mask == 0, ignore_index, others))


def counted(marks: Tensor, parts: int = 1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Count the True entries in each part of each row of `marks`; check the boundaries of packed sequences.

    Args:
        marks: (m, N) bool.
        parts: number of parts, of equal length, of a row.
        cu_seqlens: (sequences + 1,) int64, at least one; None for no boundaries.

    Returns:
        (m * parts,) int64. With `cu_seqlens` one more number, which is 0 if the boundaries start at 0, do not
        decrease and end at N.
    """
    N = marks.shape[1]
    marks = marks.view(marks.shape[0] * parts, N // parts)
    if runs_kernels(marks):
        from logitless.kernels.head import targets_triton

        return targets_triton.counted(marks, N, cu_seqlens)
    counts = marks.sum(1)
    if cu_seqlens is None:
        return counts
    return torch.cat((counts, wrong_boundaries(cu_seqlens, N)))


def count_targets(targets: Tensor, V: int, ignore_index: int, counts: Tensor) -> Tensor:
    """Write to `counts` (2,), int64, the number of supervised targets (N,) and of those outside [0, V).

    `counts` may be pinned memory of the host, which the device writes.

    Returns:
        (1,) fp32: 1 / the number of supervised targets, 1 if there is none.
    """
    if runs_kernels(targets):
        from logitless.kernels.head import targets_triton

        return targets_triton.count_targets(targets, V, ignore_index, counts)
    both = marked(targets, V, ignore_index).sum(1)
    counts.copy_(both, non_blocking=True)
    return both[:1].clamp(min=1).to(torch.float32).reciprocal()


def wrong_boundaries(cu_seqlens: Tensor, N: int) -> Tensor:
    """(1,) bool: whether boundaries (sequences + 1,) do not start at 0, decrease, or do not end at N."""
    falls = (cu_seqlens[1:] < cu_seqlens[:-1]).any()
    return (cu_seqlens[:1] != 0) | (cu_seqlens[-1:] != N) | falls


def one_per_position(ids: Tensor, ignore_index: int) -> Tensor:
    """Reduce (..., k) int64 ids, with `ignore_index` in empty slots, to one id per position (...).

    The result is an invalid id if the position has one, else its largest id; `ignore_index` if all slots are
    empty.
    """
    if runs_kernels(ids) and not torch.compiler.is_compiling():
        from logitless.kernels.head import targets_triton

        return targets_triton.one_per_position(ids, ignore_index)
    filled = ids != ignore_index
    least, largest = (ids * filled).aminmax(dim=-1)
    return torch.where(filled.any(-1), torch.where(least < 0, least, largest), ignore_index)


def shard_columns(targets: Tensor, start: int, width: int, ignore_index: int, ignored: int) -> Tensor:
    """Convert targets (n,) to int64 columns of a shard with the ids start:start + width.

    The column of a target in another shard is `width`, and that of `ignore_index` is `ignored`.
    """
    if runs_kernels(targets):
        from logitless.kernels.head import targets_triton

        return targets_triton.shard_columns(targets, start, width, ignore_index, ignored)
    local = targets - start
    inside = (local >= 0) & (local < width)
    return torch.where(targets == ignore_index, ignored, torch.where(inside, local, width))


def clamped(
    targets: Tensor,  # (N,) int64
    V: int,
    ignore_index: int,
    num_items: Tensor | None = None,  # (), a normalizer
    supervised: Tensor | None = None,  # (N,) bool, the tokens that are assumed to be supervised; None: all
) -> tuple[Tensor, Tensor]:
    """Clamp the targets (N,) to [0, V), and count violations of the assumptions of an early projection.

    The counts, integers (parts,), are all 0 if every target that is assumed to be supervised is in [0, V) and
    not `ignore_index`, all others are `ignore_index`, and `num_items` is above 0. The other targets become
    `ignore_index`.
    """
    if runs_kernels(targets):
        from logitless.kernels.head import targets_triton

        return targets_triton.clamped(targets, V, ignore_index, num_items, supervised)
    outside = (targets == ignore_index) | (targets < 0) | (targets >= V)
    ids = targets.clamp(0, V - 1)
    if supervised is not None:
        outside = torch.where(supervised, outside, targets != ignore_index)
        ids = torch.where(supervised, ids, ignore_index)
    wrong = outside.sum()
    if num_items is not None:
        wrong = wrong + ~(num_items > 0)
    return ids, wrong.view(1)


def cleaned(
    targets: Tensor,  # (N,) int64
    V: int,
    ignore_index: int,
    num_items: Tensor | None = None,  # (), a normalizer
) -> tuple[Tensor, Tensor, Tensor]:
    """Clamp the supervised targets to [0, V), and count them.

    Returns:
        (targets (N,); which of them are supervised (N,), bool; (2,) int64: the number of supervised targets,
        and 0 if all of them were in [0, V) and `num_items` is above 0).
    """
    if runs_kernels(targets):
        from logitless.kernels.head import targets_triton

        return targets_triton.cleaned(targets, V, ignore_index, num_items)
    marks = marked(targets, V, ignore_index)
    supervised = marks[0]
    counts = marks.sum(1)
    if num_items is not None:
        counts[1] += ~(num_items > 0)
    return torch.where(supervised, targets.clamp(0, V - 1), ignore_index), supervised, counts
