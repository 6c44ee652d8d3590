"""Inputs that have one entry per sequence or one per token: their shape says which."""

from torch import Tensor

from logitless.errors import value_error
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences


def is_per_sequence(
    name: str,
    x: Tensor,
    targets: Tensor,
    sequences: int,
    *,
    sums: bool = False,
    slices: WholeSequences = WHOLE_SEQUENCES,
) -> bool:
    """Whether x has one entry per sequence: shape (sequences,) or (sequences, 1).

    Otherwise x should have one entry per token: the shape of the targets or, in a packed call, (1, N).

    Args:
        name: the argument, for the error.
        x: the input.
        targets: (B, T), or packed (N,).
        sequences: the number of sequences of the call.
        sums: whether an entry per sequence is a sum over its tokens. One token that is its sequence is then
            read per token: its entry is dropped if it is not supervised, as the sum over no tokens is 0.
        slices: with `cp_group`, whose ranks must agree: the slice of one rank may have as many tokens as
            there are sequences.

    Raises:
        ValueError: a packed call has as many tokens as sequences, and x has shape (N,), which is both.
    """
    packed = targets.dim() == 1
    flat = x.shape == (sequences,)
    aligned = x.shape == targets.shape
    if x.shape == (sequences, 1):
        one = sequences == 1 and targets.shape == (1,)
        return (packed or not slices.sliced) and not (sums and (aligned or one))
    if not packed or x.dim() != 1:
        return flat
    if slices.sliced:
        flat, aligned = slices.everywhere((flat, aligned), x.device)
    if flat and aligned and (sequences > 1 or slices.sliced):
        expected = f"shape ({sequences}, 1), one per sequence, or (1, {sequences}), one per token"
        got = f"({sequences},) in a call of {sequences} sequences and {sequences} tokens"
        remedy = "reshape it: this shape does not say which of the two it is"
        raise value_error(name, expected, got, remedy)
    return flat and not (aligned and sums)


def per_token_shape(x: Tensor, targets: Tensor) -> Tensor:
    """x (1, N) of a packed call as (N,); anything else unchanged."""
    return x[0] if targets.dim() == 1 and x.shape == (1, *targets.shape) else x
