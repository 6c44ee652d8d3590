"""The evaluation of a loss on a slice of rows: its terms, their reduction, their gradient, and the metrics.

`evaluate` is that of a loss of per-token statistics, and `chunk_function` that of a `LogitsLoss` on one
chunk, by `torch.func.grad_and_value`. The module `compiled` compiles both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.hooks import identity_hooks
from logitless.engine.reduction import Factors, Report, Units, reduced, report
from logitless.engine.spec import LossSpec, Role
from logitless.engine.terms import evaluate_terms, unreduced
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, WholeVocabulary


def evaluate(
    loss: LossSpec,
    statistics: Mapping[str, Tensor],
    batch: Batch,
    factors: Factors,
    sequences: WholeSequences = WHOLE_SEQUENCES,
    *,
    differentiate: bool,
) -> tuple[dict[str, Tensor], Report]:
    """Evaluate a loss of per-token statistics on a slice.

    Args:
        loss: the loss.
        statistics: (n, ...) the statistics by name.
        batch: targets and inputs of the same rows.
        factors: the factors of the call.
        sequences: over which ranks the terms are summed now. This sum is not differentiated, so that every
            rank gets the gradient with respect to its tokens.
        differentiate: whether the gradients are needed.

    Returns:
        (d loss / d statistic by name, the report of the slice).
    """
    with torch.enable_grad(), identity_hooks():
        names = loss.differentiates if differentiate else ()
        leaves = {name: statistics[name].detach().requires_grad_() for name in names}
        result = evaluate_terms(loss, {**statistics, **leaves}, batch)
    terms = [term for term in result[0].values() if term.values.requires_grad]
    values = [term.values for term in terms]
    # The backward pass starts at the values of each term, with the factor of its unit.
    upstream = [_spread(factors.loss[term.over], term.values) for term in terms]
    gradients = gradients_of(values, upstream, leaves)
    if batch.ignored is not None:
        gradients = {name: without_rows(x, batch.ignored) for name, x in gradients.items()}
    return gradients, report(loss, result, factors, sequences)


def without_rows(gradient: Tensor, ignored: Tensor) -> Tensor:
    """Set the gradients of ignored rows to 0.

    Their terms have an upstream gradient of 0. The derivative of a term may be infinite there, and 0 times
    infinity is NaN.
    """
    return torch.where(ignored.view(-1, *[1] * (gradient.ndim - 1)), 0.0, gradient)


def _spread(factor: float | Tensor, values: Tensor) -> Tensor:
    """Expand the factor to the shape of `values`."""
    if not isinstance(factor, Tensor):
        factor = values.new_full((), factor)
    return factor.to(values.dtype).expand(values.shape)


def gradients_of(
    outputs: Sequence[Tensor], upstream: Sequence[Tensor], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of each leaf, given the gradients of the outputs.

    The operations of a loss are so small that host time dominates. torch.func would take three times as much
    host time. Autograd's device thread would also take more host time, and is disabled here.
    """
    if not outputs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(
            outputs, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True
        )
    return dict(zip(leaves, gradients, strict=True))


# -- A `LogitsLoss` on one chunk


class ChunkInputs(NamedTuple):
    """The arguments of a `LogitsLoss` for one chunk, except the logits."""

    bias: Tensor | None  # (V,)
    targets: Tensor  # (n,)
    inputs: Mapping[str, Tensor | None]  # those of `inputs_of_terms`, cut to the chunk
    factors: Tensor  # (k,), `Factors.vector`
    units: Units  # of the factors
    upstream: Tensor | None  # (n,) gradients of the values of an unreduced loss; None: ones


def inputs_of_terms(loss: LossSpec) -> list[str]:
    """Names of the inputs in the batch of `terms`, in which a teacher's logits replace its hidden states."""
    names = [name for name, role in loss.roles.items() if role not in (Role.FEATURES, Role.HEAD)]
    return [*names, "teacher_logits", "teacher_bias"] if loss.teacher else names


class Evaluation(NamedTuple):
    """The results of a `LogitsLoss` for one chunk."""

    gradient: Tensor | None  # (n, V)
    table: Tensor  # see `Report`
    values: Tensor | None  # (n,) of an unreduced loss


# (logits (n, V), other arguments) -> evaluation
ChunkFunction = Callable[[Tensor, ChunkInputs], Evaluation]


def chunk_function(
    loss: LossSpec, differentiate: bool, vocabulary: WholeVocabulary = WHOLE_VOCABULARY
) -> ChunkFunction:
    """Return the loss as a PyTorch function of one chunk of products (before the logit transform)."""

    def objective(products: Tensor, chunk: ChunkInputs) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (the scalar to differentiate, (table of the report, values if the loss is unreduced))."""
        z, _ = loss.logit_transform.logits(products, chunk.bias)
        inputs = dict(chunk.inputs)
        if inputs.get("teacher_logits") is not None:
            inputs["teacher_logits"], _ = loss.teacher_transform.logits(
                inputs["teacher_logits"], inputs.get("teacher_bias")
            )
        ignore_index = None if loss.compact else loss.ignore_index
        V = vocabulary.total(products.shape[1])
        batch = Batch(chunk.targets, V, inputs, ignore_index=ignore_index, vocabulary=vocabulary)
        result = evaluate_terms(loss, z, batch)
        factors = chunk.units.of(chunk.factors)
        table = report(loss, result, factors).table
        if factors.loss is not None:
            return reduced(result[0], factors), (table,)
        values = unreduced(result[0])
        total = (values if chunk.upstream is None else values * chunk.upstream).sum()
        return total, (table, values.detach())

    def evaluate_chunk(products: Tensor, chunk: ChunkInputs) -> Evaluation:
        if not differentiate:
            gradient, found = None, objective(products, chunk)[1]
        elif vocabulary.sharded:
            # torch.func does not support the collectives, which are autograd Functions.
            with torch.enable_grad(), identity_hooks():
                z = products.detach().requires_grad_()
                total, found = objective(z, chunk)
            outputs = [total] if total.requires_grad else []
            gradient = gradients_of(outputs, [torch.ones_like(x) for x in outputs], {"z": z})["z"]
        else:
            differentiated = torch.func.grad_and_value(lambda z: objective(z, chunk), has_aux=True)
            gradient, (_, found) = differentiated(products)
        if gradient is not None and not loss.compact:
            gradient = without_rows(gradient, chunk.targets == loss.ignore_index)
        return Evaluation(gradient, found[0], found[1] if len(found) > 1 else None)

    return evaluate_chunk
