"""Differentiable log-probabilities of given tokens: the general primitive, for losses that are not written yet."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.call import Options
from logitless.engine.function import Mode, run_calls
from logitless.engine.operands import SplitHead
from logitless.engine.plan import Plan
from logitless.engine.terms import Term
from logitless.errors import check_choice
from logitless.losses.base import TokenLoss


class TokenLogprobs(NamedTuple):
    """fp32 tensors of the targets' shape, 0 where ignored; `entropy` (nats) is None unless asked for."""

    logps: Tensor
    entropy: Tensor | None
    lse: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenNumbers(TokenLoss):
    """Any of the per-token numbers of a `TokenLoss`, handed out for ordinary autograd: logps and lse always, `entropy` (False, True:
    differentiable, "metric": not) and `also`, without gradient.

    `numbers(hidden, weight, targets)` returns ({name: (...)}, plan), zero where ignored.
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
        """As a loss, the log-probabilities themselves."""
        return {"logps": Term(stats.logps)}, {}

    def numbers(
        self,
        hidden: Tensor,
        weight: Tensor | SplitHead,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        shift: bool = False,
    ) -> tuple[dict[str, Tensor], Plan | None]:
        """({name: (...)}, plan): differentiable numbers in the targets' shape, 0 where ignored."""
        loss = self if self.tp_group is None else self.resolved(weight)
        call = loss.prepared(hidden, weight, targets, bias, Options(shift=shift), {})
        outcome = run_calls([call], Mode.PER_TOKEN)
        return {name: x.view(targets.shape) for name, x in outcome.numbers.items()}, outcome.plan


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    entropy: bool | str = False, **head,
) -> TokenLogprobs:  # fmt: skip
    """log softmax(hidden @ weight.T)[targets], one chunk of logits at a time.

    With a trainable head the backward pass walks the chunks again (4 products in all); with a frozen one it only scales one vector
    per token, kept by the forward pass (2), for any later loss of logps and lse. A differentiable entropy of a frozen head costs one more.

    Args:
        hidden: (..., H).
        weight: (V, H).
        targets: (...) int64.
        bias: (V,).
        entropy: False; True: differentiable; "metric": without gradient, for nothing.
        **head: softcap, logit_scale, temperature, logits_budget, accum_dtype, logits_dtype, compact, tp_group, as in every loss.

    Returns:
        TokenLogprobs(logps, entropy, lse), each of the targets' shape; lse is the log-sum-exp of the logits.
    """
    loss = TokenNumbers(ignore_index=ignore_index, entropy=entropy, **head)
    found, _ = loss.numbers(hidden, weight, targets, bias=bias)
    return TokenLogprobs(found["logps"], found["entropy"] if entropy else None, found["lse"])
