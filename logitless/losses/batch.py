"""What a loss is handed beside the numbers of its tokens, and what it hands back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logitless.losses.checks import expect

if TYPE_CHECKING:
    from logitless.losses.parallel import SequenceSlices
    from logitless.losses.shard import VocabShard


class cached_property:  # noqa: N801
    """`functools.cached_property` without the lock that Python 3.11's holds, which torch.compile does not trace."""

    def __init__(self, function):
        self.function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.function(instance)
        return value


UNITS = ("tokens", "sequences", "pairs", "chosen_tokens")
# Of these every rank that holds a slice of the sequences has all; of other values its own tokens'.
WHOLE = ("sequences", "pairs")


class Term(NamedTuple):
    """Unreduced values of one part of a loss (or of a metric) and the unit that their sum is divided by.

    Args:
        values: any shape; the engine sums it.
        over: "tokens", "sequences", "pairs" or "chosen_tokens" (those of the first half of the sequences); None leaves the sum as it
            is. In a metric it may be a tensor, such as a mask, whose own sum over the call divides that of the values.
    """

    values: Tensor
    over: str | Tensor | None = "tokens"


class Scales(NamedTuple):
    """What the sums over each unit (None: of no unit) are multiplied by: numbers or 0-d tensors."""

    loss: Mapping[str | None, float | Tensor] | None  # None where the loss is not reduced
    metrics: Mapping[str | None, float | Tensor]

    def tensors(self, like: Tensor) -> "Scales":
        """All as 0-d tensors: a compiled function would take every new number for a new program."""

        options = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}

        def convert(scale):
            if scale is None:
                return None
            # Filled on the device: a copy from the host would be a sync.
            return {unit: x.to(**options) if isinstance(x, Tensor) else torch.full((), x, **options) for unit, x in scale.items()}

        return Scales(convert(self.loss), convert(self.metrics))


def reduced(
    terms: Mapping[str, Term], scale: Mapping[str | None, float | Tensor], slices: "SequenceSlices | None" = None
) -> dict[str, Tensor]:
    """The one place where a reduction is applied: each term's sum, times the factor of its unit."""

    def total(term: Term) -> Tensor:
        own = term.values.sum() * scale[term.over]
        return own if slices is None or term.over in WHOLE else slices.sum(own)

    return {name: total(term) for name, term in terms.items()}


def tallied(
    metrics: Mapping[str, Term], scale: Mapping[str | None, float | Tensor], slices: "SequenceSlices | None" = None
) -> dict[str, tuple[Tensor, ...]]:
    """A chunk's share of each metric: its reduced sum and, where it has weights of its own, their sum."""
    own = {name: term.over for name, term in metrics.items() if isinstance(term.over, Tensor)}
    sums = reduced({name: term._replace(over=None) if name in own else term for name, term in metrics.items()}, scale, slices)
    # Of whole sequences, too, the values and their weights are summed over the ranks alike.
    weights = {name: weight.sum() if slices is None else slices.sum(weight.sum()) for name, weight in own.items()}
    return {name: (total.detach(), weights[name]) if name in own else (total.detach(),) for name, total in sums.items()}


def settled(shares: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """A metric from its shares; 0 where there was nothing to average."""
    total, *weights = (sum(parts) for parts in zip(*shares, strict=True))
    return total / torch.where(weights[0] == 0, 1.0, weights[0]) if weights else total


def unreduced(terms: Mapping[str, Term]) -> Tensor:
    """The sum of the terms, still one value per unit; they must share it."""
    units = {term.over for term in terms.values()}
    expect(
        len(units) == 1, "reduction", "'mean' or 'sum' for a loss of several units", f"'none' with {sorted(map(str, units))}", "reduce it"
    )
    return sum(term.values for term in terms.values())


@dataclass
class Segments:
    """Sequences of a span of rows. Rows run group by group; a sequence's number is `role * groups + group`, so that the
    chosen sequences come first and the rejected ones after them, as in the call."""

    lengths: Tensor  # (sequences,) int64, in row order
    rows: int
    groups: int
    roles: int

    @cached_property
    def ids(self) -> Tensor:  # (rows,) in row order
        return torch.repeat_interleave(self.lengths, output_size=self.rows)

    @cached_property
    def starts(self) -> Tensor:  # (sequences,) first row of each, in row order
        return self.lengths.cumsum(0) - self.lengths

    def to_sequence_order(self, x: Tensor) -> Tensor:
        return x.view(self.groups, self.roles).t().reshape(-1)

    def to_row_order(self, x: Tensor) -> Tensor:
        return x.view(self.roles, self.groups).t().reshape(-1)


class _SegmentSum(torch.autograd.Function):
    """Sum of consecutive runs, without atomics in either direction; `_Spread` is its transpose."""

    @staticmethod
    def forward(x: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
        return torch.segment_reduce(x.contiguous(), "sum", lengths=lengths, unsafe=True)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, ctx.lengths, ctx.ids = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Spread.apply(grad, ctx.lengths, ctx.ids), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
        return x[ids]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, ctx.lengths, ctx.ids = inputs

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _SegmentSum.apply(grad, ctx.lengths, ctx.ids), None, None


class Batch:
    """The slice of a call that a loss is looking at; its declared inputs are attributes, cut to the same slice.

    Attributes:
        targets: (n,) int64 token ids.
        V: size of the vocabulary.
        lengths: (sequences,) supervised tokens of each sequence in the slice.
        positions: (n,) how many supervised tokens of its sequence come before each.
        is_chosen: (n,) bool, whether a token's sequence is of the first half.
        logits of a teacher: `teacher_logits` (n, V) where the loss declares one.
        ref_logps: (n,) log-probabilities under the reference model, where the loss declares one.
    """

    def __init__(
        self, targets: Tensor, V: int, inputs: Mapping[str, Tensor | None], segments: Segments | None = None, *,
        ignore_index: int | None = None, shard: "VocabShard | None" = None, slices: "SequenceSlices | None" = None,
    ):  # fmt: skip
        self.targets = targets
        self.shard, self._slices = shard, slices
        self.V = V
        self.segments = segments
        # None where every row of the slice is supervised.
        self._ignored = None if ignore_index is None else targets == ignore_index
        for name, value in inputs.items():
            setattr(self, name, value)

    @cached_property
    def supervised(self) -> Tensor:
        """(n,) bool."""
        return torch.ones_like(self.targets, dtype=torch.bool) if self._ignored is None else ~self._ignored

    @cached_property
    def lengths(self) -> Tensor:
        return self._own_lengths if self._slices is None else self._slices.sum(self._own_lengths)

    @cached_property
    def _own_lengths(self) -> Tensor:
        if self._ignored is None:
            return self.segments.to_sequence_order(self.segments.lengths)
        return self._own_sums((~self._ignored).float())

    @cached_property
    def positions(self) -> Tensor:
        if self._slices is None:
            return self._own_positions
        return self._own_positions + self.spread(self._slices.before(self._own_lengths))

    @cached_property
    def _own_positions(self) -> Tensor:
        segments = self.segments
        if self._ignored is None:
            return torch.arange(segments.rows, device=segments.lengths.device) - segments.starts[segments.ids]
        before = torch.cat((self.targets.new_zeros(1), (~self._ignored).cumsum(0)))
        return before[:-1] - before[segments.starts][segments.ids]

    @cached_property
    def is_chosen(self) -> Tensor:
        segments = self.segments
        count = segments.lengths.shape[0]
        return self.spread(torch.arange(count, device=segments.lengths.device) < count // 2)

    def sum_by_sequence(self, x: Tensor) -> Tensor:
        """(n,) per token -> (sequences,) per sequence, deterministic and differentiable."""
        return self._own_sums(x) if self._slices is None else self._slices.sum(self._own_sums(x))

    def _own_sums(self, x: Tensor) -> Tensor:
        segments = self.segments
        x = x if self._ignored is None else x.masked_fill(self._ignored, 0.0)
        return segments.to_sequence_order(_SegmentSum.apply(x, segments.lengths, segments.ids))

    def masked(self, *parts: Mapping[str, Term]) -> tuple[dict[str, Term], ...]:
        """Terms with the per-token values of unsupervised rows set to zero."""

        def mask(x):
            per_token = isinstance(x, Tensor) and self._ignored is not None and x.shape == self._ignored.shape
            return torch.where(self._ignored, 0.0, x) if per_token else x

        def masked(term: Term) -> Term:
            return Term(mask(term.values), mask(term.over))

        return tuple({name: masked(term) for name, term in part.items()} for part in parts)

    # What a function of logits needs of the whole vocabulary, also where the logits are a shard of it (`vocab_parallel`).

    def log_softmax(self, z: Tensor) -> Tensor:
        return z.log_softmax(-1) if self.shard is None else z - self.shard.logsumexp(z)[:, None]

    def summed(self, x: Tensor) -> Tensor:
        """(n,) sums over the columns of `z` -> over the vocabulary."""
        return x if self.shard is None else self.shard.reduce(x)

    def norm(self, z: Tensor) -> Tensor:
        """(n, 1) lengths of the rows."""
        if self.shard is None:
            return z.norm(dim=-1, keepdim=True)
        return self.shard.shared(self.shard.reduce(z.square().sum(-1, keepdim=True))).clamp(min=1e-24).sqrt()

    def argmax(self, z: Tensor) -> Tensor:
        """(n,) ids."""
        return z.argmax(-1) if self.shard is None else self.shard.argmax(*z.detach().max(-1))

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) ids -> their columns, 0 where they have none here, and whether they have one."""
        ids = ids if self.shard is None else ids - self.shard.start
        here = (ids >= 0) & (ids < (self.V if self.shard is None else self.shard.width))
        return torch.where(here, ids, 0), here

    def spread(self, x: Tensor) -> Tensor:
        """(sequences,) per sequence -> (n,) per token; the transpose of `sum_by_sequence`."""
        segments = self.segments
        x = self._slices.shared(x) if self._slices is not None and x.requires_grad else x
        return _Spread.apply(segments.to_row_order(x), segments.lengths, segments.ids)


class Rows(NamedTuple):
    """The supervised tokens of a call in the order in which they are walked: whole groups side by side."""

    count: int
    tokens: int | Tensor  # supervised ones: the count, unless every row is walked
    chosen_tokens: int | Tensor  # those of them in the first half of the sequences; 0 without sequences
    index: Tensor | None  # (count,) int64 positions in the flat call; None: all of them, in place
    group_sizes: Sequence[int] | None  # rows of each group; None where every token stands alone
    sequence_sizes: Tensor | None  # (sequences,) in row order
    roles: int = 1

    def slice(self, start: int, stop: int) -> slice | Tensor:
        return slice(start, stop) if self.index is None else self.index[start:stop]

    def segments(self, rows: int, first: int, last: int) -> Segments | None:
        """Sequences of groups first:last, which have so many rows."""
        if self.sequence_sizes is None:
            return None
        return Segments(self.sequence_sizes[first * self.roles : last * self.roles], rows, last - first, self.roles)

    def sequences(self, first: int, last: int) -> Tensor:
        """Numbers of the sequences of groups first:last, role by role."""
        groups = self.sequence_sizes.shape[0] // self.roles
        device = self.sequence_sizes.device
        return (torch.arange(self.roles, device=device)[:, None] * groups + torch.arange(first, last, device=device)).reshape(-1)


def select_rows(
    supervised: Tensor,  # (N,) bool
    bad: Tensor,  # () how many supervised targets lie outside the vocabulary
    V: int,
    *,
    compact: bool,
    grouped: bool,
    sequences: int,
    roles: int,
    cu_seqlens: Tensor | None,
) -> Rows:
    """Which rows to walk. The call's only host sync is here; with compact=False there is none and every row is walked.

    Then the host knows of packed sequences only how many there are: the caller makes one group of all of them.
    """
    N, device = supervised.shape[0], supervised.device
    order = sizes = None
    chosen, uncovered = 0, bad.new_zeros(())
    if cu_seqlens is not None:
        uncovered = ((cu_seqlens[0] != 0) | (cu_seqlens[-1] != N) | (cu_seqlens.diff() < 0).any()).long()
        cu_seqlens = cu_seqlens.clamp(0, N)  # so that nothing reads beyond the tokens before that is known
    divided = 1 < roles < sequences  # into groups whose rows do not lie side by side
    if grouped or sequences:
        half = N // 2 if cu_seqlens is None else cu_seqlens[sequences // 2]
        chosen = (supervised & (torch.arange(N, device=device) < half)).sum()
        if cu_seqlens is None:
            length = N // sequences
            per_sequence = supervised.view(sequences, length)
            counts = per_sequence.sum(1) if compact else torch.full((sequences,), length, device=device)
            if divided:
                order = torch.arange(N, device=device).view(roles, sequences // roles, length).transpose(0, 1).reshape(-1)
        else:
            ends = torch.cat((supervised.new_zeros(1, dtype=torch.int64), supervised.cumsum(0)))
            counts = ends[cu_seqlens[1:]] - ends[cu_seqlens[:-1]] if compact else cu_seqlens.diff()
            if divided:
                number = torch.searchsorted(cu_seqlens[1:], torch.arange(N, device=device), right=True)
                groups = sequences // roles
                order = torch.argsort(number % groups * roles + number // groups, stable=True)
        sizes = counts.view(roles, -1).t().reshape(-1)
    if not compact:
        torch._assert_async(bad == 0, f"targets: expected ids in [0, {V}) or ignore_index, got ids outside; fix the labels.")
        torch._assert_async(uncovered == 0, f"cu_seqlens: expected rising boundaries from 0 to {N}, got others; let them cover hidden.")
        if sizes is None:
            return Rows(N, supervised.sum(), chosen, order, None, None)
        groups = sequences // roles
        return Rows(N, supervised.sum(), chosen, order, [N // groups] * groups if grouped else None, sizes, roles)

    read = torch.stack((supervised.sum(), bad, uncovered))
    if sizes is not None:
        read = torch.cat((read, chosen[None], sizes.view(-1, roles).sum(1)))
    count, wrong, gaps, *more = read.tolist()
    expect(not wrong, "targets", f"ids in [0, {V}) or ignore_index", f"{wrong} outside", "fix the labels or set ignore_index")
    expect(not gaps, "cu_seqlens", f"rising boundaries from 0 to {N}", "others", "let them cover every token of hidden once")
    chosen, *group_sizes = more or [0]
    index = order
    if count < N:
        index = torch.nonzero_static(supervised if order is None else supervised[order], size=count)[:, 0]
        index = index if order is None else order[index]
    return Rows(count, count, chosen, index, group_sizes if grouped else None, sizes, roles)
