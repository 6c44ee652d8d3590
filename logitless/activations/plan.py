"""The activation plan: which level each decoder layer gets, from counted bytes and a budget."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LEVELS = ("full", "cheap", "keep")


def format_bytes(nbytes: int) -> str:
    """Return bytes as text, in the largest unit of which there is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class ActivationPlan:
    """The level of each decoder layer in one training forward pass.

    Attributes:
        levels: "full", "cheap" or "keep" for each layer, in the order in which they run.
        bytes: bytes that the layers are expected to hold after the forward pass.
        budget: bytes that this pass may hold: the activation budget, less the bytes that other live graphs
            hold.
        tokens: number of tokens in the batch, padding included.
    """

    levels: tuple[str, ...]
    bytes: int
    budget: int
    tokens: int

    def describe(self) -> str:
        """Return one line: layers, tokens, levels and bytes."""
        kept, cheap, full = (self.levels.count(level) for level in ("keep", "cheap", "full"))
        return (
            f"{len(self.levels)} layers, {self.tokens:,} tokens: {kept} kept, {cheap} cheap, {full} full: "
            f"{format_bytes(self.bytes)} of {format_bytes(self.budget)}"
        )


# Attention pads a sequence to a multiple of its tile size, by at most this many positions.
MAX_PADDING = 128


class BatchSize(NamedTuple):
    """Size of a batch, padding included: number of tokens, and length of a sequence."""

    tokens: int
    length: int

    @property
    def is_square(self) -> bool:
        """Whether the number of sequences equals their length."""
        return self.tokens == self.length**2


class Rate(NamedTuple):
    """Bytes `fixed + per_token * tokens + per_pair * tokens * length`; attention scores grow per pair."""

    fixed: float
    per_token: float
    per_pair: float

    def bytes_for(self, batch: BatchSize) -> int:
        growing = self.per_token * batch.tokens + self.per_pair * batch.tokens * batch.length
        # Rates are quotients of whole numbers.
        return math.ceil(self.fixed + growing * (1 - 1e-12))

    def maximum(self, other: "Rate") -> "Rate":
        return Rate(*map(max, self, other))


@dataclass
class Counts:
    """The largest counted bytes for each key and batch size.

    A key is what the bytes belong to, such as a kind of layer at a level. For a batch size that was not
    counted, bytes are predicted from the shapes of the counted storages, which show what grows with the
    tokens and what with tokens times length. If the number of tokens or the length equals one of
    `model_sizes`, or the number of sequences equals their length, shapes do not show it; the prediction is
    then an upper bound: all counted bytes grow with tokens times length.

    Attributes:
        model_sizes: sizes of the model, such as the hidden size.
        exact: (key, batch) -> bytes.
        rates: key -> `Rate`, from the counts whose shapes show how the bytes grow.
    """

    model_sizes: frozenset[int]
    exact: dict[tuple[Hashable, BatchSize], int] = field(default_factory=dict)
    rates: dict[Hashable, Rate] = field(default_factory=dict)

    def add(
        self,
        key: Hashable,
        batch: BatchSize,
        storages: Iterable[tuple[int, tuple[int, ...]]],
        weight_shapes: Iterable,
    ) -> None:
        """Record the bytes of `storages` (bytes, shape).

        Storages with a shape of `weight_shapes` are autocast's copies of weights, whose bytes do not grow.
        """
        storages, weight_shapes = list(storages), set(weight_shapes)
        total = sum(nbytes for nbytes, _ in storages)
        self.exact[key, batch] = max(total, self.exact.get((key, batch), 0))
        if {batch.tokens, batch.length} & self.model_sizes or batch.is_square:
            return
        fixed = per_token = per_pair = 0
        for nbytes, shape in storages:
            if shape in weight_shapes or shape[::-1] in weight_shapes:
                fixed += nbytes
            elif sum(self._is_length(size, batch) for size in shape) > 1:
                per_pair += nbytes
            else:
                per_token += nbytes
        square = batch.tokens * batch.length
        rate = Rate(fixed, per_token / batch.tokens, per_pair / square)
        self.rates[key] = rate.maximum(self.rates.get(key, rate))

    def _is_length(self, size: int, batch: BatchSize) -> bool:
        """Whether `size` is the length of the sequences, which attention may have padded."""
        return size not in self.model_sizes and batch.length <= size <= batch.length + MAX_PADDING

    def predict(self, key: Hashable, batch: BatchSize) -> int | None:
        """Return the counted or predicted bytes for a batch size; None if the key was never counted."""
        if (key, batch) in self.exact:
            return self.exact[key, batch]
        if key in self.rates:
            return self.rates[key].bytes_for(batch)
        bounds = (
            math.ceil(
                count
                * max(1, batch.tokens / counted_batch.tokens)
                * max(1, batch.length / counted_batch.length)
            )
            for (counted_key, counted_batch), count in self.exact.items()
            if counted_key == key
        )
        return min(bounds, default=None)


def upgrades(is_cheap_smaller: Sequence[bool]) -> Iterator[tuple[int, str]]:
    """Yield the upgrades (layer, new level) that lead from all layers "full" to all layers "keep".

    A layer at level "full" is recomputed from its inputs, at "cheap" only the outputs of fused operators are
    recomputed, and at "keep" nothing is. Each level is given to the last layer first: its tensors are freed
    before the first layer is recomputed.

    Args:
        is_cheap_smaller: for each layer, whether it holds less at "cheap" than at "keep". If False, the layer
            has no upgrade to "cheap": it goes from "full" to "keep".
    """
    for layer in reversed(range(len(is_cheap_smaller))):
        if is_cheap_smaller[layer]:
            yield layer, "cheap"
    for layer in reversed(range(len(is_cheap_smaller))):
        yield layer, "keep"


def choose_levels(costs: Sequence[dict[str, int]], shared: int, budget: int) -> tuple[tuple[str, ...], int]:
    """Return the level of each layer and the bytes of all: as many of the `upgrades` as fit into the budget.

    Stops at the first upgrade that does not fit, even if a later one would. Therefore a larger budget has all
    upgrades of a smaller one, and recomputes no more.

    Args:
        costs: for each layer, a dict from level to bytes.
        shared: bytes that all layers share.
        budget: bytes that the layers may hold.
    """
    levels = ["full"] * len(costs)
    total = shared + sum(cost["full"] for cost in costs)
    for layer, level in upgrades([cost["cheap"] < cost["keep"] for cost in costs]):
        upgraded = total - costs[layer][levels[layer]] + costs[layer][level]
        if upgraded > budget:
            break
        levels[layer], total = level, upgraded
    return tuple(levels), total
