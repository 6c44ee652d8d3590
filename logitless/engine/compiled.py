"""A `LogitsLoss` of one chunk and its gradient, by `torch.func.grad_and_value` under `torch.compile`."""

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
    """The arguments of a `LogitsLoss` for one chunk, except the logits."""

    bias: Tensor | None  # (V,)
    targets: Tensor  # (n,)
    inputs: Mapping[
        str, Tensor | None
    ]  # cut to the chunk; includes `teacher_logits` (n, V') if the loss has a teacher
    factors: UnitFactors  # 0-d tensors
    upstream: Tensor | None  # (n,) gradients of the values of an unreduced loss; None: ones


class Evaluation(NamedTuple):
    """The results of a `LogitsLoss` for one chunk."""

    total: Tensor  # 0-d, the differentiated scalar
    metrics: Sums
    values: Tensor | None = None  # (n,) of an unreduced loss


# (logits (n, V), other arguments) -> (gradient (n, V) or None, evaluation)
ChunkFunction = Callable[[Tensor, ChunkInputs], tuple[Tensor | None, Evaluation]]


def settle(terms: tuple[dict, dict], factors: UnitFactors, upstream: Tensor | None) -> Evaluation:
    """Reduce the terms and metrics of a chunk.

    With reduction="none" (`factors.loss` is None), the evaluation also contains the unreduced values (n,),
    and its total is sum(values * upstream).
    """
    losses, metrics = terms
    sums = metric_sums(metrics)
    if factors.loss is not None:
        return Evaluation(reduced(losses, factors), sums)
    values = unreduced(losses)
    return Evaluation((values if upstream is None else values * upstream).sum(), sums, values)


def chunk_function(
    loss: LossSpec, differentiate: bool, vocabulary: WholeVocabulary = WHOLE_VOCABULARY
) -> ChunkFunction:
    """Return the loss as a PyTorch function of one chunk of products (before the logit transform)."""

    def objective(products: Tensor, chunk: ChunkInputs) -> tuple[Tensor, tuple]:
        """Return (total, fields of an `Evaluation`).

        Fields that are None are omitted, as torch.func requires.
        """
        z, _ = loss.head.logits(products, chunk.bias)
        inputs = dict(chunk.inputs)
        if inputs.get("teacher_logits") is not None:
            inputs["teacher_logits"], _ = loss.teacher_head.logits(
                inputs["teacher_logits"], inputs.get("teacher_bias")
            )
        ignore_index = None if loss.compact else loss.ignore_index
        V = vocabulary.total(products.shape[1])
        batch = Batch(chunk.targets, V, inputs, ignore_index=ignore_index, vocabulary=vocabulary)
        total, metrics, values = settle(evaluate_terms(loss, z, batch), chunk.factors, chunk.upstream)
        fields = (total.detach(), metrics)
        return total, fields if values is None else (*fields, values.detach())

    def evaluate(products: Tensor, chunk: ChunkInputs) -> tuple[Tensor | None, Evaluation]:
        if not differentiate:
            return None, Evaluation(*objective(products, chunk)[1])
        if vocabulary.sharded:
            # torch.func does not support the collectives, which are autograd Functions.
            gradients, (_, fields) = grad_and_value(
                lambda leaves: objective(leaves["z"], chunk), {"z": products}
            )
            return gradients["z"], Evaluation(*fields)
        gradient, (_, fields) = torch.func.grad_and_value(lambda z: objective(z, chunk), has_aux=True)(
            products
        )
        return gradient, Evaluation(*fields)

    return evaluate


def compiled_chunk_function(
    loss: LossSpec, differentiate: bool, vocabulary: WholeVocabulary = WHOLE_VOCABULARY
) -> ChunkFunction:
    """Return `chunk_function` under torch.compile. If compiling the loss fails, it warns and runs uncompiled.

    A loss with `tp_group` runs uncompiled because of its collectives. It is not cached, because the cache
    would keep its process group alive.
    """
    if vocabulary.sharded or loss.tp_group is not None:
        return chunk_function(loss, differentiate, vocabulary)
    return _compiled(loss, differentiate)


@functools.lru_cache(maxsize=128)
def _compiled(loss: LossSpec, differentiate: bool) -> ChunkFunction:
    """The compiled function of a loss.

    The last 128 are cached; an evicted function frees its compiled code.
    """
    plain = chunk_function(loss, differentiate)
    # Dynamo limits the number of graphs per code object, so each loss gets a copy of the code object.
    plain.__code__ = plain.__code__.replace()
    run = torch.compile(plain, dynamic=True)

    def evaluate(products: Tensor, chunk: ChunkInputs) -> tuple[Tensor | None, Evaluation]:
        nonlocal run
        try:
            with _stance(products.device):
                return run(products, chunk)
        except Exception as error:
            if run is plain or not _is_of_the_compiler(error):
                raise
            run = plain
            name = type(loss).__name__
            message = str(error).strip().partition("\n")[0]
            warn(
                f"{name} runs uncompiled, slower and in more memory: {type(error).__name__}: {message}",
                UserWarning,
            )
            return plain(products, chunk)

    return evaluate


def _is_of_the_compiler(error: Exception) -> bool:
    """Whether the compiler raised the error. Other errors, such as out of memory, are errors of the call."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError

    if isinstance(getattr(error, "inner_exception", None), torch.OutOfMemoryError):
        return False
    kinds = (TorchDynamoException, CppCompileError)
    if (triton_errors := sys.modules.get("triton.errors")) is not None:
        kinds += (triton_errors.TritonError,)
    return isinstance(error, kinds)


def _stance(device: torch.device) -> AbstractContextManager:
    """Context in which functions run uncompiled while a CUDA graph is captured, instead of being compiled."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return torch.compiler.set_stance("eager_on_recompile") if capturing else nullcontext()
