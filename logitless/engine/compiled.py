"""A loss of logits on one chunk, and its gradient: `torch.func.grad_and_value` under `torch.compile`."""

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.local_autograd import grad_and_value
from logitless.engine.spec import LossSpec
from logitless.engine.terms import Sums, UnitFactors, evaluate_terms, metric_sums, reduced, unreduced
from logitless.errors import warn
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, WholeVocabulary


class ChunkInputs(NamedTuple):
    """What a loss of logits takes beside the logits of a chunk."""

    bias: Tensor | None  # (V,)
    targets: Tensor  # (n,)
    inputs: Mapping[
        str, Tensor | None
    ]  # cut to the chunk; with `teacher_logits` (n, V') where the loss has a teacher
    factors: UnitFactors  # 0-d tensors
    upstream: Tensor | None  # (n,) gradients of the values of an unreduced loss; None: ones


class Evaluation(NamedTuple):
    """What a chunk gave."""

    total: Tensor  # 0-d, what is differentiated
    metrics: Sums
    values: Tensor | None = None  # (n,) of an unreduced loss


# (logits (n, V), what else) -> (gradient or None, evaluation)
ChunkFunction = Callable[[Tensor, ChunkInputs], tuple[Tensor | None, Evaluation]]


def settle(terms: tuple[dict, dict], factors: UnitFactors, upstream: Tensor | None) -> Evaluation:
    """Terms and metrics of a chunk, reduced; the values themselves where the loss is not."""
    losses, metrics = terms
    sums = metric_sums(metrics)
    if factors.loss is not None:
        return Evaluation(reduced(losses, factors), sums)
    values = unreduced(losses)
    return Evaluation((values if upstream is None else values * upstream).sum(), sums, values)


def chunk_function(
    loss: LossSpec, differentiate: bool, vocabulary: WholeVocabulary = WHOLE_VOCABULARY
) -> ChunkFunction:
    """A loss on one chunk of raw products, in plain PyTorch."""

    def objective(products: Tensor, given: ChunkInputs) -> tuple[Tensor, tuple]:
        """What to differentiate, and the fields of an Evaluation: those that are not None, for torch.func."""
        z, _ = loss.head.logits(products, given.bias)
        inputs = dict(given.inputs)
        if inputs.get("teacher_logits") is not None:
            inputs["teacher_logits"], _ = loss.teacher_head.logits(
                inputs["teacher_logits"], inputs.get("teacher_bias")
            )
        ignore_index = None if loss.compact else loss.ignore_index
        V = vocabulary.total(products.shape[1])
        batch = Batch(given.targets, V, inputs, ignore_index=ignore_index, vocabulary=vocabulary)
        total, metrics, values = settle(evaluate_terms(loss, z, batch), given.factors, given.upstream)
        fields = (total.detach(), metrics)
        return total, fields if values is None else (*fields, values.detach())

    def evaluate(products: Tensor, given: ChunkInputs) -> tuple[Tensor | None, Evaluation]:
        if not differentiate:
            return None, Evaluation(*objective(products, given)[1])
        if vocabulary.sharded:
            # What crosses the group has derivatives of its own, which torch.func does not take.
            gradients, (_, fields) = grad_and_value(
                lambda leaves: objective(leaves["z"], given), {"z": products}
            )
            return gradients["z"], Evaluation(*fields)
        gradient, (_, fields) = torch.func.grad_and_value(lambda z: objective(z, given), has_aux=True)(
            products
        )
        return gradient, Evaluation(*fields)

    return evaluate


def compiled_chunk_function(
    loss: LossSpec, differentiate: bool, vocabulary: WholeVocabulary = WHOLE_VOCABULARY
) -> ChunkFunction:
    """`chunk_function` under torch.compile; uncompiled, with a warning, if compiling this loss fails.

    Collectives stay uncompiled, and what has a process group is not kept.
    """
    if vocabulary.sharded or loss.tp_group is not None:
        return chunk_function(loss, differentiate, vocabulary)
    return _compiled(loss, differentiate)


@functools.lru_cache(maxsize=128)
def _compiled(loss: LossSpec, differentiate: bool) -> ChunkFunction:
    """Kept for the last losses. With a function its compiled code goes."""
    plain = chunk_function(loss, differentiate)
    # Dynamo counts the graphs of a code object, and gives up after a few: each loss has one of its own.
    plain.__code__ = plain.__code__.replace()
    run = torch.compile(plain, dynamic=True)

    def evaluate(products: Tensor, given: ChunkInputs) -> tuple[Tensor | None, Evaluation]:
        nonlocal run
        try:
            with _stance(products.device):
                return run(products, given)
        except Exception as error:
            if run is plain or not _is_of_the_compiler(error):
                raise
            run = plain
            name, message = type(loss).__name__, str(error).strip().partition("\n")[0]
            warn(
                f"{name} runs uncompiled, slower and in more memory: {type(error).__name__}: {message}",
                UserWarning,
            )
            return plain(products, given)

    return evaluate


def _is_of_the_compiler(error: Exception) -> bool:
    """Whether an error was raised while compiling. Others, out of memory among them, are the call's own."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    if isinstance(getattr(error, "inner_exception", None), torch.OutOfMemoryError):
        return False
    kinds = (TorchDynamoException, CppCompileError)
    if (triton_errors := sys.modules.get("triton.errors")) is not None:
        kinds += (triton_errors.TritonError,)
    return isinstance(error, kinds)


def _stance(device: torch.device) -> AbstractContextManager:
    """While a CUDA graph is captured nothing can be compiled: what has not been runs as it is."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return torch.compiler.set_stance("eager_on_recompile") if capturing else nullcontext()
