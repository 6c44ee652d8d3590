"""Which decoder layers keep their activations: counted bytes, the ladder of levels, and the plan."""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from logitless.errors import type_error, value_error

LEVELS = ("full", "cheap", "keep")
UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}


def to_bytes(activation_budget: int | str) -> int:
    """Bytes of a budget: a whole number, or text such as "12GiB", "12GB" or "1.5 GiB".

    Raises:
        TypeError: neither a whole number nor text.
        ValueError: text of another form, or nothing positive.
    """
    expected = "a positive number of bytes"
    remedy = 'write "12GiB", or the bytes as a whole number'
    budget = activation_budget
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", budget)
        unit = UNITS.get(match[2].lower()) if match else None
        if unit is None:
            raise value_error("activation_budget", expected, repr(activation_budget), remedy)
        budget = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise type_error("activation_budget", expected, repr(activation_budget), remedy)
    if budget <= 0:
        raise value_error("activation_budget", expected, repr(activation_budget), remedy)
    return budget


def in_gib(number: int) -> str:
    """Bytes as text: GiB, or a smaller unit where GiB would read 0.0."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


@dataclass(frozen=True)
class ActivationPlan:
    """What one training forward pass does with each decoder layer.

    Attributes:
        levels: "full", "cheap" or "keep" of each layer, in the order in which they run.
        bytes: what the layers are expected to hold after the forward pass.
        budget: what this pass may hold: the activation budget, less what other graphs alive hold.
        tokens: in the batch, padding included.
    """

    levels: tuple[str, ...]
    bytes: int
    budget: int
    tokens: int

    def describe(self) -> str:
        """One line: layers, tokens, levels and bytes."""
        kept, cheap, full = (self.levels.count(level) for level in ("keep", "cheap", "full"))
        return (
            f"{len(self.levels)} layers, {self.tokens:,} tokens: {kept} kept, {cheap} cheap, {full} full: "
            f"{in_gib(self.bytes)} of {in_gib(self.budget)}"
        )


# Numbers that attention adds to a sequence at most, for its tiles.
PADDING = 128


class Batch(NamedTuple):
    """Size of a batch: all tokens, and the length of its sequences, padding included."""

    tokens: int
    length: int

    @property
    def is_square(self) -> bool:
        """Whether the number of sequences is their length."""
        return self.tokens == self.length**2


class Rate(NamedTuple):
    """Bytes by how they grow: not at all, with the tokens, with tokens times length (attention scores)."""

    fixed: float
    by_token: float
    by_square: float

    def of(self, batch: Batch) -> int:
        grown = self.by_token * batch.tokens + self.by_square * batch.tokens * batch.length
        # Rates are quotients of whole numbers.
        return math.ceil(self.fixed + grown * (1 - 1e-12))

    def at_least(self, other: "Rate") -> "Rate":
        return Rate(*map(max, self, other))


@dataclass
class Counts:
    """Counted bytes, by what they belong to and by the size of the batch; the largest count of each.

    A size that was counted has its count. Others follow from how storages grow, which their shapes tell:
    unless the number of tokens is one of the model's own sizes, `widths`, so that shapes tell nothing. Then
    the count is taken to grow with the square of the length.
    """

    widths: frozenset[int]
    exact: dict[tuple[Hashable, Batch], int] = field(default_factory=dict)
    rates: dict[Hashable, Rate] = field(default_factory=dict)

    def add(
        self, key: Hashable, batch: Batch, storages: Iterable[tuple[int, tuple[int, ...]]], weights: Iterable
    ) -> None:
        """Count `storages` (bytes and shape). `weights`: shapes that autocast's copies of weights have."""
        storages, weights = list(storages), set(weights)
        total = sum(nbytes for nbytes, _ in storages)
        self.exact[key, batch] = max(total, self.exact.get((key, batch), 0))
        if {batch.tokens, batch.length} & self.widths or batch.is_square:
            return
        fixed = by_token = by_square = 0
        for nbytes, shape in storages:
            if shape in weights or shape[::-1] in weights:
                fixed += nbytes
            elif sum(self._is_length(size, batch) for size in shape) > 1:
                by_square += nbytes
            else:
                by_token += nbytes
        square = batch.tokens * batch.length
        rate = Rate(fixed, by_token / batch.tokens, by_square / square)
        self.rates[key] = rate.at_least(self.rates.get(key, rate))

    def _is_length(self, size: int, batch: Batch) -> bool:
        """Whether a dimension is the sequence's, which attention may pad."""
        return size not in self.widths and batch.length <= size <= batch.length + PADDING

    def bytes(self, key: Hashable, batch: Batch) -> int | None:
        """Bytes for a batch; None where nothing was counted."""
        if (key, batch) in self.exact:
            return self.exact[key, batch]
        if key in self.rates:
            return self.rates[key].of(batch)
        bounds = (
            math.ceil(count * max(1, batch.tokens / seen.tokens) * max(1, batch.length / seen.length))
            for (counted, seen), count in self.exact.items()
            if counted == key
        )
        return min(bounds, default=None)


def ladder(opens: Sequence[bool]) -> Iterator[tuple[int, str]]:
    """Upgrades (layer, level) from all layers full to all layers kept, in their order.

    From the last layer to the first: what is kept there is gone before the first layer is run again. `opens`:
    whether the cheap level of a layer drops anything.
    """
    for layer in reversed(range(len(opens))):
        if opens[layer]:
            yield layer, "cheap"
    for layer in reversed(range(len(opens))):
        yield layer, "keep"


def choose(costs: Sequence[dict[str, int]], shared: int, budget: int) -> tuple[tuple[str, ...], int]:
    """Levels of the layers and their bytes: the longest beginning of the ladder that fits.

    It stops at the first upgrade that does not fit, also where a later one would. So a larger budget has all
    upgrades of a smaller one, and its step takes no longer.
    """
    levels = ["full"] * len(costs)
    total = shared + sum(cost["full"] for cost in costs)
    for layer, level in ladder([cost["cheap"] < cost["keep"] for cost in costs]):
        upgraded = total - costs[layer][levels[layer]] + costs[layer][level]
        if upgraded > budget:
            break
        levels[layer], total = level, upgraded
    return tuple(levels), total
