"""`Term`, the unreduced values that a loss returns, and their checks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.remembered import Remembered
from logitless.errors import type_error, value_error, warn
from logitless.kernels.head.cross_entropy import stat_names

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
ALWAYS_THERE = stat_names(())
# The result of `LinearLoss.terms`: (parts of the loss by name, metrics by name).
Terms = tuple[Mapping[str, Term], Mapping[str, Term]]


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


def declared(loss: "LossSpec", statistics: Mapping[str, Tensor]) -> TokenStats:
    """The statistics that the loss declares: some kernels compute several of them together."""
    names = (*ALWAYS_THERE, *loss.differentiates, *loss.observes)
    stats = TokenStats()
    for name, x in statistics.items():
        if name in names:
            setattr(stats, name, x)
    return stats


def evaluate_terms(loss: "LossSpec", logits_or_stats: Tensor | Mapping[str, Tensor], batch: Batch) -> Terms:
    """Evaluate `loss.terms` for the logits or the statistics of a slice. Values of unsupervised rows are set
    to 0.

    The shapes of the terms are checked until they have passed for a slice in which every wrong shape is
    detectable.
    """
    if not isinstance(logits_or_stats, Tensor):
        logits_or_stats = declared(loss, logits_or_stats)
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
