"""What a loss sees beside the numbers of its tokens: the inputs of a call, cut to a slice of its rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from logitless.engine.segments import Segments, cached_property
from logitless.errors import expect
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, WholeVocabulary

# Above every position in a sequence.
LARGEST_POSITION = 2**40


class TokenStats:
    """Per-token numbers (n,) of the logits, in fp32 (fp64 for fp64 logits).

    Reading one that the loss does not declare raises.

    Attributes:
        logps: log-probabilities of the targets. Always there.
        lse: log-sum-exp of the logits. Always there.
        lse_residual: what rounding left out of lse: exp((z - lse) - lse_residual) is exact also where lse is
            large.
        entropy: of the distribution, in nats.
        sum_logits: the sum of the logits, with the loss's weights where it has them.
        log_sum_sq_probs: log of the sum of the squared probabilities.
        is_top1: 1 where the target has the largest logit, else 0.
    """

    logps: Tensor
    lse: Tensor
    lse_residual: Tensor
    entropy: Tensor
    sum_logits: Tensor
    log_sum_sq_probs: Tensor
    is_top1: Tensor

    if not TYPE_CHECKING:  # for a checker, other names are errors

        def __getattr__(self, name: str) -> Tensor:
            if name not in TokenStats.__annotations__:
                known = ", ".join(TokenStats.__annotations__)
                raise AttributeError(f"stats: expected one of {known}, got {name}; name one of these.")
            raise AttributeError(
                f"{name}: expected a statistic that the loss declares, got an undeclared one; add {name!r} "
                "to `observes`, or to `differentiates` if the loss depends on it."
            )


class Batch:
    """The slice of a call that a loss is looking at. Its declared inputs are attributes, cut to match it.

    Attributes:
        targets: (n,) int64 token ids.
        V: size of the vocabulary.
        supervised: (n,) bool.
        ignored: (n,) bool; None where every row is supervised.
        lengths: (sequences,) supervised tokens of each sequence in the slice.
        positions: (n,) how many supervised tokens of its sequence come before each. Where ranks have slices
            of the sequences, the loss must declare `position_ids` in `prediction_inputs`: each token's
            position in its whole sequence.
        is_chosen: (n,) bool, whether a token's sequence is of the first half.
        teacher_logits: (n, V'), where the loss declares a teacher.
        ref_logps: (n,) log-probabilities under the reference model, where the loss declares one.
    """

    targets: Tensor
    V: int
    ignored: Tensor | None
    teacher_logits: Tensor
    ref_logps: Tensor

    def __init__(
        self,
        targets: Tensor,
        V: int,
        inputs: Mapping[str, Tensor | None],
        segments: Segments | None = None,
        *,
        ignore_index: int | None = None,  # None where every row of the slice is supervised
        vocabulary: WholeVocabulary | None = None,
        sequences: WholeSequences | None = None,
    ):
        self.targets, self.V, self.segments = targets, V, segments
        # Not as defaults: Dynamo does not trace those of a class of ours.
        self.vocabulary, self._sequences = vocabulary or WHOLE_VOCABULARY, sequences or WHOLE_SEQUENCES
        self.ignored = None if ignore_index is None else targets == ignore_index
        self.absent = tuple(name for name, x in inputs.items() if x is None)
        for name, value in inputs.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # as far as a checker knows, a declared input
        raise AttributeError(
            f"{name}: expected an input that the loss declares, got an undeclared one; add {name!r} to "
            "`token_inputs` or its like, and pass it to the call."
        )

    @property
    def shows_shapes(self) -> bool:
        """Whether a value per row, per sequence and per pair could be told from a single value here."""
        return self.targets.shape[0] > 1 and (self.segments is None or self.segments.lengths.shape[0] > 3)

    @cached_property
    def supervised(self) -> Tensor:
        return torch.ones_like(self.targets, dtype=torch.bool) if self.ignored is None else ~self.ignored

    # Sequences.

    @property
    def own_segments(self) -> Segments:
        """The sequences in the slice, where the loss asks for any."""
        if self.segments is None:
            expected, remedy = "'group' or 'batch' where terms looks at sequences", "declare it in the class"
            expect(False, "scope", expected, "'token'", remedy, TypeError)
        return self.segments

    def total(self, x: Tensor) -> Tensor:
        """0-d, of this rank's tokens -> of the tokens of whole sequences."""
        return self._sequences.sum(x)

    def everyones(self, x: Tensor) -> Tensor:
        """(n,) of this rank's tokens -> of the tokens of whole sequences, in any order; without gradient."""
        return self._sequences.everyones(x)

    def sum_by_sequence(self, x: Tensor) -> Tensor:
        """(n,) per token -> (sequences,) per sequence, deterministic and differentiable."""
        return self._sequences.sum(self._own_sums(x))

    def spread(self, x: Tensor) -> Tensor:
        """(sequences,) per sequence -> (n,) per token; the transpose of `sum_by_sequence`."""
        return self.own_segments.spread(self._sequences.shared(x))

    @cached_property
    def lengths(self) -> Tensor:
        return self._sequences.sum(self._own_lengths)

    @cached_property
    def positions(self) -> Tensor:
        return self._positions_in_slices() if self._sequences.sliced else self._own_positions

    @cached_property
    def is_chosen(self) -> Tensor:
        count = self.own_segments.lengths.shape[0]
        return self.spread(torch.arange(count, device=self.own_segments.lengths.device) < count // 2)

    def _own_sums(self, x: Tensor) -> Tensor:
        return self.own_segments.sum(x if self.ignored is None else x.masked_fill(self.ignored, 0.0))

    @cached_property
    def _own_lengths(self) -> Tensor:
        if self.ignored is None:
            return self.own_segments.to_sequence_order(self.own_segments.lengths)
        return self._own_sums((~self.ignored).float())

    @cached_property
    def _own_positions(self) -> Tensor:
        segments = self.own_segments
        if self.ignored is None:
            return torch.arange(segments.rows, device=segments.lengths.device) - segments.starts[segments.ids]
        before = torch.cat((self.targets.new_zeros(1), (~self.ignored).cumsum(0)))
        return before[:-1] - before[segments.starts][segments.ids]

    def _positions_in_slices(self) -> Tensor:
        """Ranks of the tokens among all ranks' supervised tokens of their sequences."""
        name, ids, given = "position_ids", self.own_segments.ids, getattr(self, "position_ids", None)
        expected = "each token's position in its whole sequence, with cp_group"
        expect(given is not None, name, expected, None, "declare it in prediction_inputs and pass it")
        first = ids * LARGEST_POSITION
        own = torch.where(self.supervised, first + given.long(), torch.iinfo(torch.int64).max)
        known = self._sequences.everyones(own).sort().values
        twice = (known[1:] == known[:-1]) & (known[1:] < torch.iinfo(torch.int64).max)
        got, remedy = "some of them twice", "count through the sequence, not through this rank's slice"
        expect(not twice.any().item(), name, expected, got, remedy)
        return torch.searchsorted(known, own) - torch.searchsorted(known, first)

    # What a function of logits needs of the whole vocabulary, also where `z` is a rank's shard of it
    # (`vocab_parallel`).

    def log_softmax(self, z: Tensor) -> Tensor:
        """(n, columns) logits -> log-probabilities, normalized over the whole vocabulary."""
        return self.vocabulary.log_softmax(z)

    def summed(self, x: Tensor) -> Tensor:
        """(n,) sums over the columns that this rank has -> over the whole vocabulary."""
        return self.vocabulary.reduce(x)

    def norm(self, z: Tensor) -> Tensor:
        """(n, columns) logits -> (n, 1) Euclidean lengths of their rows, over the whole vocabulary."""
        return self.vocabulary.norm(z)

    def argmax(self, z: Tensor) -> Tensor:
        """(n, columns) logits -> (n,) the id of the largest in the whole vocabulary."""
        return self.vocabulary.argmax(z)

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) ids -> their columns of the logits, 0 where this rank has none, and whether it has one."""
        return self.vocabulary.find(ids, self.V)

    @property
    def unit_lengths(self) -> dict[str, int]:
        """How many values a term of each unit has."""
        lengths = {"tokens": self.targets.shape[0]}
        if self.segments is not None:
            sequences = self.segments.lengths.shape[0]
            lengths["sequences"] = sequences
            if sequences % 2 == 0:
                lengths["pairs"] = sequences // 2
        return lengths

    def is_of_groups(self, term: Any) -> bool:
        """Whether a `Term` has a value per sequence or pair, also where there are as many tokens."""
        return term.unit != "tokens" and term.values.shape == (self.unit_lengths.get(term.unit),)

    def masked(self, terms: Mapping) -> dict:
        """Terms with the per-token values of unsupervised rows set to zero."""
        if self.ignored is None:
            return dict(terms)

        def mask(x: object) -> object:
            per_token = isinstance(x, Tensor) and x.shape == self.ignored.shape
            return torch.where(self.ignored, 0.0, x) if per_token else x

        return {
            name: term
            if self.is_of_groups(term)
            else term._replace(values=mask(term.values), over=mask(term.over))
            for name, term in terms.items()
        }
