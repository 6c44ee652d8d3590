"""The reduction of a loss: the factor of each unit's sum, and the sums of a slice in one tensor.

In fp16, the factor of the loss's unit (`loss.unit`) is split into m * 2^e with m in [0.5, 1), and the factors
of all units are divided by 2^e. The backward pass multiplies the gradients by 2^e, which is exact. Therefore
no gradient underflows, even if there are many tokens. Numbers that the host knows stay Python numbers,
because small kernels would delay the first product.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine.call import HeadCall
from logitless.engine.rows import Rows
from logitless.engine.spec import LossSpec
from logitless.engine.terms import GROUPS, Term, Terms
from logitless.errors import value_error
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences

Number = float | Tensor


class Factors(NamedTuple):
    """The factors of the sums over each unit. The key None is for terms with `over=None`."""

    loss: Mapping[str | None, Number] | None  # None with reduction="none"
    metrics: Mapping[str | None, Number]
    num_items_unit: str | None = None  # the unit that `num_items` counts; None: the call has no `num_items`

    def tensors(self, named: Sequence[tuple[str, str | None]], like: Tensor) -> list[Tensor]:
        """The factors of `named`, pairs of ("loss" or "metrics", unit), as 0-d tensors on the device of
        `like`."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        made: dict[float, Tensor] = {}
        tensors = []
        for kind, unit in named:
            x = getattr(self, kind)[unit]
            if not isinstance(x, Tensor):
                if x not in made:
                    made[x] = torch.full((), x, dtype=dtype, device=like.device)
                x = made[x]
            tensors.append(x.to(like.device, dtype))
        return tensors

    def vector(self, like: Tensor) -> Tensor:
        """(k,) all factors, for a compiled function: it would recompile for every Python number."""
        options = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
        values = [*(self.loss or {}).values(), *self.metrics.values()]
        capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing and not any([isinstance(x, Tensor) for x in values]):
            vector = torch.tensor(values, dtype=options["dtype"], device="cpu")
            return vector.to(like.device, non_blocking=True)
        # A CUDA graph would read the host's memory of a copy again.
        return torch.stack(self.tensors(self.units.named, like))

    def divided_by(self, deferred: Number) -> "Factors":
        """The factors, with those of the loss divided by the deferred factor."""
        return self._replace(loss={unit: factor / deferred for unit, factor in self.loss.items()})

    @property
    def units(self) -> "Units":
        loss = None if self.loss is None else tuple(self.loss)
        return Units(loss, tuple(self.metrics), self.num_items_unit)


class Units(NamedTuple):
    """The units of `Factors`, without the factors: a constant of a compiled function."""

    loss: tuple[str | None, ...] | None
    metrics: tuple[str | None, ...]
    num_items_unit: str | None

    @property
    def named(self) -> list[tuple[str, str | None]]:
        """All units in order, each after "loss" or "metrics"."""
        return [("loss", unit) for unit in self.loss or ()] + [("metrics", unit) for unit in self.metrics]

    def of(self, numbers: Tensor | Sequence[Tensor]) -> Factors:
        """The factors, given all numbers in order: `Factors.vector`, or 0-d tensors."""
        first = len(self.loss or ())
        if isinstance(numbers, Tensor):
            numbers = numbers.unbind()
        loss = None if self.loss is None else dict(zip(self.loss, numbers[:first]))
        return Factors(loss, dict(zip(self.metrics, numbers[first:])), self.num_items_unit)


def unit_factors(call: HeadCall, rows: Rows) -> Factors:
    """The factors of a reduced loss and its metrics."""
    loss = call.loss
    counts = unit_counts(rows.tokens, rows.chosen_tokens, call.sequence_count)
    metrics = Inverses(counts, call.stat_dtype)
    if loss.reduction == "sum":
        factors = dict.fromkeys(metrics, call.coefficient)
    else:
        normalizers = loss.normalizers(counts, call.targets, call.inputs)
        if call.num_items is not None:
            normalizers[loss.unit] = call.num_items
        factors = Inverses(normalizers, call.stat_dtype, call.coefficient, known=metrics)
    return Factors(factors, metrics, None if call.num_items is None else loss.unit)


def metric_factors(
    tokens: int | Tensor, chosen_tokens: int | Tensor, sequences: int, dtype: torch.dtype
) -> Factors:
    """The factors with reduction="none", in which only the metrics are reduced."""
    return Factors(None, Inverses(unit_counts(tokens, chosen_tokens, sequences), dtype))


def unit_counts(tokens: int | Tensor, chosen_tokens: int | Tensor, sequences: int) -> dict[str, int | Tensor]:
    """Unit -> the number of these units in a call."""
    return {"tokens": tokens, "sequences": sequences, "pairs": sequences // 2, "chosen_tokens": chosen_tokens}


class Inverses(Mapping):
    """Unit -> coefficient / normalizer, each computed when it is read first. The unit None has no normalizer.

    A normalizer of 0 (an empty sum) is replaced by 1. `known`: the inverses of other normalizers. Those that
    are the same tensor are not inverted again.
    """

    def __init__(
        self,
        normalizers: Mapping[str, Number],
        dtype: torch.dtype,
        coefficient: float = 1.0,
        known: "Inverses | None" = None,
    ):
        self._normalizers = normalizers
        self._dtype = dtype
        self._coefficient = coefficient
        self._known = known
        self._computed: dict[str | None, Number] = {None: coefficient}

    def __getitem__(self, unit: str | None) -> Number:
        if unit not in self._computed:
            self._computed[unit] = self._inverse(unit)
        return self._computed[unit]

    def __iter__(self) -> Iterator[str | None]:
        return iter((None, *self._normalizers))

    def __len__(self) -> int:
        return 1 + len(self._normalizers)

    def _inverse(self, unit: str) -> Number:
        count = self._normalizers[unit]
        coefficient = self._coefficient
        if not isinstance(count, Tensor):
            return coefficient / (count or 1)
        if coefficient == 1.0 and self._known is not None and count is self._known._normalizers.get(unit):
            return self._known[unit]
        if count.is_floating_point():
            count = count.to(self._dtype)
            count = torch.where(count == 0, 1.0, count)
        else:
            count = count.clamp(min=1)
            if self._dtype != torch.get_default_dtype():  # which the reciprocal of an integer has
                count = count.to(self._dtype)
        return count.reciprocal() if coefficient == 1.0 else coefficient / count


def power_of_two(x: Number) -> Number:
    """The smallest power of two above x > 0."""
    if not isinstance(x, Tensor):
        return 2.0 ** math.frexp(x)[1]
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(mantissa), exponent)


# -- The sums of a slice


def reduced(
    terms: Mapping[str, Term], factors: Factors, sequences: WholeSequences = WHOLE_SEQUENCES
) -> Tensor:
    """Return the reduced loss (0-d): the sum over all terms of (sum of the values * factor of the unit).

    Raises:
        ValueError: the call has `num_items`, but no term is over the unit that it counts.
    """
    _check_num_items(terms, factors)
    return _added(list(terms.values()), [term.values.sum() for term in terms.values()], factors, sequences)


def _added(
    terms: Sequence[Term], totals: Sequence[Tensor], factors: Factors, sequences: WholeSequences
) -> Tensor:
    """Add the sums of the terms' values, each multiplied by its factor."""
    first, *remaining = [
        sequences.sum_unless_whole(total * factors.loss[term.over], term.over)
        for term, total in zip(terms, totals, strict=True)
    ]
    return sum(remaining, first)


def _check_num_items(terms: Mapping[str, Term], factors: Factors) -> None:
    unit = factors.num_items_unit
    if unit is not None and all(term.over != unit for term in terms.values()):
        units = ", ".join(sorted({str(term.over) for term in terms.values()}))
        raise value_error(
            "num_items",
            f"None for a loss without a term over {unit!r}, the unit that it counts",
            f"a number with terms over {units}",
            "leave it out, or set `unit` of the loss to the unit of its terms",
        )


class Report(NamedTuple):
    """The sums of a slice: the rows for which `terms` is called once.

    Attributes:
        table: (1 + metrics,) or (1 + 2 * metrics,), without gradient. The reduced loss, up to the deferred
            factor (0 with reduction="none"). For each metric, the sum of its values, times the factor of its
            unit. If any metric has its own weights (`over` is a tensor): for each metric, the sum of its
            weights, 0 if it has none.
        whole: with `cp_group`, for each entry whether it is equal on all ranks; (): no entry is.
    """

    table: Tensor
    whole: tuple[bool, ...] = ()


def report(
    loss: LossSpec,
    result: Terms,
    factors: Factors,
    sequences: WholeSequences = WHOLE_SEQUENCES,
) -> Report:
    """Reduce the terms and the metrics of a slice.

    Args:
        loss: the loss.
        result: what its `terms` returned.
        factors: the factors of the call.
        sequences: over which ranks the loss is summed now.
    """
    table, whole = _entries(loss, result, factors, sequences)
    return Report(torch.stack(table), whole)


def fused_report(loss: LossSpec, result: Terms, factors: Factors) -> Report:
    """`report` for a compiled function, which fuses these operations: `torch.stack` would take one kernel for
    each entry."""
    first, *others = _entries(loss, result, factors, WHOLE_SEQUENCES)[0]
    if not others:
        return Report(torch.stack([first]))  # not a view, which autograd would refuse to change in place
    index = torch.arange(1 + len(others), device=first.device)
    table = first.expand(1 + len(others))
    for number, entry in enumerate(others, 1):
        table = torch.where(index == number, entry, table)
    return Report(table)


def _entries(
    loss: LossSpec, result: Terms, factors: Factors, sequences: WholeSequences
) -> tuple[list[Tensor], tuple[bool, ...]]:
    """The entries of the table of a `Report`, 0-d tensors, and its `whole`."""
    named, metrics = result
    terms = [] if factors.loss is None else list(named.values())
    if terms:
        _check_num_items(named, factors)
    metrics = [metrics[name] for name in loss.metric_names]
    weights = [term.over for term in metrics if isinstance(term.over, Tensor)]
    values = [term.values for term in (*terms, *metrics)] + weights
    values = [x.detach() if x.requires_grad else x for x in values]
    totals = [x.sum() for x in values]
    count = len(terms)
    zero = None
    if weights or not terms:
        zero = next(iter(named.values())).values.new_zeros(())
    table = [_added(terms, totals[:count], factors, sequences) if terms else zero]
    for term, total in zip(metrics, totals[count:]):
        factor = 1.0 if isinstance(term.over, Tensor) else factors.metrics[term.over]
        table.append(total if isinstance(factor, float) and factor == 1.0 else total * factor)
    if weights:
        own = iter(totals[count + len(metrics) :])
        table += [next(own) if isinstance(term.over, Tensor) else zero for term in metrics]
    whole = ()
    if sequences.sliced:
        whole = (True, *[isinstance(term.over, str) and term.over in GROUPS for term in metrics])
        whole += (False,) * (len(table) - len(whole))
    return table, whole


def settled(loss: LossSpec, reports: Sequence[Report], dtype: torch.dtype) -> Tensor:
    """Combine all slices of a call: (1 + metrics,), the loss up to the deferred factor, then the metrics.

    A metric is not divided by a sum of weights that is 0. The result has the dtype of the statistics
    (`dtype`); the sums of a `LogitsLoss` are wider if `logits_dtype` is.
    """
    tables = [x.table for x in reports]
    table = tables[0] if len(tables) == 1 else torch.stack(tables).sum(0)
    table = table.to(dtype)
    sequences = loss.sequences
    if sequences.sliced:
        # One all-reduce, after the loop, because ranks may have different numbers of chunks. Both sums of a
        # metric with its own weights are all-reduced, so that their ratio is that of the whole call.
        summed = sequences.sum(table)
        whole = reports[0].whole
        if whole:
            pairs = zip(table.unbind(), summed.unbind(), whole, strict=True)
            summed = torch.stack([one if is_whole else other for one, other, is_whole in pairs])
        table = summed
    count = 1 + len(loss.metric_names)
    if table.shape[0] > count:
        weights = table[count:]
        means = table[1:count] / (weights + (weights == 0))
        table = torch.cat((table[:1], means))
    return table
