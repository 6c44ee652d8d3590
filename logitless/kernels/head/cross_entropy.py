"""Statistics and gradients of one chunk of logits (C, V), for all losses of log-probabilities.

    token_statistics   logits -> log p(target), log-sum-exp and, if requested, entropy, top-1 flag, weighted
                       sum of logits, log sum p^2
    logprob_gradient   token_statistics and d log p(target) / d logits, in place, in a single pass over the
                       logits
    logits_gradient    logits -> d loss / d logits, in place, from the gradients of the per-token statistics
    statistics_and_gradient
                       the first and the third at once, if the gradients of the statistics are known
                       before the statistics: the logits are read from memory once

The logits z of the statistics are those after the head transform (`kernels/head/transform.py`).
`statistics.py` has the formulas of all statistics and of their derivatives.

The first three have two implementations: Triton (`cross_entropy_triton.py`), and the PyTorch twin below,
which processes a few rows at a time so that its temporaries are small compared with the chunk. The last one
is a Triton kernel (`split_rows_triton.py`) and runs where `reads_once` is True. "In place" means
that the result is written to `gradient`, which is `logits` or a narrower tensor in the same memory.

Both compute in promote(logits.dtype, fp32): fp32 for logits of up to 32 bits, and fp64 for fp64 logits, for
which the twin runs on every device. Bias and class weights are converted to this dtype. Vectors may have any
stride. The rows of the logits and of their gradient must be contiguous.
"""

from collections.abc import Callable, Sequence
from dataclasses import make_dataclass

import torch
from torch import Tensor

from logitless.kernels import uses_triton
from logitless.kernels.head.statistics import COMPUTED_WITH, FLAGS, NAMES
from logitless.kernels.head.transform import LogitTransform


class TokenBuffers(make_dataclass("TokenBuffers", [(name, Tensor | None, None) for name in NAMES])):
    """The statistics of `STATISTICS` by name, (n,) each, fp32 (fp64 for fp64 logits); None for a statistic
    that is not requested.
    """

    def items(self) -> list[tuple[str, Tensor]]:
        """(name, buffer) of the requested statistics, in the order of the fields."""
        return [(name, x) for name, x in vars(self).items() if x is not None]

    def pointers(self) -> list[Tensor]:
        """All statistics in order, as arguments of a kernel; lse replaces a statistic that is None."""
        return [self.lse if (x := getattr(self, name)) is None else x for name in NAMES]

    def flags(self) -> dict[str, bool]:
        """The constexprs of a kernel that switch the levels on."""
        return {flag: getattr(self, name) is not None for flag, name in FLAGS.items()}

    def __getitem__(self, rows: slice | Tensor) -> "TokenBuffers":
        # A slice of all rows needs no views, which would cost host time before the first product.
        if isinstance(rows, slice) and self.lse is not None:
            n = self.lse.shape[0]
            if rows.indices(n) == (0, n, 1):
                return self
        return TokenBuffers(**{name: x[rows] for name, x in self.items()})


def stat_names(names: Sequence[str]) -> tuple[str, ...]:
    """The named statistics and all statistics that are computed with them, which include logps and lse."""
    return max([COMPUTED_WITH[name] for name in ("lse", *names)], key=len)


def allocate_stats(names: Sequence[str], n: int, dtype: torch.dtype, device: torch.device) -> TokenBuffers:
    """Allocate uninitialized buffers (n,) for the statistics of `stat_names`."""
    return TokenBuffers(**{name: torch.empty(n, dtype=dtype, device=device) for name in stat_names(names)})


def single_pass(gradient_dtype: torch.dtype) -> bool:
    """Whether `logprob_gradient` may store unnormalized exponentials.

    Not in fp16, which overflows at exp(11.1).
    """
    return gradient_dtype != torch.float16


def token_statistics(
    logits: Tensor,  # (C, V)
    targets: Tensor,  # (C,) int64; V or more for a target in another shard of the vocabulary
    out: TokenBuffers,  # (C,) each, written
    *,
    transform: LogitTransform,
    bias: Tensor | None = None,  # (V,)
    class_weights: Tensor | None = None,  # (V,) weights of sum_logits; None: 1
    ignore_index: int = -100,
    maxima: Tensor | None = None,  # from `select.new_maxima`, written
) -> None:
    """Write the statistics to `out`; 0 in ignored rows.

    A target of V or more belongs to another shard of the vocabulary. Its row gets -inf as logps and the row's
    largest logit as is_top1, which `shards.merge_stats` merges. The statistics of a negative target,
    which is invalid, are arbitrary.
    """
    if uses_triton(logits.device, logits.dtype):
        from logitless.kernels.head import cross_entropy_triton

        cross_entropy_triton.row_pass(
            logits,
            targets,
            out,
            bias=bias,
            class_weights=class_weights,
            transform=transform,
            ignore_index=ignore_index,
            gradient=None,
            maxima=maxima,
        )
        return
    _token_statistics_twin(logits, targets, out, transform, bias, class_weights, ignore_index)


def logprob_gradient(
    logits: Tensor,
    targets: Tensor,
    out: TokenBuffers,
    *,
    gradient: Tensor,
    transform: LogitTransform,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,  # (V,) weights of sum_logits; None: 1
    ignore_index: int = -100,
) -> Tensor:
    """Write the statistics to `out` and an unscaled gradient to `gradient`.

    Returns:
        row_scale (C,): d logp / d logits = row_scale[:, None] * gradient.
    """
    if uses_triton(logits.device, logits.dtype):
        from logitless.kernels.head import cross_entropy_triton

        return cross_entropy_triton.row_pass(
            logits,
            targets,
            out,
            bias=bias,
            class_weights=class_weights,
            transform=transform,
            ignore_index=ignore_index,
            gradient=gradient,
        )
    _token_statistics_twin(logits, targets, out, transform, bias, class_weights, ignore_index, gradient)
    return torch.ones_like(out.lse)


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    stats: TokenBuffers,  # logps, lse, lse_residual, and entropy if it has a gradient
    grads: TokenBuffers,  # d loss / d statistic, each (C,); None for a statistic without gradient
    *,
    gradient: Tensor,  # (C, V), written
    transform: LogitTransform,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    upstream: Tensor | None = None,  # (1,) or (C,) factor of the gradients
) -> None:
    """Write d loss / d logits to `gradient`; zeros in ignored rows."""
    if uses_triton(logits.device, logits.dtype):
        from logitless.kernels.head import cross_entropy_triton

        cross_entropy_triton.logits_gradient(
            logits,
            targets,
            stats,
            grads,
            bias=bias,
            class_weights=class_weights,
            transform=transform,
            ignore_index=ignore_index,
            gradient=gradient,
            upstream=upstream,
        )
        return
    if upstream is not None:
        grads = TokenBuffers(**{name: grad * upstream for name, grad in grads.items()})
    _logits_gradient_twin(
        logits, targets, stats, grads, transform, bias, class_weights, ignore_index, gradient
    )


def reads_once(logits: Tensor, transform: LogitTransform) -> bool:
    """Whether `statistics_and_gradient` runs for these logits: on NVIDIA GPUs with enough multiprocessors for
    a row, and in Triton's interpreter; not in fp64, nor with a logit scale of 0.
    """
    if not uses_triton(logits.device, logits.dtype):
        return False
    from logitless.kernels.head import split_rows_triton

    return split_rows_triton.runs_on(logits.device, logits.shape[1], transform)


def statistics_and_gradient(
    logits: Tensor,
    targets: Tensor,
    out: TokenBuffers,  # logps, lse, lse_residual and sum_logits, (C,) each, written
    grads: TokenBuffers,  # d loss / d statistic, each (C,), which do not depend on the statistics
    *,
    gradient: Tensor,  # (C, V), written; not the memory of the logits
    transform: LogitTransform,
    class_weights: Tensor | None = None,  # (V,) weights of sum_logits; None: 1
    ignore_index: int = -100,
) -> tuple[Tensor, list[Tensor], Callable[..., None]]:
    """Write the statistics that can have such gradients to `out`, and d loss / d logits to `gradient`.

    Only where `reads_once` is True. entropy and is_top1 of `out` are not written.

    Returns:
        (values, tensors, write_again). values (C,): the sum of the statistics times their gradients, which is
        the loss of a row. tensors[0] is `logits` and tensors[1] `gradient`. write_again(tensors, upstream,
        unless_one=...) writes the gradient with the factor `upstream`, (1,) or (C,). With `unless_one`, the
        rows where it is 1 are not written, because they are right already.
    """
    from logitless.kernels.head import split_rows_triton

    return split_rows_triton.statistics_and_gradient(
        logits,
        targets,
        out,
        grads,
        gradient=gradient,
        class_weights=class_weights,
        transform=transform,
        ignore_index=ignore_index,
    )


# The twins process a few rows at a time: so few that their temporaries fit into a CPU's cache, and so many
# that the overhead of PyTorch calls is negligible.
TWIN_BYTES = 2 * 2**20
TWIN_TEMPORARIES = 6
SMALL_CHUNK = 8 * 2**10


def _wide_row(V: int, dtype: torch.dtype) -> int:
    return V * torch.promote_types(dtype, torch.float32).itemsize


def twin_bytes(device: torch.device, dtype: torch.dtype, V: int, budget: int) -> int:
    """Bytes of the twins' temporaries for a chunk within the budget; 0 if the kernels run."""
    if uses_triton(device, dtype):
        return 0
    row = _wide_row(V, dtype)
    return TWIN_TEMPORARIES * max(row, SMALL_CHUNK, min(TWIN_BYTES, budget // 24))


def twin_rows(logits: Tensor) -> int:
    """Number of rows that a twin processes at a time."""
    # The temporaries are within `twin_bytes` for every budget: a chunk takes at most 3/4 of it, twice that
    # when upcast.
    row = _wide_row(logits.shape[1], logits.dtype)
    return max(1, min(TWIN_BYTES // row, max(logits.shape[0] // 36, SMALL_CHUNK // row)))


def _row_blocks(logits: Tensor, transform: LogitTransform, bias: Tensor | None):
    step = twin_rows(logits)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        yield rows, *transform.logits(logits[rows], bias)


def _token_statistics_twin(
    logits, targets, out, transform, bias, class_weights, ignore_index, gradient=None
) -> None:
    """Write the statistics to `out` and, unless `gradient` is None, d logp / d logits to `gradient`."""
    for rows, z, slope in _row_blocks(logits, transform, bias):
        supervised = targets[rows] != ignore_index
        inside = targets[rows] < z.shape[1]
        target = torch.where(supervised & inside, targets[rows], 0).clamp_(min=0)[:, None]
        top, arg_max = z.max(1)
        log_p = torch.log_softmax(z, 1)
        top_log_p = log_p.gather(1, arg_max[:, None])[:, 0]
        lse = top - top_log_p
        stats = {"logps": torch.where(inside, log_p.gather(1, target)[:, 0], -torch.inf), "lse": lse}
        stats["is_top1"] = torch.where(inside, (arg_max == targets[rows]).to(z.dtype), top)
        stats["lse_residual"] = torch.where(lse.isfinite(), (top - lse) - top_log_p, 0.0)
        if out.sum_logits is not None:
            stats["sum_logits"] = (z if class_weights is None else z * class_weights.to(z.dtype)).sum(1)
        del z
        p = log_p.exp()
        if out.entropy is not None:
            # Terms with p = 0 are 0, although log p is -inf.
            stats["entropy"] = -log_p.clamp_(min=-1e4).mul_(p).sum(1)
        if out.log_sum_sq_probs is not None:
            stats["log_sum_sq_probs"] = torch.mul(p, p, out=log_p).sum(1).log()
        for name, buffer in out.items():
            buffer[rows] = torch.where(supervised, stats[name], 0.0)
        if gradient is not None:
            p.scatter_add_(1, target, -inside[:, None].to(p.dtype))
            _store(gradient[rows], p.neg_(), slope, supervised)


def _logits_gradient_twin(
    logits, targets, stats, grads, transform, bias, class_weights, ignore_index, gradient
) -> None:
    g_logp = torch.zeros_like(stats.lse) if grads.logps is None else grads.logps
    g_lse = torch.zeros_like(stats.lse) if grads.lse is None else grads.lse
    g_softmax = g_lse - g_logp
    # At the target, logps is more accurate than z - lse, and 1 - p must not cancel.
    g_target = g_lse * stats.logps.exp() - g_logp * torch.expm1(stats.logps)
    for rows, z, slope in _row_blocks(logits, transform, bias):
        supervised = targets[rows] != ignore_index
        inside = targets[rows] < z.shape[1]
        log_p = (z - stats.lse[rows, None]).sub_(stats.lse_residual[rows, None])
        has_target = (supervised & inside)[:, None]
        target = torch.where(has_target, targets[rows, None], 0)
        p = _put(log_p, target, has_target, stats.logps[rows, None]).exp()
        g = _put(p * g_softmax[rows, None], target, has_target, g_target[rows, None])
        if grads.entropy is not None:
            log_p = log_p.clamp_(min=-1e4).add_(stats.entropy[rows, None]).mul_(p)
            g.addcmul_(log_p, grads.entropy[rows, None], value=-1)
        if grads.sum_logits is not None:
            weights = 1.0 if class_weights is None else class_weights.to(g.dtype)
            g += grads.sum_logits[rows, None] * weights
        _store(gradient[rows], g, slope, supervised)


def _put(x: Tensor, columns: Tensor, where: Tensor, values: Tensor) -> Tensor:
    """Replace one entry of each row of `x`, in place, if `where` (n, 1) is True for the row."""
    return x.scatter_(1, columns, torch.where(where, values.to(x.dtype), x.gather(1, columns)))


def _store(out: Tensor, g: Tensor, slope: Tensor | float, supervised: Tensor) -> None:
    """Multiply by the slope of the head transform and store.

    The gradient of an ignored row is 0, even if its logits are NaN.
    """
    if not (isinstance(slope, float) and slope == 1.0):
        g *= slope
    out.copy_(g.masked_fill_(~supervised[:, None], 0.0))
