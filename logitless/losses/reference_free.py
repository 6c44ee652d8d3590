"""Preference losses of pairs without a reference model: ORPO, CPO and SimPO."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.spec import Fault
from logitless.engine.terms import Term
from logitless.errors import check_choice, value_error
from logitless.losses.arguments import CallArguments
from logitless.losses.base import LossOutput
from logitless.losses.inputs import CallInputs, HeadWeight
from logitless.losses.numerics import bounded_exp
from logitless.losses.preference import (
    PairedLoss,
    UnreferencedLoss,
    chosen_nll,
    of_pairs,
    pair_metrics,
    preference_metrics,
    smoothed,
)

# Upper bound of the mean log-probabilities. It keeps the odds p / (1 - p) finite in fp32.
CERTAIN = -1e-7


@dataclass(frozen=True, kw_only=True)
class ORPOLoss(UnreferencedLoss):
    """Odds-ratio preference optimization (ORPO).

        NLL - beta * log sigma(log odds_c - log odds_r)

    NLL is the mean negative log-likelihood of the tokens of the chosen sequences, and odds = p / (1 - p),
    where log p is the mean log-probability of the tokens of the chosen sequence c or of the rejected sequence
    r. log p is clamped to at most -1e-7.

    Args:
        beta: weight of the odds ratio (lambda in the paper).

    Inputs:
        hidden, weight, targets, **arguments: as in `DPOLoss`, without a reference.
        nll_targets: labels of the NLL, in targets' shape, if the NLL includes more tokens than the
            completions (in TRL's ORPO, it includes the prompts). For the completions of the chosen sequences,
            they must equal the targets. Labels of rejected sequences are ignored. Cannot be combined with
            `mask`.
        num_items: the number of pairs by which the odds-ratio term divides. The NLL is always the mean over
            its tokens in the call.

    Metrics: the metrics of `DPOLoss` (with means in `logps/*`), log_odds_ratio and log_odds_chosen.

    Reference: Hong et al., 2024, https://arxiv.org/abs/2403.07691.

    Examples:
        >>> hidden, weight = torch.randn(4, 5, 8), torch.randn(32, 8, requires_grad=True)
        >>> targets = torch.randint(32, (4, 5))  # of 2 chosen sequences, then 2 rejected
        >>> ORPOLoss(beta=0.1)(hidden, weight, targets).loss.backward()
        >>> weight.grad.shape
        torch.Size([32, 8])
    """

    beta: float = 0.1

    token_inputs: ClassVar = ("completion",)
    shared_inputs: ClassVar = ("contradicting",)
    metric_names: ClassVar = (*PairedLoss.metric_names, "log_odds_ratio", "log_odds_chosen")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps = stats.logps
        lengths = batch.lengths
        if batch.completion is not None:
            lengths = batch.sum_by_sequence(batch.completion.to(logps.dtype))
            logps = torch.where(batch.completion, logps, 0.0)
        means = batch.sum_by_sequence(logps) / lengths.clamp(min=1)
        chosen, rejected = of_pairs(means)
        certain = means.clamp(max=CERTAIN)
        log_odds = torch.sub(*of_pairs(certain - torch.log(-torch.expm1(certain))))
        ratio = logsigmoid(log_odds)
        terms = {
            "nll": Term(chosen_nll(stats, batch), over="chosen_tokens"),
            "odds_ratio": Term(-self.beta * ratio, over="pairs"),
        }
        metrics = pair_metrics((chosen, rejected), (self.beta * chosen, self.beta * rejected))
        metrics |= {
            "log_odds_ratio": Term(ratio, over="pairs"),
            "log_odds_chosen": Term(log_odds, over="pairs"),
        }
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen, batch.completion)

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        nll_targets: Tensor | None = None,
        **arguments: Unpack[CallInputs],
    ) -> LossOutput:
        return super().__call__(hidden, weight, targets, nll_targets=nll_targets, **arguments)

    def prepare(self, call: CallArguments) -> None:
        super().prepare(call)
        nll_targets = call.inputs.pop("nll_targets", None)
        if nll_targets is None:
            return
        if call.mask is not None:
            remedy = "set unsupervised positions to ignore_index in targets and nll_targets"
            raise value_error("mask", "None with nll_targets", "a tensor", remedy)
        targets = call.targets.long()
        nll_targets = nll_targets.long()
        if nll_targets.shape != targets.shape:
            expected = f"targets' shape {tuple(targets.shape)}"
            remedy = "pass a label or ignore_index per token"
            raise value_error("nll_targets", expected, tuple(nll_targets.shape), remedy)
        chosen = _of_chosen(targets, call.cu_seqlens)
        completion = targets != self.ignore_index
        call.inputs["completion"] = completion
        call.inputs["contradicting"] = _contradicting(targets, nll_targets, chosen, self.ignore_index)
        # Rejected sequences have no NLL. Therefore the rows of their prompts need not be projected.
        more = torch.where(chosen, nll_targets, self.ignore_index)
        call.targets = torch.where(completion, targets, more)

    def faults(self, targets: Tensor, inputs: Mapping[str, Tensor | None], V: int) -> list[Fault]:
        """The check that `nll_targets` equal the targets in the chosen completions."""
        count = inputs["contradicting"]
        remedy = "pass the labels of prompt and completion together"
        if count is None:
            return []
        expected = "targets' own labels on the completions of the chosen sequences"
        return [Fault(count, "nll_targets", expected, "{count} others", remedy)]


def _of_chosen(targets: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Whether each token belongs to a chosen sequence: bool, broadcastable to the shape of the targets."""
    half = targets.shape[0] // 2 if cu_seqlens is None else cu_seqlens[cu_seqlens.shape[0] // 2]
    chosen = torch.arange(targets.shape[0], device=targets.device) < half
    return chosen.view(-1, *[1] * (targets.dim() - 1))


def _contradicting(targets: Tensor, nll_targets: Tensor, chosen: Tensor, ignore_index: int) -> Tensor:
    """() int64 number of tokens of chosen completions whose labels in `targets` and `nll_targets` differ."""
    return (chosen & (targets != ignore_index) & (nll_targets != targets)).sum()


CPOType = Literal["sigmoid", "hinge", "ipo", "simpo"]
CPO_LOSSES: Mapping[str, Callable[["CPOLoss", Tensor], Tensor]] = {
    "sigmoid": lambda loss, delta: smoothed(loss.beta * delta, loss.label_smoothing),
    "hinge": lambda loss, delta: relu(1 - loss.beta * delta),
    "ipo": lambda loss, delta: (delta - 0.5 / loss.beta).square(),
    "simpo": lambda loss, delta: smoothed(loss.beta * delta - loss.simpo_gamma, loss.label_smoothing),
}

# Loss types that TRL computes from means over the tokens of a sequence; the other types use sums.
CPO_AVERAGED = frozenset({"ipo", "simpo"})


@dataclass(frozen=True, kw_only=True)
class CPOLoss(UnreferencedLoss):
    """Contrastive preference optimization (CPO): a preference loss without a reference model.

        loss(log p_c - log p_r) + cpo_alpha * NLL

    p_c and p_r are the probabilities of the chosen and of the rejected sequence. NLL is the mean negative
    log-likelihood of the chosen tokens.

    Args:
        beta: scale of the difference.
        loss_type: "sigmoid", "hinge", "ipo" or "simpo".
        average_logps: divide the log-probability of each sequence by its length. None is TRL's choice: True
            for ipo and simpo, False for sigmoid and hinge. The metrics `logps/*` and `rewards/*` are then
            means as well.
        label_smoothing: assumed fraction of flipped labels, for "sigmoid" and "simpo".
        cpo_alpha: weight of the NLL.
        simpo_gamma: target margin of "simpo".
        alpha: alpha of AlphaPO, whose reward (1 - p^-alpha) / alpha replaces log p. 0: use log p.

    Inputs:
        hidden, weight, targets, **arguments: as in `DPOLoss`, without a reference.

    Metrics: the metrics of `DPOLoss`.

    References: Xu et al., 2024, https://arxiv.org/abs/2401.08417; SimPO, Meng et al., 2024,
    https://arxiv.org/abs/2405.14734; AlphaPO, Gupta et al., 2025, https://arxiv.org/abs/2501.03884.

    Examples:
        >>> hidden, weight = torch.randn(4, 5, 8), torch.randn(32, 8, requires_grad=True)
        >>> targets = torch.randint(32, (4, 5))  # of 2 chosen sequences, then 2 rejected
        >>> CPOLoss(loss_type="sigmoid")(hidden, weight, targets).loss.backward()
        >>> weight.grad.shape
        torch.Size([32, 8])
    """

    beta: float = 0.1
    loss_type: CPOType = "sigmoid"
    average_logps: bool | None = None
    label_smoothing: float = 0.0
    cpo_alpha: float = 1.0
    simpo_gamma: float = 0.5
    alpha: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss_type", self.loss_type, CPO_LOSSES)
        if self.beta <= 0:
            raise value_error("beta", "a positive number", self.beta, "TRL's default is 0.1")
        if not 0 <= self.label_smoothing <= 1:
            raise value_error(
                "label_smoothing", "a number in [0, 1]", self.label_smoothing, "use 0.0 for none"
            )

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps = batch.sum_by_sequence(stats.logps)
        means = self.loss_type in CPO_AVERAGED if self.average_logps is None else self.average_logps
        if means:
            logps = logps / batch.lengths.clamp(min=1)
        rewards = (1 - bounded_exp(-self.alpha * logps)) / self.alpha if self.alpha else logps
        better, worse = of_pairs(rewards)
        terms = {"cpo": Term(CPO_LOSSES[self.loss_type](self, better - worse), over="pairs")}
        if self.cpo_alpha:
            terms["nll"] = Term(self.cpo_alpha * chosen_nll(stats, batch), over="chosen_tokens")
        metrics = pair_metrics(of_pairs(logps), (self.beta * better, self.beta * worse))
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen)


@dataclass(frozen=True, kw_only=True)
class SimPOLoss(UnreferencedLoss):
    """Simple preference optimization (SimPO), without a reference model.

        -log sigma(beta * (mean log p_c - mean log p_r) - gamma)

    The means are over the tokens of the chosen sequence c and of the rejected sequence r.

    Args:
        beta: scale of the difference of mean log-probabilities.
        gamma: target margin.

    Inputs:
        hidden, weight, targets, **arguments: as in `DPOLoss`, without a reference.

    Metrics: the metrics of `DPOLoss`, with means in `logps/*`.

    Reference: Meng et al., 2024, https://arxiv.org/abs/2405.14734.

    Examples:
        >>> hidden, weight = torch.randn(4, 5, 8), torch.randn(32, 8, requires_grad=True)
        >>> targets = torch.randint(32, (4, 5))  # of 2 chosen sequences, then 2 rejected
        >>> SimPOLoss(gamma=0.5)(hidden, weight, targets).loss.backward()
        >>> weight.grad.shape
        torch.Size([32, 8])
    """

    beta: float = 2.0
    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta <= 0:
            raise value_error("beta", "a positive number", self.beta, "the paper uses 2.0 to 2.5")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        chosen, rejected = of_pairs(batch.sum_by_sequence(stats.logps) / batch.lengths.clamp(min=1))
        terms = {"simpo": Term(-logsigmoid(self.beta * (chosen - rejected) - self.gamma), over="pairs")}
        metrics = pair_metrics((chosen, rejected), (self.beta * chosen, self.beta * rejected))
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen)
