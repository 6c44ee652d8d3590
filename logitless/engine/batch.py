"""`TokenStats` and `Batch`, the arguments of `TokenLoss.terms`: statistics and inputs of a slice of rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from logitless.engine.segments import Segments, cached_property
from logitless.errors import type_error, value_error
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, WholeVocabulary

# Larger than every position in a sequence.
LARGEST_POSITION = 2**40


class TokenStats:
    """Per-token statistics (n,) of the logits, in fp32 (fp64 for fp64 logits).

    Reading a statistic that the loss does not declare raises AttributeError.

    Attributes:
        logps: log-probabilities of the targets. Always available.
        lse: log-sum-exp of the logits. Always available.
        lse_residual: rounding error of lse. exp((z - lse) - lse_residual) is accurate even if lse is large.
            Always available.
        entropy: entropy of the distribution, in nats.
        is_top1: 1 if the target has the largest logit, else 0.
        sum_logits: sum of the logits, weighted by the vocabulary input that `sum_logits_weights` of the loss
            names.
        log_sum_sq_probs: log of the sum of the squared probabilities.
    """

    logps: Tensor
    lse: Tensor
    lse_residual: Tensor
    entropy: Tensor
    is_top1: Tensor
    sum_logits: Tensor
    log_sum_sq_probs: Tensor

    if not TYPE_CHECKING:  # a type checker reports undeclared attributes itself

        def __getattr__(self, name: str) -> Tensor:
            if name not in TokenStats.__annotations__:
                known = ", ".join(TokenStats.__annotations__)
                raise AttributeError(f"stats: expected one of {known}, got {name}; name one of these.")
            raise AttributeError(
                f"{name}: expected a statistic that the loss declares, got an undeclared one; add {name!r} "
                "to `observes`, or to `differentiates` if the loss depends on it."
            )


class Batch:
    """A slice of n rows of a call. The declared inputs of the loss are attributes, cut to these rows.

    Attributes:
        targets: (n,) int64 token ids; 0 in ignored rows.
        V: size of the vocabulary.
        supervised: (n,) bool.
        ignored: (n,) bool; None if every row is supervised.
        lengths: (sequences,) number of supervised tokens in each sequence of the slice.
        positions: (n,) number of supervised tokens that precede each token in its sequence. With `cp_group`,
            the loss must declare `position_ids` in `prediction_inputs`, the position of each token in its
            whole sequence.
        is_chosen: (n,) bool, whether a token's sequence is in the first half of the sequences.
        teacher_logits: (n, V'), if the loss declares a teacher.
        ref_logps: (n,) log-probabilities under the reference model, if the loss declares a reference.
    """

    V: int
    teacher_logits: Tensor
    ref_logps: Tensor

    def __init__(
        self,
        targets: Tensor,
        V: int,
        inputs: Mapping[str, Tensor | None],
        segments: Segments | None = None,
        *,
        ignore_index: int | None = None,  # None if every row of the slice is supervised
        vocabulary: WholeVocabulary | None = None,
        sequences: WholeSequences | None = None,
    ):
        self.given_targets = targets  # with `ignore_index` in ignored rows
        self.V = V
        self.segments = segments
        # These are not default arguments, because Dynamo does not trace defaults that are instances of these
        # classes.
        self.vocabulary = vocabulary or WHOLE_VOCABULARY
        self._sequences = sequences or WHOLE_SEQUENCES
        self.ignore_index = ignore_index
        if ignore_index is None:
            self.ignored = None
        self.names = tuple(inputs)
        self.absent = tuple([name for name, x in inputs.items() if x is None])
        for name, value in inputs.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # tells type checkers that declared inputs are attributes
        raise AttributeError(
            f"{name}: expected an input that the loss declares, got an undeclared one; add {name!r} to "
            "`token_inputs` or a similar declaration, and pass it to the call."
        )

    @property
    def shows_shapes(self) -> bool:
        """Whether a wrong shape of a term is detectable in this slice.

        The slice must have several rows and, for a loss of sequences, at least two pairs of sequences.
        """
        return self.given_targets.shape[0] > 1 and (self.segments is None or self.segments.count > 3)

    @cached_property
    def ignored(self) -> Tensor | None:
        return self.given_targets == self.ignore_index

    @cached_property
    def targets(self) -> Tensor:
        # An index of the vocabulary in every row, so that `terms` may use it as one.
        targets = self.given_targets
        return targets if self.ignored is None else targets.masked_fill(self.ignored, 0)

    @cached_property
    def supervised(self) -> Tensor:
        if self.ignored is None:
            return torch.ones_like(self.given_targets, dtype=torch.bool)
        return ~self.ignored

    # Sequences.

    @property
    def own_segments(self) -> Segments:
        """The sequences in the slice; TypeError for a loss of scope "token"."""
        if self.segments is None:
            raise type_error(
                "scope",
                "'group' or 'batch' for a loss whose `terms` uses sequences",
                "'token'",
                "declare it in the class",
            )
        return self.segments

    def total(self, x: Tensor) -> Tensor:
        """Sum a 0-d value of this rank's tokens over the ranks of `cp_group`."""
        return self._sequences.sum(x)

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """All-gather (n,) values of tokens over `cp_group`, without gradient.

        The order of the result is arbitrary.
        """
        return self._sequences.all_gather_tokens(x)

    def sum_by_sequence(self, x: Tensor) -> Tensor:
        """(n,) per token -> (sequences,) per sequence, deterministic and differentiable.

        The sequences are in the order of the call: of pairs, all chosen ones, then all rejected ones.
        """
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
        count = self.own_segments.count
        return self.spread(torch.arange(count, device=self.given_targets.device) < count // 2)

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
            positions = torch.arange(segments.rows, device=self.given_targets.device)
            return positions - segments.starts[segments.ids]
        before = torch.cat((self.given_targets.new_zeros(1), (~self.ignored).cumsum(0)))
        return before[:-1] - before[segments.starts][segments.ids]

    def _positions_in_slices(self) -> Tensor:
        """`positions` with `cp_group`, counted in the sorted positions of the tokens of all ranks."""
        name = "position_ids"
        ids = self.own_segments.ids
        position_ids = getattr(self, "position_ids", None)
        expected = "each token's position in its whole sequence, with cp_group"
        if position_ids is None:
            raise value_error(name, expected, None, "declare it in prediction_inputs and pass it")
        first = ids * LARGEST_POSITION
        keys = torch.where(self.supervised, first + position_ids.long(), torch.iinfo(torch.int64).max)
        all_keys = self._sequences.all_gather_tokens(keys).sort().values
        if ((all_keys[1:] == all_keys[:-1]) & (all_keys[1:] < torch.iinfo(torch.int64).max)).any().item():
            raise value_error(
                name,
                expected,
                "duplicate positions",
                "pass positions in the whole sequence, not in this rank's slice",
            )
        return torch.searchsorted(all_keys, keys) - torch.searchsorted(all_keys, first)

    # Reductions over the whole vocabulary, for a `LogitsLoss`. With `tp_group`, `z` is this rank's shard of
    # the columns.

    def log_softmax(self, z: Tensor) -> Tensor:
        """(n, columns) logits -> log-probabilities, normalized over the whole vocabulary."""
        return self.vocabulary.log_softmax(z)

    def summed(self, x: Tensor) -> Tensor:
        """(n,) sums over this rank's columns -> sums over the whole vocabulary."""
        return self.vocabulary.reduce(x)

    def norm(self, z: Tensor) -> Tensor:
        """(n, columns) logits -> (n, 1) Euclidean norms of the rows, over the whole vocabulary.

        For a factor or divisor of the columns, as in `z / batch.norm(z)`: with `tp_group`, each rank has a
        part of its gradient, and the parts are summed. A term of the norms themselves would get its gradient
        once for each rank; use `batch.summed(z.square().sum(-1)).sqrt()` there.
        """
        return self.vocabulary.norm(z)

    def argmax(self, z: Tensor) -> Tensor:
        """(n, columns) logits -> (n,) ids of the largest logits in the whole vocabulary."""
        return self.vocabulary.argmax(z)

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) ids -> (their columns in this rank's logits, else 0; whether an id is on this rank)."""
        return self.vocabulary.locate(ids, self.V)

    @property
    def unit_lengths(self) -> dict[str, int]:
        """The number of values that a term of each unit has."""
        lengths = {"tokens": self.given_targets.shape[0]}
        if self.segments is not None:
            sequences = self.segments.count
            lengths["sequences"] = sequences
            if sequences % 2 == 0:
                lengths["pairs"] = sequences // 2
        return lengths

    def is_of_groups(self, term: Any) -> bool:
        """Whether a `Term` has one value per sequence or pair.

        Determined by the term's unit, because the shape is ambiguous if the slice has as many tokens as
        sequences.
        """
        if self.segments is None:
            return False
        # No question whether the sequences are pairs: a graph serves every number of them.
        sequences = self.segments.count
        length = {"sequences": sequences, "pairs": sequences // 2}.get(term.unit)
        return term.values.shape == (length,)

    def masked(self, terms: Mapping) -> dict:
        """Return `terms` with the per-token values of unsupervised rows set to 0."""
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
