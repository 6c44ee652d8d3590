"""`cross_entropy` of logits that exist already, by the kernels of the losses.

The forward pass reads the logits once, for a few numbers per token. The backward pass reads them again and
writes their gradient: to a new tensor, or over the logits.
"""

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.call import check_constant, check_vocabulary_input, stat_dtype_of
from logitless.engine.hooks import identity_hooks
from logitless.engine.operands import FLOATS, INTEGERS, apply_mask, check_data, mask_error, shifted
from logitless.engine.terms import declared
from logitless.errors import check_number, type_error, value_error
from logitless.kernels.head import cross_entropy as kernels
from logitless.kernels.head.targets import marked
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
    logits are copied. The formula is that of `CrossEntropyLoss`.

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
            Nothing may read the logits after it: autograd raises an error if it needs them again, unless
            saved-tensor hooks return them unchecked. They must be contiguous, and neither a leaf that
            requires a gradient nor a view of one. Under torch.compile, the compiler decides which memory it
            uses again.

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
    loss = cached_loss(
        CrossEntropyLoss,
        ignore_index=ignore_index,
        reduction=reduction,
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
    flat = logits.reshape(-1, logits.shape[-1])
    V = flat.shape[1]
    targets = targets.reshape(-1).long()
    dtype = stat_dtype_of(logits.dtype)
    if num_items is not None:
        if reduction != "mean":
            remedy = "only reduction='mean' divides by it"
            raise value_error("num_items", f"None with reduction={reduction!r}", num_items, remedy)
        if not isinstance(num_items, Tensor):
            num_items = torch.full((), num_items, dtype=dtype, device=logits.device)
        num_items = num_items.to(logits.device, dtype)
    supervised = _supervised(targets, V, loss, num_items)
    inputs = {
        "class_weights": None if class_weights is None else class_weights.to(dtype),
        "token_weights": None if token_weights is None else token_weights.reshape(-1).to(dtype),
    }
    batch = Batch(targets, V, inputs, ignore_index=ignore_index)
    if torch.compiler.is_compiling():
        values = loss.values(_plain_statistics(flat, batch, loss), batch)
    elif torch.is_grad_enabled() and flat.requires_grad:
        values = _TokenLosses.apply(flat, loss, batch, inplace)
    else:
        _, stats = _statistics(flat, loss, batch)
        values = loss.values(declared(loss, dict(stats.items())), batch)
    # A factor of 0 for ignored tokens, whatever their logits are.
    values = torch.where(supervised, values, 0.0)
    if reduction == "none":
        return values.view(shape)
    if reduction == "sum":
        return values.sum()
    if num_items is None:
        num_items = supervised.sum()
        if class_weights is not None:
            weights = of_targets(inputs["class_weights"], targets)
            num_items = torch.where(supervised, weights, 0.0).sum()
    return values.sum() / torch.where(num_items == 0, 1, num_items)


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
    if isinstance(num_items, Tensor):
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


def _supervised(targets: Tensor, V: int, loss: CrossEntropyLoss, num_items: Tensor | None) -> Tensor:
    """(N,) bool: which tokens count. Raises ValueError for invalid targets and a num_items of 0 or less."""
    is_traced = torch.compiler.is_compiling()
    capturing = not is_traced and targets.is_cuda and torch.cuda.is_current_stream_capturing()
    expected = f"ids in [0, {V}) or ignore_index"
    remedy = "fix the labels or set ignore_index"
    if is_traced:
        supervised = targets != loss.ignore_index
        outside = supervised & ((targets < 0) | (targets >= V))
    else:
        supervised, outside = marked(targets, V, loss.ignore_index).unbind()
    small = None if num_items is None else ~(num_items > 0) & supervised.any()
    if is_traced or capturing:
        torch._assert_async(~outside.any(), f"targets: expected {expected}, got others; {remedy}.")
        if small is not None:
            torch._assert_async(~small, "num_items: expected a number above 0, got 0 or less; count again.")
        return supervised
    counts = [outside.sum()] if small is None else [outside.sum(), small.long()]
    count, *few = torch.stack(counts).tolist()  # the sync
    if count:
        weights = ", and weights of the tokens as token_weights"
        error = mask_error(targets[outside], weights)
        raise error or value_error("targets", expected, f"{count} outside", remedy)
    if any(few):
        got = "0 or less, but the call has supervised tokens"
        raise value_error("num_items", "a number above 0", got, "pass their number")
    return supervised


def _plain_statistics(logits: Tensor, batch: Batch, loss: CrossEntropyLoss) -> TokenStats:
    """The statistics by PyTorch operators, which torch.compile fuses."""
    z, _ = loss.head.logits(logits)
    z = torch.where(batch.supervised[:, None], z, 0.0)  # no NaN of an ignored row reaches its gradient
    stats = TokenStats()
    stats.lse = z.logsumexp(1)
    stats.logps = z.gather(1, batch.targets[:, None])[:, 0] - stats.lse
    if loss.label_smoothing:
        stats.sum_logits = _weighted_sum(z, batch.class_weights)
    return stats


def _weighted_sum(z: Tensor, weights: Tensor | None) -> Tensor:
    """The sums of rows. No product of matrices, which autocast would round."""
    return z.sum(1) if weights is None else (z * weights.to(z.dtype)).sum(1)


def _statistics(logits: Tensor, loss: CrossEntropyLoss, batch: Batch) -> tuple[Tensor, kernels.TokenBuffers]:
    """(logits with contiguous rows, the statistics of each token)."""
    N = logits.shape[0]
    names = loss.differentiates
    stats = kernels.allocate_stats(names, N, stat_dtype_of(logits.dtype), logits.device)
    rows = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
    if N:
        targets = batch.given_targets
        kernels.token_statistics(rows, targets, stats, **_options(loss, batch.class_weights))
    return rows, stats


class _TokenLosses(torch.autograd.Function):
    """Logits (N, V) -> the loss of each token (N,)."""

    @staticmethod
    def forward(ctx, logits: Tensor, loss: CrossEntropyLoss, batch: Batch, inplace: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        rows, stats = _statistics(logits, loss, batch)
        stats = dict(stats.items())
        with torch.enable_grad(), identity_hooks():
            leaves = {name: stats[name].detach().requires_grad_() for name in loss.differentiates}
            values = loss.values(declared(loss, stats | leaves), batch)
            gradients = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
        ctx.loss, ctx.inplace, ctx.names = loss, inplace, tuple(stats)
        ctx.is_overwritten = False
        operands = rows, batch.given_targets, batch.class_weights
        ctx.save_for_backward(*operands, *stats.values(), *gradients)
        return values.detach()

    @staticmethod
    def backward(ctx, upstream: Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: expected False, got True; logitless losses have no second derivative. If you "
                "need one, use torch.nn.functional.cross_entropy."
            )
        if upstream is None:
            return None, None, None, None
        if ctx.is_overwritten:
            raise RuntimeError(
                "inplace: expected one backward pass, got a second one, and the first has overwritten the "
                "logits; leave inplace out."
            )
        ctx.is_overwritten = ctx.inplace
        logits, targets, class_weights, *saved = ctx.saved_tensors
        count = len(ctx.names)
        stats = kernels.TokenBuffers(**dict(zip(ctx.names, saved[:count], strict=True)))
        gradients = zip(ctx.loss.differentiates, saved[count:], strict=True)
        grads = kernels.TokenBuffers(**{name: g * upstream for name, g in gradients if g is not None})
        logits = logits.detach()
        gradient = logits if ctx.inplace else torch.empty_like(logits)
        options = _options(ctx.loss, class_weights)
        if len(logits):
            kernels.logits_gradient(logits, targets, stats, grads, gradient=gradient, **options)
        if ctx.inplace:
            torch.autograd.graph.increment_version(gradient)
        return gradient, None, None, None


def _options(loss: CrossEntropyLoss, class_weights: Tensor | None) -> dict:
    weights = class_weights if loss.label_smoothing else None
    return {"head": loss.head, "class_weights": weights, "ignore_index": loss.ignore_index}
