"""`count_targets`: the number of supervised tokens of a call, to normalize the mean over several calls."""

import torch
from torch import Tensor

from logitless.engine.operands import (
    INTEGERS,
    MASKS,
    NAN_MASK,
    apply_mask,
    check_packed,
    checked_boundaries,
    shifted,
)
from logitless.engine.rows import boundary_fault
from logitless.errors import type_error, value_error
from logitless.kernels.head.targets import wrong_boundaries


def count_targets(
    targets: Tensor,
    *,
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Count the tokens that a loss supervises in a call with the same arguments.

    This is the metric `num_tokens` of `CrossEntropyLoss`. To normalize every micro-batch by the tokens of all
    micro-batches, pass the sum of their counts as `num_items`; with several ranks, pass `global_num_items` of
    that sum. With `shift`, the last position of each sequence predicts nothing. Therefore the first label of
    every sequence is not counted. `(labels[:, 1:] != -100).sum()` counts the first label of every packed
    sequence except the first one of each row.

    Args:
        targets: (...) int64 token ids, or `ignore_index`; (N,) with `cu_seqlens`.
        shift: whether targets are unshifted labels: position i predicts targets[i + 1].
        cu_seqlens: (sequences + 1,) int64 boundaries of packed sequences. Their values are asserted on the
            device.
        mask: same shape as targets, and shifted with them; bool, or integers or floats that are 0 or 1, which
            is asserted on the device. Targets with mask 0 (False) are not supervised.
        ignore_index: targets with this id are not supervised.

    Returns:
        0-d int64 tensor on the device of the targets, computed without a host sync.

    Raises:
        ValueError: the shapes do not match.
        TypeError: targets are not a tensor of integers.

    Examples:
        >>> labels = torch.tensor([5, 6, 7, 8, 9, -100])
        >>> count_targets(labels, shift=True)
        tensor(4)
        >>> count_targets(labels, shift=True, cu_seqlens=torch.tensor([0, 3, 6]))
        tensor(3)
    """
    if not isinstance(targets, Tensor) or targets.dtype not in INTEGERS:
        raise type_error(
            "targets",
            "a tensor of integer token ids (int64)",
            targets.dtype if isinstance(targets, Tensor) else type(targets).__name__,
            "pass the labels",
        )
    if mask is not None:
        targets = apply_mask(targets, mask, ignore_index)
    if cu_seqlens is not None:
        check_packed("targets", targets, 1)
        cu_seqlens = checked_boundaries(cu_seqlens, targets)
        N = targets.shape[0]
        boundary_fault(cu_seqlens, N, "cu_seqlens").assert_async(~wrong_boundaries(cu_seqlens, N)[0])
    if shift:
        if targets.dim() == 0:
            raise value_error("shift", "False for a single target", True, "a single token has no next token")
        targets = shifted(targets, ignore_index, cu_seqlens=cu_seqlens)
    if mask is not None and mask.dtype != torch.bool:
        remedy = "pass mask == 0 if it is additive (0 keeps, -inf drops)"
        message = f"mask: expected {MASKS}, got others; {remedy}."
        torch._assert_async((targets > NAN_MASK).all(), message)
    return (targets != ignore_index).sum()
