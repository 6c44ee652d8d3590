"""`linear_logprobs`: differentiable log-probabilities of given token ids, for custom losses."""

from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, NamedTuple, TypeVar, Unpack, overload

from torch import Tensor, nn

from logitless.engine.base import Mode, run_calls
from logitless.engine.batch import Batch, TokenStats
from logitless.engine.head_view import HeadView
from logitless.engine.operands import SplitHead
from logitless.engine.plan import Plan
from logitless.engine.sampling_mask import AlignedMask, SamplingMask, check_mask
from logitless.engine.terms import Term
from logitless.errors import check_choice, value_error
from logitless.losses.arguments import HEAD_OPTIONS, CallArguments, accept_missing_targets, check_options
from logitless.losses.base import TokenLoss
from logitless.losses.declarations import cached_loss
from logitless.losses.inputs import HeadOptions, HeadWeight
from logitless.losses.several_ids import IdsStatistics, logprobs_of_ids

# The type of the returned entropy, which depends on the argument `entropy`.
Entropy = TypeVar("Entropy", bound=Tensor | None, covariant=True)


class TokenLogprobs(NamedTuple, Generic[Entropy]):
    """The result of `linear_logprobs`: fp32 tensors (fp64 for fp64 operands), with 0 at ignored positions.

    Attributes:
        logps: log-probabilities in targets' shape: (...), or (..., k).
        entropy: (...), in nats; None with `entropy=False`.
        lse: (...), the log-sum-exp of the logits.
    """

    logps: Tensor
    entropy: Entropy
    lse: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenStatistics(TokenLoss):
    """Per-token statistics of the logits as tensors that autograd can differentiate; see `statistics`.

    Args:
        entropy: whether to compute the entropy. True: with gradient; "metric": without gradient.
        also: names of additional statistics, without gradient.
    """

    entropy: bool | str = False
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("entropy", self.entropy, (False, True, "metric"))

    @property
    def differentiates(self) -> tuple[str, ...]:
        return ("logps", "lse", "entropy") if self.entropy is True else ("logps", "lse")

    @property
    def observes(self) -> tuple[str, ...]:
        return (*self.also, "entropy") if self.entropy == "metric" else self.also

    reduction: ClassVar = "none"

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        """The loss of a token is its log-probability."""
        return {"logps": Term(stats.logps)}, {}

    def statistics(
        self,
        hidden: Tensor,
        weight: Tensor | SplitHead | nn.Module | HeadView,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        shift: bool = False,
        cu_seqlens: Tensor | None = None,
        sampling_mask: SamplingMask | AlignedMask | None = None,
    ) -> tuple[dict[str, Tensor], Plan | None]:
        """Return (statistics by name, plan).

        The statistics have targets' shape, and are 0 at ignored positions.
        """
        inputs = {"sampling_mask": sampling_mask}
        shared = {"bias": bias, "shift": shift, "cu_seqlens": cu_seqlens}
        call = CallArguments(self, hidden, weight, targets, inputs, **shared)
        outcome = run_calls([self.bind(call)], Mode.PER_TOKEN)
        return {name: x.view(targets.shape) for name, x in outcome.statistics.items()}, outcome.plan


class LogprobsOptions(HeadOptions, total=False):
    """Keyword arguments of `linear_logprobs`, except `entropy`."""

    bias: Tensor | None
    ignore_index: int
    shift: bool
    cu_seqlens: Tensor | None
    sampling_mask: SamplingMask | None


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: HeadWeight,
    targets: Tensor,
    *,
    entropy: Literal[False] = False,
    **options: Unpack[LogprobsOptions],
) -> TokenLogprobs[None]: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: HeadWeight,
    targets: Tensor,
    *,
    entropy: Literal[True, "metric"],
    **options: Unpack[LogprobsOptions],
) -> TokenLogprobs[Tensor]: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: HeadWeight,
    targets: Tensor,
    *,
    entropy: bool | Literal["metric"],
    **options: Unpack[LogprobsOptions],
) -> TokenLogprobs[Tensor | None]: ...
@accept_missing_targets
def linear_logprobs(
    hidden: Tensor,
    weight: HeadWeight,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    entropy: bool | Literal["metric"] = False,
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    **head: Unpack[HeadOptions],
) -> TokenLogprobs[Tensor | None]:
    """Compute log softmax(hidden @ weight.T)[targets], one chunk of logits at a time.

    `targets` have one id or k ids per position. The result is differentiable. With a trainable head, the
    backward pass recomputes the chunks of logits (4 products in total). With a frozen head, the forward pass
    saves d logp / d hidden, and the backward pass scales it, for any function of logps and lse (2 products in
    total; 3 with a differentiable entropy).

    With k ids per position, an id that equals `ignore_index` is an empty slot. Its log-probability is -inf
    and has no gradient. A position with only empty slots is ignored. An id may occur in several slots.

    Args:
        hidden: (..., H).
        weight: (V, H), or the LM head itself, as in every loss.
        targets: (...) int64, or (..., k) for k ids per position.
        bias: (V,).
        ignore_index: targets with this id are ignored: their statistics are 0, without gradient. With k ids
            per position, it marks an empty slot.
        entropy: False; True: differentiable; "metric": without gradient, at no extra cost.
        shift: whether targets are unshifted labels of the same length: position i predicts targets[i + 1],
            and the last position of every sequence predicts nothing. The results are aligned with hidden. A
            loss with `shift=True` expects `old_logps` aligned with the targets: pass `logps.roll(1, -1)`.
        cu_seqlens: (sequences + 1,) int64 boundaries of packed sequences, with hidden (N, H); only with
            `shift`.
        sampling_mask: a `SamplingMask` with the ids that the sampler kept for each token. log p, entropy and
            lse are then normalized over these ids. A token with an empty set is normalized over the whole
            vocabulary. For a token with few ids, only the logits of these ids are computed. Only with one id
            per position.
        **head: softcap, logit_scale, temperature, logits_budget, accum_dtype, logits_dtype, compact,
            tp_group, as in every loss.

    Returns:
        A `TokenLogprobs` (logps, entropy, lse): logps in targets' shape, entropy and lse (...).

    Raises:
        ValueError: shapes or options do not match, an id is outside the vocabulary, or `sampling_mask` is
            passed with k ids per position.
        TypeError: an option is unknown, or an argument has the wrong type.

    Examples:
        >>> hidden, weight, targets = torch.randn(6, 8), torch.randn(32, 8), torch.randint(32, (6,))
        >>> logps = linear_logprobs(hidden, weight, targets).logps
        >>> expected = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        >>> torch.allclose(logps, expected, atol=1e-4)
        True
    """
    check_options(head, HEAD_OPTIONS, linear_logprobs)
    if not shift and cu_seqlens is not None:
        raise value_error(
            "cu_seqlens",
            "None without shift",
            type(cu_seqlens).__name__,
            "leave it out: without shift, boundaries do not change the result",
        )
    if sampling_mask is not None:
        check_mask(sampling_mask)
    several = isinstance(targets, Tensor) and isinstance(hidden, Tensor) and targets.dim() == hidden.dim()
    order = {"shift": shift, "cu_seqlens": cu_seqlens}
    if several and hidden.dim() > 0:
        if sampling_mask is not None:
            raise ValueError(
                f"targets: expected one id per token with sampling_mask, got {tuple(targets.shape)}; call "
                "without the mask for several ids."
            )
        check_choice("entropy", entropy, (False, True, "metric"))
        loss = cached_loss(IdsStatistics, ignore_index=ignore_index, entropy=entropy, **head)
        stats, _ = logprobs_of_ids(hidden, weight, targets, bias, loss, **order)
    else:
        loss = cached_loss(TokenStatistics, ignore_index=ignore_index, entropy=entropy, **head)
        stats, _ = loss.statistics(hidden, weight, targets, bias=bias, sampling_mask=sampling_mask, **order)
    return TokenLogprobs(stats["logps"], stats["entropy"] if entropy else None, stats["lse"])
