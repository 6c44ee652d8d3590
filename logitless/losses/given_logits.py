"""`cross_entropy` of logits that exist already, by the kernels of the losses.

On NVIDIA GPUs (`cross_entropy.reads_once`), the forward pass already writes the gradient for an upstream
gradient of 1, while it reads the logits for a few statistics per token. The backward pass then has nothing
left to do, unless the upstream gradient of a row differs from 1. With `z_loss`, `dft` or `inplace`, and on
other devices, the backward pass reads the logits again and writes their gradient: to a new tensor, or over
the logits. The host waits for the counts of invalid targets at the end of the forward pass, while the GPU
reads the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.call import check_constant, check_vocabulary_input, stat_dtype_of
from logitless.engine.compiled import evaluate
from logitless.engine.evaluation import gradients_of
from logitless.engine.hooks import identity_hooks
from logitless.engine.host_copy import HostCopy, HostNumbers, HostWrite
from logitless.engine.operands import FLOATS, INTEGERS, apply_mask, check_data, mask_error, shifted
from logitless.engine.reduction import Factors, Inverses
from logitless.engine.terms import Term, evaluate_terms, unreduced
from logitless.errors import check_number, type_error, value_error
from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head.targets import count_targets
from logitless.losses.cross_entropy import CrossEntropyLoss, of_targets
from logitless.losses.declarations import cached_loss
from logitless.losses.inputs import Reduction


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    shift: bool = False,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """Compute `F.cross_entropy(logits, targets)` for logits that exist already.

    If you have the hidden states and the LM head, use `linear_cross_entropy` or `CrossEntropyLoss` instead:
    they take the same options and never allocate the logits. This function is for models that only return
    logits. If the logits are contiguous, it allocates no tensor of their size but their gradient; other
    logits are copied. On NVIDIA GPUs, the forward pass already writes the gradient, except with `z_loss`,
    `dft`, `inplace` or more than 4,096 ids (2,048 with a softcap) for each multiprocessor; an upstream
    gradient other than 1 costs a second read of the logits. The formula is that of `CrossEntropyLoss`.

    Args:
        logits: (..., V) bf16, fp16, fp32 or fp64. With the options of the head, the products before softcap,
            logit_scale and temperature are applied.
        targets: (...) int64 token ids, or `ignore_index`.
        ignore_index: targets with this id are not supervised.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1]: weight of the mean cross-entropy over all ids of the vocabulary.
        z_loss: weight of lse^2, at least 0.
        dft: dynamic fine-tuning: multiply each token's cross-entropy by the detached probability of its
            target.
        softcap: c in c * tanh(logit_scale * x / c) / temperature. None: no softcap.
        logit_scale: factor of the logits.
        temperature: divisor of the logits, applied after the softcap.
        class_weights: (V,) factors of the cross-entropy of each id, as in `F.cross_entropy`.
        token_weights: (...) factors of the loss of each token, like targets.
        shift: targets are unshifted labels of the same length: position i predicts targets[i + 1]. The logits
            are not copied, as `logits[:, :-1].contiguous()` would.
        mask: (...), same shape as targets, and shifted with them. Targets with mask 0 (False) are not
            supervised.
        num_items: divisor of the mean. Default: the number of supervised tokens or, with class_weights, the
            sum of the class weights of their targets.
        inplace: the backward pass writes the gradient over the logits, which saves a tensor of their size.
            Nothing may read or change the logits after it: autograd raises an error if it needs them again,
            unless saved-tensor hooks return them unchecked, and a parameter's gradient may be their memory.
            They must be contiguous, and neither a leaf that requires a gradient nor a view of one. Under
            torch.compile, the compiler decides which memory it uses again.

    Returns:
        0-d fp32 tensor (fp64 for fp64 logits). With `reduction="none"`, a tensor of targets' shape with 0 for
        ignored targets.

    Raises:
        ValueError: shapes or options do not match, or a target is outside the vocabulary. The host reads the
            number of such targets; under torch.compile and while a CUDA graph is captured, it is asserted on
            the device instead.
        TypeError: an argument has the wrong type.

    Examples:
        >>> logits, targets = torch.randn(6, 32), torch.randint(32, (6,))
        >>> torch.allclose(cross_entropy(logits, targets), torch.nn.functional.cross_entropy(logits, targets))
        True
    """
    has_divisor = num_items is not None and reduction == "mean"
    loss = cached_loss(
        GivenLogitsLoss,
        ignore_index=ignore_index,
        reduction="sum" if has_divisor else reduction,  # the factor of this sum is 1 / num_items
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        dft=dft,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
    )
    _check_tensors(logits, targets, class_weights, token_weights, num_items, inplace=inplace)
    shape = targets.shape
    if mask is not None:
        targets = apply_mask(targets, mask, ignore_index)
    if shift:
        if not shape:
            raise value_error("shift", "False for a single target", True, "a single token has no next token")
        targets = shifted(targets.long(), ignore_index)
        token_weights = None if token_weights is None else shifted(token_weights, 0)
    flat = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    V = flat.shape[1]
    targets = targets.reshape(-1).long()
    dtype = stat_dtype_of(logits.dtype)
    factor = 1.0
    if num_items is not None:
        if not has_divisor:
            remedy = "only reduction='mean' divides by it"
            raise value_error("num_items", f"None with reduction={reduction!r}", num_items, remedy)
        if not isinstance(num_items, Tensor):
            num_items = torch.full((), num_items, dtype=dtype, device=logits.device)
        num_items = num_items.to(logits.device, dtype)
        factor = Inverses({"tokens": num_items}, dtype)["tokens"]
    inputs = {
        "class_weights": None if class_weights is None else class_weights.to(dtype),
        "token_weights": None if token_weights is None else token_weights.reshape(-1).to(dtype),
    }
    counts, inverse = _counts(targets, V, loss, num_items)
    batch = Batch(targets, V, inputs, ignore_index=ignore_index)
    if torch.compiler.is_compiling():
        values = unreduced(evaluate_terms(loss, _plain_statistics(flat, batch, loss), batch)[0])
        values = values if reduction == "none" else values.sum() * factor
    elif torch.is_grad_enabled() and flat.requires_grad:
        if inplace or not _reads_once(flat, loss):
            values = _Losses.apply(flat, loss, batch, factor, inplace)
        else:
            token_factor = inverse if loss.reduction == "mean" else factor
            values = _LinearLosses.apply(flat, loss, batch, factor, token_factor)
    else:
        _, stats = _statistics(flat, loss, batch)
        values, _ = _evaluated(loss, dict(stats.items()), batch, factor, differentiate=False)
    # The views are made here, because autograd refuses in-place changes of a view that a Function returns.
    values = values.view(shape if reduction == "none" else ())
    if counts is not None:
        # The last statement, because a GPU that has computed the gradient waits for what the host does next.
        _check_counts(counts.tolist(), targets, V)
    return values


@dataclass(frozen=True, kw_only=True)
class GivenLogitsLoss(CrossEntropyLoss):
    """`CrossEntropyLoss` without metrics, for a call that is evaluated as one slice of all rows.

    `terms` divides the values of a mean, so that the whole evaluation is one compiled graph.
    """

    compact: bool = False

    metric_names: ClassVar = ()
    observes: ClassVar = ()

    @property
    def is_linear(self) -> bool:
        """Whether the loss is a sum of the statistics with constant factors, which are its gradients."""
        return not (self.z_loss or self.dft)

    def coefficients(self, V: int) -> dict[str, float]:
        """Return the constant factor of each statistic in a linear loss of a token without weights."""
        epsilon = self.label_smoothing
        factors = {"logps": epsilon - 1, "lse": epsilon, "sum_logits": -epsilon / V}
        return {name: factors[name] for name in self.differentiates}

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        values = self.values(stats, batch)
        if self.reduction == "mean":
            divisor = batch.supervised.sum()
            if batch.class_weights is not None:
                weights = of_targets(batch.class_weights, batch.targets)
                divisor = torch.where(batch.supervised, weights, 0.0).sum()
            values = values / torch.where(divisor == 0, 1, divisor)
        return {"cross_entropy": Term(values, over=None)}, {}


def _check_tensors(
    logits: object,
    targets: object,
    class_weights: Tensor | None,
    token_weights: Tensor | None,
    num_items: float | Tensor | None,
    *,
    inplace: bool,
) -> None:
    if not isinstance(logits, Tensor) or logits.dtype not in FLOATS:
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        remedy = "pass the logits of the model, such as outputs.logits"
        raise type_error("logits", "a bfloat16, float16, float32 or float64 tensor", got, remedy)
    if not isinstance(targets, Tensor) or targets.dtype not in INTEGERS:
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise type_error("targets", "integer token ids (int64)", got, "pass the labels")
    check_data(logits=logits, targets=targets)
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape:
        expected = f"targets' shape {tuple(targets.shape)} and a last dimension of the vocabulary"
        raise value_error("logits", expected, tuple(logits.shape), "pass one row of logits per target")
    if targets.device != logits.device:
        raise value_error("targets", f"logits' device {logits.device}", targets.device, "move them there")
    for name, x, shape in (
        ("class_weights", class_weights, logits.shape[-1:]),
        ("token_weights", token_weights, targets.shape),
    ):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise type_error(name, "a tensor", type(x).__name__, "pass torch.tensor(...)")
        if name == "class_weights":
            check_vocabulary_input(name, x, shape[0])
        elif x.shape != shape:
            expected = f"targets' shape {tuple(shape)}"
            raise value_error(name, expected, tuple(x.shape), "pass one weight per token")
        check_constant(name, x)
        if x.device != logits.device:
            raise value_error(name, f"logits' device {logits.device}", x.device, "move it there")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(logits).tangent is not None:
        remedy = "differentiate F.cross_entropy(logits, targets)"
        raise value_error("forward_ad", "logits without a tangent", "a dual tensor", remedy)
    if isinstance(num_items, Tensor):
        if torch.is_grad_enabled():
            check_constant("num_items", num_items)
        if num_items.dim() != 0:
            expected = "a number or a 0-d tensor"
            raise value_error("num_items", expected, tuple(num_items.shape), "sum it first")
    elif num_items is not None and not torch.compiler.is_compiling():
        check_number("num_items", num_items, "a finite number or a 0-d tensor")
    if inplace and not torch.compiler.is_compiling():
        # A detached view of a leaf may be another leaf.
        if any(x is not None and x.is_leaf and x.requires_grad for x in (logits, logits._base)):
            remedy = "leave inplace out, or pass the result of an operation"
            raise value_error("logits", "no leaf that requires a gradient with inplace", "a leaf", remedy)
        if not logits.is_contiguous():
            got = f"strides {logits.stride()}"
            raise value_error("logits", "contiguous logits with inplace", got, "leave inplace out")


FIX = "fix the labels or set ignore_index"


def _counts(
    targets: Tensor, V: int, loss: CrossEntropyLoss, num_items: Tensor | None
) -> tuple[HostNumbers | None, Tensor | None]:
    """Start to write the numbers that `_check_counts` checks to the host.

    Returns:
        (the numbers; (1,) fp32: 1 / the number of supervised tokens, 1 if there is none). Under
        torch.compile, both are None. While a CUDA graph is captured, the first is None, and the numbers are
        asserted on the device, as under torch.compile.
    """
    inverse = None
    if not torch.compiler.is_compiling():
        device = targets.device
        is_captured = targets.is_cuda and torch.cuda.is_current_stream_capturing()
        writes = device.type in ("cpu", "cuda") and not torch.version.hip  # others were not tried
        if writes and num_items is None and not is_captured:
            written = HostWrite((2,), torch.int64, device)
            inverse = count_targets(targets, V, loss.ignore_index, written.numbers)
            written.queued()
            return written, inverse
        counts = torch.empty(2, dtype=torch.int64, device=device)
        inverse = count_targets(targets, V, loss.ignore_index, counts)
        if num_items is not None:
            counts = torch.cat((counts, ~(num_items > 0).view(1)))
        if not is_captured:
            return HostCopy(counts), inverse
        supervised, outside, *small = counts.unbind()
    else:
        supervised = targets != loss.ignore_index
        outside = (supervised & ((targets < 0) | (targets >= V))).sum()
        supervised = supervised.sum()
        small = [] if num_items is None else [~(num_items > 0)]
    torch._assert_async(outside == 0, f"targets: expected {_expected_ids(V)}, got others; {FIX}.")
    for each in small:
        fits = (each == 0) | (supervised == 0)
        torch._assert_async(fits, "num_items: expected a number above 0, got 0 or less; count again.")
    return None, inverse


def _expected_ids(V: int) -> str:
    return f"ids in [0, {V}) or ignore_index"


def _check_counts(counts: list[int], targets: Tensor, V: int) -> None:
    """Raise ValueError for targets outside the vocabulary and for a num_items of 0 or less.

    `counts`: supervised tokens, targets outside and, with num_items, whether it is not above 0.
    """
    supervised, outside, *small = counts
    if outside:
        weights = ", and weights of the tokens as token_weights"
        error = mask_error(targets, weights)
        raise error or value_error("targets", _expected_ids(V), f"{outside} outside", FIX)
    if supervised and any(small):
        got = "0 or less, but the call has supervised tokens"
        raise value_error("num_items", "a number above 0", got, "pass their number")


def _plain_statistics(logits: Tensor, batch: Batch, loss: CrossEntropyLoss) -> dict[str, Tensor]:
    """The statistics by PyTorch operators, which torch.compile fuses."""
    z, _ = loss.logit_transform.logits(logits)
    z = torch.where(batch.supervised[:, None], z, 0.0)  # no NaN of an ignored row reaches its gradient
    lse = z.logsumexp(1)
    stats = {"lse": lse, "logps": z.gather(1, batch.targets[:, None])[:, 0] - lse}
    if loss.label_smoothing:
        stats["sum_logits"] = _weighted_sum(z, batch.class_weights)
    return stats


def _weighted_sum(z: Tensor, weights: Tensor | None) -> Tensor:
    """The sums of rows. No product of matrices, which autocast would round."""
    return z.sum(1) if weights is None else (z * weights.to(z.dtype)).sum(1)


def _allocated(logits: Tensor, loss: CrossEntropyLoss) -> tuple[Tensor, kernels.TokenBuffers]:
    """(logits with contiguous rows, buffers for the statistics of each token)."""
    dtype = stat_dtype_of(logits.dtype)
    stats = kernels.allocate_stats(loss.differentiates, logits.shape[0], dtype, logits.device)
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous(), stats


def _statistics(logits: Tensor, loss: CrossEntropyLoss, batch: Batch) -> tuple[Tensor, kernels.TokenBuffers]:
    """(logits with contiguous rows, the statistics of each token)."""
    rows, stats = _allocated(logits, loss)
    if len(rows):
        targets = batch.given_targets
        kernels.token_statistics(rows, targets, stats, **_options(loss, batch.class_weights))
    return rows, stats


def _evaluated(
    loss: CrossEntropyLoss,
    stats: Mapping[str, Tensor],
    batch: Batch,
    factor: float | Tensor,
    *,
    differentiate: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """((1,) the reduced loss, or (N,) the unreduced one; the gradient of its sum to each statistic)."""
    if loss.reduction != "none":
        factors = Factors({None: factor}, {})
        gradients, report = evaluate(loss, stats, batch, factors, differentiate=differentiate)
        return report.table, gradients
    with torch.enable_grad(), identity_hooks():
        names = loss.differentiates if differentiate else ()
        leaves = {name: stats[name].detach().requires_grad_() for name in names}
        values = unreduced(evaluate_terms(loss, {**stats, **leaves}, batch)[0])
    gradients = gradients_of([values], [torch.ones_like(values)], leaves) if differentiate else {}
    return values.detach(), gradients


class _Losses(torch.autograd.Function):
    """Logits (N, V) -> the result of `_evaluated`."""

    @staticmethod
    def forward(
        ctx, logits: Tensor, loss: GivenLogitsLoss, batch: Batch, factor: float | Tensor, inplace: bool
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        rows, buffers = _statistics(logits, loss, batch)
        stats = dict(buffers.items())
        values, gradients = _evaluated(loss, stats, batch, factor, differentiate=True)
        ctx.loss, ctx.inplace = loss, inplace
        ctx.names, ctx.differentiated = tuple(stats), tuple(gradients)
        ctx.is_overwritten = False
        operands = rows, batch.given_targets, batch.class_weights
        ctx.save_for_backward(*operands, *stats.values(), *gradients.values())
        return values

    @staticmethod
    def backward(ctx, upstream: Tensor | None):
        _check_not_differentiated()
        if upstream is None:
            return (None,) * 5
        if ctx.is_overwritten:
            raise RuntimeError(
                "inplace: expected one backward pass, got a second one, and the first has overwritten the "
                "logits; leave inplace out."
            )
        ctx.is_overwritten = ctx.inplace
        logits, targets, class_weights, *saved = ctx.saved_tensors
        count = len(ctx.names)
        stats = kernels.TokenBuffers(**dict(zip(ctx.names, saved[:count], strict=True)))
        grads = kernels.TokenBuffers(**dict(zip(ctx.differentiated, saved[count:], strict=True)))
        gradient = logits.detach() if ctx.inplace else torch.empty_like(logits)
        if len(logits):
            options = _options(ctx.loss, class_weights)
            kernels.logits_gradient(
                logits, targets, stats, grads, gradient=gradient, upstream=upstream, **options
            )
        if ctx.inplace:
            torch.autograd.graph.increment_version(gradient)
        return gradient, None, None, None, None


class _LinearLosses(torch.autograd.Function):
    """Logits (N, V) -> the result of `_evaluated`, where `_reads_once` is True.

    `factor` is that of the reduced loss. `token_factor`, 1 or a tensor, is that of the loss of a token, which
    is read only without token weights and class weights.
    """

    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        loss: GivenLogitsLoss,
        batch: Batch,
        factor: float | Tensor,
        token_factor: float | Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        rows, stats = _allocated(logits, loss)
        gradients = _known_gradients(loss, batch, factor, token_factor)
        # For an upstream gradient of 1. It is saved like every tensor, so that checkpoints and offloading see
        # it.
        gradient = torch.empty_like(rows)
        values, tensors, ctx.write_again = kernels.statistics_and_gradient(
            rows,
            batch.given_targets,
            stats,
            kernels.TokenBuffers(**gradients),
            gradient=gradient,
            **_options(loss, batch.class_weights),
        )
        ctx.save_for_backward(*tensors)
        ctx.is_first = True
        return values if loss.reduction == "none" else values.sum(0, keepdim=True)

    @staticmethod
    def backward(ctx, upstream: Tensor | None):
        _check_not_differentiated()
        if upstream is None:
            return (None,) * 5
        logits, gradient, *others = ctx.saved_tensors
        if not ctx.is_first:  # it must not write to what the first backward pass has returned
            gradient = torch.empty_like(logits)
        ctx.write_again((logits, gradient, *others), upstream, unless_one=ctx.is_first)
        ctx.is_first = False
        return gradient, None, None, None, None


def _reads_once(logits: Tensor, loss: GivenLogitsLoss) -> bool:
    """Whether the gradient of the logits is written together with the statistics."""
    return len(logits) > 0 and loss.is_linear and kernels.reads_once(logits, loss.logit_transform)


def _known_gradients(
    loss: GivenLogitsLoss, batch: Batch, factor: float | Tensor, token_factor: float | Tensor
) -> dict[str, Tensor]:
    """Return the gradient (N,) of a linear loss with respect to each statistic."""
    targets = batch.given_targets
    of_tokens = {"size": targets.shape, "dtype": torch.float32, "device": targets.device}
    if batch.class_weights is not None or batch.token_weights is not None:
        statistics = dict.fromkeys(loss.differentiates, torch.zeros(**of_tokens))
        return _evaluated(loss, statistics, batch, factor, differentiate=True)[1]
    coefficients = loss.coefficients(batch.V).items()
    if isinstance(token_factor, Tensor):
        factors = token_factor.expand(targets.shape)
        return {name: factors * x for name, x in coefficients}
    return {name: torch.full(fill_value=x, **of_tokens) for name, x in coefficients}


def _check_not_differentiated() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph: expected False, got True; logitless losses have no second derivative. If you need "
            "one, use torch.nn.functional.cross_entropy."
        )


def _options(loss: CrossEntropyLoss, class_weights: Tensor | None) -> dict:
    weights = class_weights if loss.label_smoothing else None
    return {"transform": loss.logit_transform, "class_weights": weights, "ignore_index": loss.ignore_index}
