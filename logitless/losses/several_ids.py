"""Log-probabilities of several ids per token: ids that are passed, or the k ids with the largest logits."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor

from logitless.engine.base import Mode, run_calls
from logitless.engine.batch import Batch, TokenStats
from logitless.engine.operands import INTEGERS, SplitHead, checked_boundaries, shifted, supervised_where
from logitless.engine.plan import Plan
from logitless.engine.readers.ids import IdsReader, TopkReader
from logitless.engine.terms import Term
from logitless.errors import type_error, value_error
from logitless.kernels.head.targets import one_per_position
from logitless.losses.arguments import HEAD_OPTIONS, CallArguments, check_options, warn_of_zeros
from logitless.losses.declarations import cached_loss, without_labels
from logitless.losses.inputs import HeadOptions, HeadWeight
from logitless.losses.linear import LinearLoss


class TopkLogprobs(NamedTuple):
    """The result of `linear_topk`: the k ids with the largest logits of each position, in descending order.

    All tensors are 0 at masked positions.

    Attributes:
        logps: (..., k) log-probabilities, fp32.
        ids: (..., k) int64 token ids.
        entropy: (...) entropy over the whole vocabulary, in nats, fp32.
        lse: (...) log-sum-exp of the logits, fp32.
    """

    logps: Tensor
    ids: Tensor
    entropy: Tensor
    lse: Tensor


@dataclass(frozen=True, kw_only=True)
class IdsStatistics(LinearLoss):
    """The statistics of ids (..., k) that `IdsReader` computes, as tensors for autograd."""

    entropy: bool | str = False

    k: ClassVar[int | None] = None
    prediction_inputs: ClassVar = ("ids",)
    reader: ClassVar[type] = IdsReader
    reduction: ClassVar = "none"

    @property
    def differentiates(self) -> tuple[str, ...]:
        return ("logps", "lse", "entropy") if self.entropy is True else ("logps", "lse")

    @property
    def observes(self) -> tuple[str, ...]:
        return ("entropy",) if self.entropy == "metric" else ()

    def slots(self, inputs) -> int:
        """The number of ids per position."""
        return inputs["ids"].shape[-1]

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        """The loss of a token is the sum of the log-probabilities of its ids."""
        return {"logps": Term(stats.logps.sum(-1))}, {}

    def statistics(
        self,
        hidden: Tensor,
        weight: HeadWeight | SplitHead,
        targets: Tensor,
        bias: Tensor | None,
        ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Plan | None]:
        """Return (statistics by name, plan).

        Statistics have shape (..., k) or (...). A position is computed unless its entry in `targets` (...) is
        `ignore_index`.
        """
        call = CallArguments(self, hidden, weight, targets, {"ids": ids}, bias, cu_seqlens=cu_seqlens)
        outcome = run_calls([self.bind(call)], Mode.PER_TOKEN)
        shaped = {name: x.view((*targets.shape, *x.shape[1:])) for name, x in outcome.statistics.items()}
        return shaped, outcome.plan


@dataclass(frozen=True, kw_only=True)
class TopkStatistics(IdsStatistics):
    """The k ids with the largest logits and their statistics, without gradients (`TopkReader`)."""

    k: int = 1
    unmasked: bool = False

    reader: ClassVar[type] = TopkReader
    differentiates: ClassVar = ()

    def slots(self, inputs) -> int:
        return self.k


def supervised_by_mask(
    mask: Tensor | None, shape: torch.Size, ignore_index: int, device: torch.device
) -> Tensor:
    """`supervised_where`, with an error message for `linear_topk`."""
    if mask is None:
        return supervised_where(None, shape, ignore_index, device)
    if mask.shape != shape:
        raise value_error(
            "mask", f"shape {tuple(shape)}, one entry per token", tuple(mask.shape), "align it with hidden"
        )
    return supervised_where(mask, shape, ignore_index, device)


def check_ids(ids: Tensor, hidden: Tensor) -> None:
    if ids.dtype not in INTEGERS:
        raise type_error(
            "targets", "integer token ids (int64)", ids.dtype, "pass token ids, not probabilities or a mask"
        )
    if ids.shape[:-1] != hidden.shape[:-1] or ids.shape[-1] == 0:
        raise value_error(
            "targets",
            f"shape {tuple(hidden.shape[:-1])} + (k,) with k >= 1",
            tuple(ids.shape),
            "pass the same number of ids for every position",
        )


def logprobs_of_ids(
    hidden: Tensor,
    weight: HeadWeight,
    ids: Tensor,
    bias: Tensor | None,
    loss: IdsStatistics,
    *,
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[dict[str, Tensor], Plan | None]:
    """Return (statistics by name, plan) for `linear_logprobs` with ids (..., k)."""
    check_ids(ids, hidden)
    ids = ids.long()
    if shift:
        if hidden.dim() <= 1:
            raise value_error("shift", "False for hidden (H,)", True, "a single token has no next token")
        loss.check_tensors(cu_seqlens=cu_seqlens)
        if cu_seqlens is not None:
            cu_seqlens = checked_boundaries(cu_seqlens, ids)
        ids = shifted(ids, loss.ignore_index, -2, cu_seqlens)
    targets = one_per_position(ids, loss.ignore_index)
    # Any negative id is an empty slot.
    slots = ids if loss.ignore_index < 0 else torch.where(ids == loss.ignore_index, -1, ids)
    return loss.statistics(hidden, weight, targets, bias, slots, cu_seqlens)


def linear_topk(
    hidden: Tensor,
    weight: HeadWeight,
    k: int,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    **head: Unpack[HeadOptions],
) -> TopkLogprobs:
    """Compute the k largest of log softmax(hidden @ weight.T) and their ids, one chunk of logits at a time.

    The result has no gradient, and takes one product. Among equal logits, the lowest id comes first. The
    default `logits_dtype` is fp32, because for most tokens several logits would equal the k-th logit after
    rounding to bf16.

    Args:
        hidden: (..., H).
        weight: (V, H), or the LM head itself, as in every loss.
        k: number of ids per position, at most V.
        bias: (V,).
        mask: (...), True (1) for the positions to compute. All other positions are not projected, and get
            zeros. bool, or integers or floats that are 0 or 1.
        **head: softcap, logit_scale, temperature, logits_budget, logits_dtype, compact, tp_group, as in every
            loss.

    Returns:
        A `TopkLogprobs` (logps, ids, entropy, lse): logps and ids (..., k), entropy and lse (...).

    Raises:
        ValueError: shapes or options do not match, or k is below 1 or above V.
        TypeError: an option is unknown, or an argument has the wrong type.

    Examples:
        >>> hidden, weight = torch.randn(6, 8), torch.randn(32, 8)
        >>> logps, ids, entropy, lse = linear_topk(hidden, weight, k=4)
        >>> torch.allclose(logps, (hidden @ weight.T).log_softmax(-1).topk(4).values, atol=1e-4)
        True
    """
    # There are no labels, and no gradient.
    allowed = [name for name in HEAD_OPTIONS if name not in ("ignore_index", "accum_dtype")]
    check_options(head, tuple(allowed), linear_topk)
    if not isinstance(k, int) or isinstance(k, bool):
        raise type_error("k", "a whole number", repr(k), "pass a number of token ids")
    if k < 1:
        raise value_error("k", "at least 1", k, "pass a number of token ids")
    if not isinstance(hidden, Tensor):
        raise type_error(
            "hidden",
            "a tensor",
            type(hidden).__name__,
            "pass the hidden states, such as model.model(ids).last_hidden_state",
        )
    if head.get("logits_dtype") is None:
        head["logits_dtype"] = torch.promote_types(_product_dtype(hidden), torch.float32)
    loss = without_labels(cached_loss(TopkStatistics, k=k, unmasked=mask is None, **head))
    with torch.no_grad():
        targets = supervised_by_mask(mask, hidden.shape[:-1], loss.ignore_index, hidden.device)
        stats, plan = loss.statistics(hidden, weight, targets, bias)
    warn_of_zeros(mask, loss, plan)
    return TopkLogprobs(stats["logps"], stats["ids"], stats["entropy"], stats["lse"])


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else hidden.dtype
