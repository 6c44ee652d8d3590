"""`Term`, the unreduced values that a loss returns; their checks, reduction and derivative."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.local_autograd import gradients_of, recorded
from logitless.engine.remembered import Remembered
from logitless.errors import type_error, value_error, warn
from logitless.kernels.head.sums import sums
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences

if TYPE_CHECKING:
    from logitless.engine.spec import LossSpec

UNITS = ("tokens", "sequences", "pairs", "chosen_tokens")
# Units that consist of several tokens.
GROUPS = ("sequences", "pairs")


class Term(NamedTuple):
    """Unreduced values of a part of a loss or of a metric, and the divisor of their sum.

    Attributes:
        values: (n,), one value per row of the slice. If the scope of the loss is not "token", (sequences,)
            and (pairs,) are also allowed. 0-d only with `over=None`. The engine sums the values over the
            call.
        over: the divisor of the sum. "tokens", "sequences", "pairs" or "chosen_tokens" (tokens of the first
            half of the sequences): the number of these units in the call. None: 1. In a metric, it can also
            be a tensor of weights in the shape of `values`, such as a mask: the divisor is then the sum of
            the weights over the call.
        of: the unit of `values`, if the scope of the loss is not "token": "tokens", "sequences" or "pairs".
            None: `over` if it is "sequences" or "pairs", else "tokens"; with a warning if the shape of the
            values contradicts this unit.
    """

    values: Tensor
    over: str | Tensor | None = "tokens"
    of: str | None = None

    @property
    def unit(self) -> str:
        """The unit of the values: "tokens", "sequences" or "pairs"."""
        if self.of is not None:
            return self.of
        return self.over if isinstance(self.over, str) and self.over in GROUPS else "tokens"


# Statistics that are available without declaration.
ALWAYS_THERE = ("logps", "lse", "lse_residual")
# The result of `LinearLoss.terms`: (parts of the loss by name, metrics by name).
Terms = tuple[Mapping[str, Term], Mapping[str, Term]]
# Unit -> the factor of the sum. The key None is for terms with `over=None`.
Factors = Mapping[str | None, float | Tensor]
# Sums of the metrics of a slice: the rows for which `terms` is called once. A key is a unit followed by the
# names of the metrics over this unit, and the value is their sums (metrics,). For the unit OWN the value is
# (2, metrics): the sums of the values, and the sums of the weights.
Sums = Mapping[tuple[str | None, ...], Tensor]
# The unit of metrics whose `over` is a tensor of weights.
OWN = "weights of its own"


class UnitFactors(NamedTuple):
    """The factors of the loss's terms and of the metrics."""

    loss: Factors | None  # None with reduction="none"
    metrics: Factors
    num_items_unit: str | None = None  # the unit that `num_items` counts; None: the call has no `num_items`

    def tensors(self, like: Tensor) -> "UnitFactors":
        """Return the factors as 0-d tensors: a compiled function recompiles for every Python number."""
        options = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}

        def convert(factors: Factors | None) -> Factors | None:
            if factors is None:
                return None
            # torch.full fills on the device. Copying a number from the host would be a host sync.
            return {
                unit: x.to(**options) if isinstance(x, Tensor) else torch.full((), x, **options)
                for unit, x in factors.items()
            }

        return self._replace(loss=convert(self.loss), metrics=convert(self.metrics))


def reduced(
    terms: Mapping[str, Term], factors: UnitFactors, sequences: WholeSequences = WHOLE_SEQUENCES
) -> Tensor:
    """Return the reduced loss (0-d): the sum over all terms of (sum of the values * factor of the unit).

    Raises:
        ValueError: the call has `num_items`, but no term is over the unit that it counts.
    """
    if factors.num_items_unit is not None:
        _check_num_items(terms, factors)
    first, *remaining = [
        sequences.sum_unless_whole(term.values.sum() * factors.loss[term.over], term.over)
        for term in terms.values()
    ]
    return sum(remaining, first)


def _check_num_items(terms: Mapping[str, Term], factors: UnitFactors) -> None:
    unit = factors.num_items_unit
    if all(term.over != unit for term in terms.values()):
        units = ", ".join(sorted({str(term.over) for term in terms.values()}))
        raise value_error(
            "num_items",
            f"None for a loss without a term over {unit!r}, the unit that it counts",
            f"a number with terms over {units}",
            "leave it out, or set `unit` of the loss to the unit of its terms",
        )


class _Table:
    """Sums of tensors without gradient, computed in one launch for all tensors of the same length.

    Args:
        values: the tensors to sum. `take` and `take_one` return their sums in this order.
    """

    def __init__(self, values: Sequence[Tensor]):
        alike: dict[tuple, list[Tensor]] = {}
        for x in values:
            alike.setdefault((x.dtype, x.shape), []).append(x.detach() if x.requires_grad else x)
        self._sums = {kind: sums(xs) if kind[1] else torch.stack(xs) for kind, xs in alike.items()}
        self._taken = dict.fromkeys(self._sums, 0)

    def take(self, values: Sequence[Tensor]) -> Tensor:
        """(m,) the sums of the next m tensors."""
        kinds = {(x.dtype, x.shape) for x in values}
        if len(kinds) > 1:
            return torch.stack([self.take_one(x) for x in values])
        (kind,) = kinds
        sums = self._sums[kind]
        start = self._taken[kind]
        self._taken[kind] += len(values)
        return sums if sums.shape[0] == len(values) else sums[start : start + len(values)]

    def take_one(self, value: Tensor) -> Tensor:
        """() the sum of the next tensor."""
        kind = value.dtype, value.shape
        self._taken[kind] += 1
        return self._sums[kind][self._taken[kind] - 1]


def _by_unit(metrics: Mapping[str, Term]) -> dict[tuple[str | None, ...], list[Tensor]]:
    """Return the tensors to sum for the metrics of each unit, with the keys of `Sums`."""
    names: dict[str | None, list[str]] = {}
    for name, term in metrics.items():
        names.setdefault(OWN if isinstance(term.over, Tensor) else term.over, []).append(name)
    tensors = {}
    for unit, chosen in names.items():
        tensors[unit, *chosen] = [metrics[name].values for name in chosen]
        if unit == OWN:
            tensors[unit, *chosen] += [metrics[name].over for name in chosen]
    return tensors


def metric_sums(metrics: Mapping[str, Term]) -> Sums:
    """Return the sums of the metrics of a slice, computed by PyTorch operations.

    For code that torch.compile may trace: it cannot launch our kernels and must not specialize on a shape.
    """
    sums = {}
    for (unit, *names), values in _by_unit(metrics).items():
        first = values[0].detach()
        if len(values) == 1:
            total = first.sum().view(1)
        elif first.dim() and all(x.shape == first.shape for x in values):
            total = torch.stack([x.detach() for x in values]).sum(1)
        else:
            total = torch.stack([x.detach().sum() for x in values])
        sums[unit, *names] = total.view(2, -1) if unit == OWN else total
    return sums


def reported(
    result: Terms, factors: UnitFactors, sequences: WholeSequences = WHOLE_SEQUENCES
) -> tuple[Tensor, Sums]:
    """Return (reduced loss of a slice, as in `reduced`; sums of its metrics), without gradient."""
    terms, metrics = result
    if factors.num_items_unit is not None:
        _check_num_items(terms, factors)
    units = _by_unit(metrics)
    losses = [term.values for term in terms.values()]
    table = _Table([*(x for values in units.values() for x in values), *losses])
    sums = {
        key: table.take(values).view(2, -1) if key[0] == OWN else table.take(values)
        for key, values in units.items()
    }
    first, *remaining = [
        sequences.sum_unless_whole(table.take_one(term.values) * factors.loss[term.over], term.over)
        for term in terms.values()
    ]
    return sum(remaining, first), sums


def differentiated(
    evaluate: Callable[[dict[str, Tensor]], Terms], variables: Mapping[str, Tensor], factors: UnitFactors
) -> tuple[dict[str, Tensor], Terms]:
    """Return (gradients of the reduced loss with respect to `variables`, result of `evaluate`).

    The backward pass starts at the values of each term, with the factor of the unit as upstream gradient.
    Therefore the reduction over the ranks of `cp_group` is not differentiated, and every rank gets the
    gradient with respect to its tokens.
    """
    leaves, result = recorded(evaluate, variables)
    terms = [term for term in result[0].values() if term.values.requires_grad]
    upstream = [_spread(factors.loss[term.over], term.values) for term in terms]
    return gradients_of([term.values for term in terms], upstream, leaves), result


def _spread(factor: float | Tensor, values: Tensor) -> Tensor:
    """Expand the factor to the shape of `values`."""
    if not isinstance(factor, Tensor):
        factor = values.new_full((), factor)
    return factor.to(values.dtype).expand(values.shape)


def means(
    shares: Sequence[Sums], factors: Factors, sequences: WholeSequences = WHOLE_SEQUENCES
) -> dict[str, Tensor]:
    """Compute the metrics of a call from the sums of its slices. A metric is 0 if its divisor is 0."""
    metrics = {}
    for unit, *names in shares[0] if shares else ():
        # If a metric has its own weights (`over` is a tensor, the unit OWN), the sum of its values and the
        # sum of its weights are both all-reduced over `cp_group`. Values per sequence are replicated on all
        # ranks, so both sums are multiplied by the number of ranks, and their ratio is unchanged.
        first, *remaining = [share[unit, *names] for share in shares]
        total = sequences.sum_unless_whole(sum(remaining, first), unit)
        if unit == OWN:
            total, weights = total
            total = total / torch.where(weights == 0, 1.0, weights)
        elif isinstance(factors[unit], Tensor) or factors[unit] != 1.0:
            total = total * factors[unit]
        metrics |= zip(names, total.unbind(), strict=True)
    return metrics


def unreduced(terms: Mapping[str, Term]) -> Tensor:
    """Return the unreduced sum of the terms, which must all have the same unit."""
    units = {term.over for term in terms.values()}
    if len(units) != 1:
        raise value_error(
            "reduction",
            "'mean' or 'sum' for a loss of several units",
            f"'none' with {sorted(map(str, units))}",
            "choose one of these",
        )
    return sum(term.values for term in terms.values())


# (class, identity, names of the inputs that are None) of losses whose terms passed the checks on a slice with
# several rows and units.
_CHECKED = Remembered()


def evaluate_terms(loss: "LossSpec", logits_or_stats: Tensor | Mapping[str, Tensor], batch: Batch) -> Terms:
    """Evaluate `loss.terms` for the logits or the statistics of a slice. Values of unsupervised rows are set
    to 0.

    The shapes of the terms are checked until they have passed for a slice in which every wrong shape is
    detectable.
    """
    if not isinstance(logits_or_stats, Tensor):
        stats = TokenStats()
        declared = (*ALWAYS_THERE, *loss.differentiates, *loss.observes)
        for name, x in logits_or_stats.items():
            # Some kernels compute several statistics together. Pass only those that the loss declares.
            if name in declared:
                setattr(stats, name, x)
        logits_or_stats = stats
    try:
        result = loss.terms(logits_or_stats, batch)
    except Exception as error:
        if batch.absent:
            error.add_note(
                f"In {type(loss).__name__}.terms, these declared inputs are None: {', '.join(batch.absent)}."
            )
        raise
    key = type(loss), loss.identity, batch.absent
    if torch.compiler.is_compiling():
        # While tracing, do not read or change the state of eager calls.
        check_terms(loss, result, batch)
    elif not batch.given_targets.is_meta and key not in _CHECKED:
        check_terms(loss, result, batch)
        if batch.shows_shapes:
            _CHECKED[key] = True
    if batch.ignored is None:
        return result
    terms, metrics = result
    return batch.masked(terms), batch.masked(metrics)


def check_terms(loss: "LossSpec", result: object, batch: Batch) -> None:
    """Raise unless `result` is two dicts of `Term` with one value per row, sequence or pair of the slice."""
    name = type(loss).__name__
    remedy = "return the unreduced parts of the loss and the metrics"
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not all(isinstance(part, Mapping) for part in result)
    ):
        raise type_error(
            "terms",
            f"({{name: Term}}, {{metric name: Term}}) from {name}.terms",
            type(result).__name__,
            remedy,
        )
    terms, metrics = result
    if not terms:
        raise value_error("terms", f"at least one part of the loss from {name}.terms", "none", remedy)
    if set(metrics) != set(loss.metric_names):
        raise value_error(
            "metric_names",
            f"the metrics that {name}.terms returns, {sorted(metrics)}",
            sorted(loss.metric_names),
            "declare them on the class",
        )
    lengths = batch.unit_lengths
    for key, term in (*terms.items(), *metrics.items()):
        whose = f"{key!r} of {name}"
        if not isinstance(term, Term):
            raise type_error("terms", f"a Term as {whose}", type(term).__name__, "wrap the values in Term")
        _check_values(whose, term, lengths, in_metric=key in metrics)
        if loss.scope != "token" and term.values.dim():
            _check_unit(whose, term, lengths)


def _check_unit(whose: str, term: Term, lengths: Mapping[str, int]) -> None:
    """Raise ValueError, or warn, if a term does not have one value per `term.unit`."""
    if term.values.shape[0] == lengths.get(term.unit):
        return
    several = ", ".join(map(repr, lengths))
    if term.of is not None:
        raise value_error(
            "terms",
            f"of= the unit of `values` in {whose}",
            f"{term.of!r} with {term.values.shape[0]} values",
            f"pass one of {several}",
        )
    if not torch.compiler.is_compiling():
        warn(
            f"terms: {whose} does not have one value for each of the {term.unit}. Set of= to the unit of its "
            f"values, one of {several}: the shape is ambiguous with as many tokens as sequences.",
            UserWarning,
        )


def _check_values(whose: str, term: Term, lengths: Mapping[str, int], *, in_metric: bool) -> None:
    values, over, _ = term
    if not isinstance(values, Tensor):
        raise type_error("terms", f"a tensor of values for {whose}", type(values).__name__, "pass a tensor")
    if isinstance(over, Tensor):
        if not in_metric or over.shape != values.shape:
            raise value_error(
                "terms",
                f"weights like the values in {whose}, of a metric",
                tuple(over.shape),
                "align them, or name a unit",
            )
    else:
        if over is not None and over not in UNITS:
            raise value_error(
                "terms", f"over= one of {', '.join(UNITS)} or None in {whose}", repr(over), "name the unit"
            )
    fits = values.dim() == 1 and any(values.shape[0] == length for length in lengths.values())
    if not fits and not (values.dim() == 0 and over is None):
        # The text is only constructed on failure, because Dynamo would specialize on the lengths in it.
        names = {"tokens": "row", "sequences": "sequence", "pairs": "pair"}
        shapes = " or ".join(f"({length},), one per {names[unit]}" for unit, length in lengths.items())
        raise value_error(
            "terms",
            f"{whose} as values of shape {shapes}",
            tuple(values.shape),
            "return unreduced values: a mean over a slice is no part of the mean over the call",
        )
