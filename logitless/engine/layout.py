"""`SequenceLayout`: the sequences of a public call, and its inputs per sequence or per token.

The shape of an input determines whether it has one entry per sequence or per token (`is_per_sequence`).
"""

import torch
from torch import Tensor

from logitless.engine.operands import check_packed, sequence_numbers, shifted
from logitless.engine.sampling_mask import AlignedMask
from logitless.engine.segments import cached_property
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
        name: name of the argument, for error messages.
        x: the input.
        targets: (B, T), or packed (N,).
        sequences: the number of sequences of the call.
        sums: whether an entry per sequence is a sum over its tokens. The entry of a sequence of one token is
            then an entry per token, and is ignored if the token is not supervised, because the sum over no
            tokens is 0.
        slices: the slices of `cp_group`. All ranks must get the same result, although the slice of one rank
            may have as many tokens as there are sequences.

    Raises:
        ValueError: a packed call has as many tokens as sequences, and x has the ambiguous shape (N,).
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
    """Return x (1, N) of a packed call as (N,), and any other x unchanged."""
    return x[0] if targets.dim() == 1 and x.shape == (1, *targets.shape) else x


class SequenceLayout:
    """The tokens and sequences of a call. It expands inputs per sequence to inputs per token."""

    def __init__(
        self,
        hidden: Tensor,
        targets: Tensor,
        ignore_index: int,
        cu_seqlens: Tensor | None,
        *,
        shift: bool,
        fills: bool,
        copies: bool,
        slices: WholeSequences,
        aligned_mask: AlignedMask | None = None,
    ):
        self._ignore_index = ignore_index
        self._shift = shift
        self._fills = fills
        self._copies = copies
        self._slices = slices
        self.aligned_mask = aligned_mask  # the sampling mask of the call
        self.packed = cu_seqlens is not None
        if self.packed:
            check_packed("targets", targets, 1)
        elif targets.dim() != 2:
            remedy = "or pass flat tokens with cu_seqlens"
            raise value_error("targets", "shape (B, T)", tuple(targets.shape), remedy)
        self.cu_seqlens = cu_seqlens
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.targets = self.aligned(targets.long(), ignore_index)
        self.sequences = cu_seqlens.shape[0] - 1 if self.packed else targets.shape[0]
        if self.packed:
            positions = torch.arange(targets.shape[0], device=targets.device)
            self.number = sequence_numbers(cu_seqlens, positions)

    def aligned(self, x: Tensor, last: float) -> Tensor:
        """Align x with hidden: shift it if the call has `shift`, with `last` at the last positions."""
        return shifted(x, last, cu_seqlens=self.cu_seqlens) if self._shift else x

    def is_per_sequence(self, name: str, x: Tensor, *, sums: bool = False) -> bool:
        """See the function `is_per_sequence`."""
        return is_per_sequence(name, x, self.targets, self.sequences, sums=sums, slices=self._slices)

    def spread(self, x: Tensor) -> Tensor:
        """(B,) -> targets' shape."""
        if self.packed:
            return x.reshape(-1)[self.number]
        return x.reshape(-1, 1).expand(self.targets.shape)

    def per_token(self, name: str, x: Tensor, *, per_sequence: bool = False, fill: float = 0.0) -> Tensor:
        """Return x in targets' shape, contiguous and aligned with hidden.

        With `fills`, unsupervised tokens have `fill`. Without it, no result depends on those tokens.
        """
        if per_sequence and self.is_per_sequence(name, x):
            x = self.spread(x)
        else:
            x = per_token_shape(x, self.targets) if per_sequence else x
            # A single f-string, because Dynamo does not concatenate strings that depend on a dynamic shape.
            if x.shape != self.targets.shape:
                shape = tuple(self.targets.shape)
                either = f"{shape} or ({self.sequences},)" if per_sequence else f"{shape}"
                raise value_error(
                    name, f"targets' shape {either}", tuple(x.shape), "align it with the targets"
                )
            x = self.aligned(x, fill)
        x = x.detach() if x.requires_grad else x
        if self._fills:
            return torch.where(self._counted, x.to(self.dtype), fill)
        return self.owned(x)

    def owned(self, x: Tensor) -> Tensor:
        """Return x in `dtype`, contiguous. It is a copy where the caller may change x before it is read, in a
        backward pass or a graph, and where x was made in inference mode, as autograd does not save such x.
        """
        if self._fills or self._copies or torch.compiler.is_compiling() or x.is_inference():
            return x.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        return x.to(self.dtype).contiguous()

    @cached_property
    def _counted(self) -> Tensor:
        """Whether a token is supervised, in targets' shape."""
        return self.targets != self._ignore_index

    @cached_property
    def lengths(self) -> Tensor:
        """(B,) number of supervised tokens of each sequence."""
        if self.packed:
            counted = self._counted.to(self.dtype)
            lengths = counted.new_zeros(self.sequences).index_add_(0, self.number, counted)
        else:
            lengths = self._counted.sum(1, dtype=self.dtype)
        return self._slices.sum(lengths)

    @cached_property
    def shares(self) -> Tensor:
        """(B,) 1 / number of supervised tokens of each sequence; 1 for a sequence that has none."""
        return self.lengths.clamp(min=1).reciprocal()

    @cached_property
    def share(self) -> Tensor:
        """() 1 / number of supervised tokens of the call; 1 if there are none."""
        return self.lengths.sum().clamp(min=1).reciprocal()
