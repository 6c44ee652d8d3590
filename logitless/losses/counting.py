"""`count_targets`: the number of supervised tokens of a call, to normalize a mean over several calls."""

from torch import Tensor

from logitless.engine.operands import INTEGERS, check_packed, checked_boundaries, masked, shifted
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
    """The number of tokens that a loss supervises in a call with the same arguments: the metric `num_tokens`
    of `CrossEntropyLoss`.

    To normalize every micro-batch by the tokens of all micro-batches, pass the sum of their counts as
    `num_items`; over several ranks, `global_num_items` of that sum. With `shift`, the last position of each
    sequence predicts nothing, so the first label of every packed sequence is not counted, unlike in
    `(labels[:, 1:] != -100).sum()`.

    Args:
        targets: (...) int64 token ids, or `ignore_index`; (N,) with `cu_seqlens`.
        shift: targets are unshifted labels: position i predicts targets[i + 1].
        cu_seqlens: (sequences + 1,) int64 boundaries of packed sequences. Wrong ones are asserted on the
            device.
        mask: like targets, and shifted with them; where it is off (0), the target is not supervised.
        ignore_index: targets with this id are not supervised.

    Returns:
        0-d int64 tensor on the device of the targets. Nothing is read back: there is no host sync.

    Raises:
        ValueError: shapes that do not fit together.
        TypeError: targets that are no tensor of integers.

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
        targets = masked(targets, mask, ignore_index)
    if cu_seqlens is not None:
        check_packed("targets", targets, 1)
        cu_seqlens = checked_boundaries(cu_seqlens, targets)
        N = targets.shape[0]
        boundary_fault(cu_seqlens, N, "cu_seqlens").assert_async(~wrong_boundaries(cu_seqlens, N)[0])
    if shift:
        if targets.dim() == 0:
            raise value_error("shift", "False for a single target", True, "a single token has no next one")
        targets = shifted(targets, ignore_index, cu_seqlens=cu_seqlens)
    return (targets != ignore_index).sum()
