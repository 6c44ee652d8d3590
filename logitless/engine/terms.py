"""What a loss hands back: unreduced terms.

The one place where a reduction is applied, and where an author's terms are checked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.local_autograd import gradients_of, recorded
from logitless.engine.remembered import Remembered
from logitless.errors import expect, warn
from logitless.kernels.head.sums import sums
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences

if TYPE_CHECKING:
    from logitless.engine.spec import LossSpec

UNITS = ("tokens", "sequences", "pairs", "chosen_tokens")
# Units of more than one token.
GROUPS = ("sequences", "pairs")


class Term(NamedTuple):
    """Unreduced values of one part of a loss (or of a metric) and the unit that their sum is divided by.

    Attributes:
        values: one entry per row of the slice; in a loss whose scope is not "token" also one per sequence or
            per pair; 0-d only with `over=None`. The engine sums them.
        over: "tokens", "sequences", "pairs" or "chosen_tokens" (those of the first half of the sequences);
            None leaves the sum as it is. In a metric it may be a tensor like the values, such as a mask: its
            own sum over the call divides theirs.
        of: "tokens", "sequences" or "pairs": what there is one value of each, in a loss whose scope is not
            "token". None: what `over` says, if it is "sequences" or "pairs", else tokens; with a warning
            where the shape says otherwise.
    """

    values: Tensor
    over: str | Tensor | None = "tokens"
    of: str | None = None

    @property
    def unit(self) -> str:
        """What there is one value of each."""
        if self.of is not None:
            return self.of
        return self.over if isinstance(self.over, str) and self.over in GROUPS else "tokens"


# Statistics that need not be declared.
ALWAYS_THERE = ("logps", "lse", "lse_residual")
# What `terms` returns: the parts of the loss, and the metrics, by name.
Terms = tuple[Mapping[str, Term], Mapping[str, Term]]
# What the sum over each unit (None: of no unit) is multiplied by.
Factors = Mapping[str | None, float | Tensor]
# Raw sums of a slice's metrics: (metrics,) by their unit followed by their names; (2, metrics) of values and
# of weights where each is divided by a sum of its own.
Sums = Mapping[tuple[str | None, ...], Tensor]
OWN = "weights of its own"


class UnitFactors(NamedTuple):
    """Factors of the loss's terms and of the metrics."""

    loss: Factors | None  # None where the loss is not reduced
    metrics: Factors
    num_items_unit: str | None = None  # the unit that `num_items` counts; None: the call has none

    def tensors(self, like: Tensor) -> "UnitFactors":
        """All as 0-d tensors: a compiled function would take every new number for a new program."""
        options = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}

        def convert(factors: Factors | None) -> Factors | None:
            if factors is None:
                return None
            # Filled on the device: a copy from the host would be a sync.
            return {
                unit: x.to(**options) if isinstance(x, Tensor) else torch.full((), x, **options)
                for unit, x in factors.items()
            }

        return self._replace(loss=convert(self.loss), metrics=convert(self.metrics))


def reduced(
    terms: Mapping[str, Term], factors: UnitFactors, sequences: WholeSequences = WHOLE_SEQUENCES
) -> Tensor:
    """The one place where the loss is reduced: each term's sum, times the factor of its unit; 0-d.

    Raises:
        ValueError: the call has `num_items`, and no term is divided by it.
    """
    _check_num_items(terms, factors)
    first, *others = [
        sequences.sum_unless_whole(term.values.sum() * factors.loss[term.over], term.over)
        for term in terms.values()
    ]
    return sum(others, first)


def _check_num_items(terms: Mapping[str, Term], factors: UnitFactors) -> None:
    unit = factors.num_items_unit
    if unit is not None and all(term.over != unit for term in terms.values()):
        units = ", ".join(sorted({str(term.over) for term in terms.values()}))
        expected = f"None for a loss without a term over {unit!r}, the unit that it counts"
        remedy = "leave it out, or set the loss's `unit` to the one that it counts"
        expect(False, "num_items", expected, f"a number beside terms over {units}", remedy)


class _Table:
    """Sums of values, without gradient: one launch for all of one length.

    Args:
        values: what is summed, in the order in which `take` is asked for it.
    """

    def __init__(self, values: Sequence[Tensor]):
        alike: dict[tuple, list[Tensor]] = {}
        for x in values:
            alike.setdefault((x.dtype, x.shape), []).append(x.detach())
        self._rest = {kind: sums(xs) if kind[1] else torch.stack(xs) for kind, xs in alike.items()}

    def take(self, values: Sequence[Tensor]) -> Tensor:
        """(m,) the sums of the next m values."""
        kinds = [(x.dtype, x.shape) for x in values]
        if len(set(kinds)) > 1:
            return torch.stack([self.take([x])[0] for x in values])
        found = self._rest[kinds[0]]
        self._rest[kinds[0]] = found[len(values) :]
        return found[: len(values)]


def _by_unit(metrics: Mapping[str, Term]) -> dict[tuple[str | None, ...], list[Tensor]]:
    """What is summed for the metrics of each unit, by the unit and their names: see `Sums`."""
    names: dict[str | None, list[str]] = {}
    for name, term in metrics.items():
        names.setdefault(OWN if isinstance(term.over, Tensor) else term.over, []).append(name)
    found = {}
    for unit, chosen in names.items():
        found[unit, *chosen] = [metrics[name].values for name in chosen]
        if unit == OWN:
            found[unit, *chosen] += [metrics[name].over for name in chosen]
    return found


def metric_sums(metrics: Mapping[str, Term]) -> Sums:
    """A slice's share of the metrics (`Sums`), in PyTorch alone: also inside a compiled function, where no
    kernel can be launched and no shape may become a constant."""
    found = {}
    for (unit, *names), values in _by_unit(metrics).items():
        first = values[0].detach()
        if len(values) == 1:
            total = first.sum().view(1)
        elif first.dim() and all(x.shape == first.shape for x in values):
            total = torch.stack([x.detach() for x in values]).sum(1)
        else:
            total = torch.stack([x.detach().sum() for x in values])
        found[unit, *names] = total.view(2, -1) if unit == OWN else total
    return found


def reported(
    result: Terms, factors: UnitFactors, sequences: WholeSequences = WHOLE_SEQUENCES
) -> tuple[Tensor, Sums]:
    """A slice's share of the loss, as `reduced` computes it, and of the metrics; without gradient."""
    terms, metrics = result
    _check_num_items(terms, factors)
    units, losses = _by_unit(metrics), [term.values for term in terms.values()]
    table = _Table([*(x for values in units.values() for x in values), *losses])
    found = {
        key: table.take(values).view(2, -1) if key[0] == OWN else table.take(values)
        for key, values in units.items()
    }
    first, *others = [
        sequences.sum_unless_whole(table.take([term.values])[0] * factors.loss[term.over], term.over)
        for term in terms.values()
    ]
    return sum(others, first), found


def differentiated(
    evaluate: Callable[[dict[str, Tensor]], Terms], variables: Mapping[str, Tensor], factors: UnitFactors
) -> tuple[dict[str, Tensor], Terms]:
    """Gradients of a slice's share of the loss, and what `evaluate` made of the variables.

    The sum of a term is not differentiated but its values, by the factor of their unit: every rank with a
    slice of the sequences differentiates the same loss by its own tokens.
    """
    leaves, result = recorded(evaluate, variables)
    terms = [term for term in result[0].values() if term.values.requires_grad]
    upstream = [_spread(factors.loss[term.over], term.values) for term in terms]
    return gradients_of([term.values for term in terms], upstream, leaves), result


def _spread(factor: float | Tensor, values: Tensor) -> Tensor:
    """A factor for each of some values."""
    if not isinstance(factor, Tensor):
        factor = values.new_full((), factor)
    return factor.to(values.dtype).expand(values.shape)


def means(
    shares: Sequence[Sums], factors: Factors, sequences: WholeSequences = WHOLE_SEQUENCES
) -> dict[str, Tensor]:
    """The metrics of a call from the sums of its slices; 0 where there was nothing to average."""
    found = {}
    for unit, *names in shares[0] if shares else ():
        # Values and weights of whole sequences, too, are summed over the ranks alike.
        first, *others = [share[unit, *names] for share in shares]
        total = sequences.sum_unless_whole(sum(others, first), unit)
        if unit == OWN:
            total, weights = total
            total = total / torch.where(weights == 0, 1.0, weights)
        elif isinstance(factors[unit], Tensor) or factors[unit] != 1.0:
            total = total * factors[unit]
        found |= zip(names, total.unbind(), strict=True)
    return found


def unreduced(terms: Mapping[str, Term]) -> Tensor:
    """The sum of the terms, still one value per unit; they must share it."""
    units = {term.over for term in terms.values()}
    got = f"'none' with {sorted(map(str, units))}"
    expect(len(units) == 1, "reduction", "'mean' or 'sum' for a loss of several units", got, "reduce it")
    return sum(term.values for term in terms.values())


# Classes and identities of losses whose terms have been seen to fit a slice with several rows and units, with
# the names of the inputs that were None.
_CHECKED = Remembered()


def evaluate_terms(loss: "LossSpec", seen: Tensor | Mapping[str, Tensor], batch: Batch) -> Terms:
    """`loss.terms` on a slice, of its logits or its numbers by name; unsupervised rows' values are zeroed.

    What an author can get wrong is checked by shape alone, until a slice that could show it has passed.
    """
    if not isinstance(seen, Tensor):
        stats, declared = TokenStats(), (*ALWAYS_THERE, *loss.differentiates, *loss.observes)
        for name, x in seen.items():
            # Kernels find some numbers together; that one is declared does not declare the other.
            if name in declared:
                setattr(stats, name, x)
        seen = stats
    try:
        result = loss.terms(seen, batch)
    except Exception as error:
        if batch.absent:
            error.add_note(
                f"In {type(loss).__name__}.terms, these declared inputs are None: {', '.join(batch.absent)}."
            )
        raise
    key = type(loss), loss.identity, batch.absent
    if torch.compiler.is_compiling():
        # Tracing may neither read nor change what eager calls have seen.
        check_terms(loss, result, batch)
    elif not batch.targets.is_meta and key not in _CHECKED:
        check_terms(loss, result, batch)
        if batch.shows_shapes:
            _CHECKED[key] = True
    if batch.ignored is None:
        return result
    terms, metrics = result
    return batch.masked(terms), batch.masked(metrics)


def check_terms(loss: "LossSpec", result: object, batch: Batch) -> None:
    """Whether terms and metrics are dicts of Term, one value per row, sequence or pair of the slice."""
    name, remedy = type(loss).__name__, "return the unreduced parts of the loss and the metrics"
    form = f"({{name: Term}}, {{metric name: Term}}) from {name}.terms"
    pair = (
        isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Mapping) for part in result)
    )
    expect(pair, "terms", form, type(result).__name__, remedy, TypeError)
    terms, metrics = result
    expect(len(terms) > 0, "terms", f"at least one part of the loss from {name}.terms", "none", remedy)
    expected = f"the metrics that {name}.terms returns, {sorted(metrics)}"
    declared, remedy = sorted(loss.metric_names), "declare them on the class"
    expect(set(metrics) == set(loss.metric_names), "metric_names", expected, declared, remedy)
    lengths = batch.unit_lengths
    for key, term in (*terms.items(), *metrics.items()):
        whose = f"{key!r} of {name}"
        remedy = "wrap the values in Term"
        expect(isinstance(term, Term), "terms", f"a Term as {whose}", type(term).__name__, remedy, TypeError)
        _check_values(whose, term, lengths, in_metric=key in metrics)
        if loss.scope != "token" and term.values.dim():
            _check_unit(whose, term, lengths)


def _check_unit(whose: str, term: Term, lengths: Mapping[str, int]) -> None:
    """What the values are of, where there are more units than tokens: as declared, else as `over` says."""
    if term.values.shape[0] == lengths.get(term.unit):
        return
    several = ", ".join(map(repr, lengths))
    if term.of is not None:
        got = f"{term.of!r} with {term.values.shape[0]} values"
        expect(False, "terms", f"of= what {whose} has one value of each", got, f"pass one of {several}")
    if not torch.compiler.is_compiling():
        warn(
            f"terms: {whose} has no value of each of the {term.unit} that over= names. Say what it has one "
            f"of, with of= one of {several}: where there are as many tokens as sequences, no shape tells.",
            UserWarning,
        )


def _check_values(whose: str, term: Term, lengths: Mapping[str, int], *, in_metric: bool) -> None:
    values, over, _ = term
    kind, expected = type(values).__name__, f"a tensor of values for {whose}"
    expect(isinstance(values, Tensor), "terms", expected, kind, "pass a tensor", TypeError)
    if isinstance(over, Tensor):
        fits = in_metric and over.shape == values.shape
        expected = f"weights like the values in {whose}, of a metric"
        expect(fits, "terms", expected, tuple(over.shape), "align them, or name a unit")
    else:
        expected = f"over= one of {', '.join(UNITS)} or None in {whose}"
        expect(over is None or over in UNITS, "terms", expected, repr(over), "name the unit")
    fits = values.dim() == 1 and any(values.shape[0] == length for length in lengths.values())
    if not fits and not (values.dim() == 0 and over is None):
        # The text is made here alone: Dynamo would take the lengths in it for constants.
        names = {"tokens": "row", "sequences": "sequence", "pairs": "pair"}
        shapes = " or ".join(f"({length},), one per {names[unit]}" for unit, length in lengths.items())
        remedy = "return unreduced values: a mean over a slice is no part of the mean over the call"
        expect(False, "terms", f"{whose} as values of shape {shapes}", tuple(values.shape), remedy)
