"""What preference losses share: pairs, a reference model, and TRL's metrics of both."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from logitless.kernels.cross_entropy import TokenStats
from logitless.kernels.head import Head
from logitless.losses.arguments import resolved
from logitless.losses.base import LossOutput, TokenLoss
from logitless.losses.batch import Batch, Term
from logitless.losses.checks import check_choice, expect
from logitless.losses.logprobs import linear_logprobs

# exp() of a log-ratio beyond this is infinite in fp32, and its gradient not a number.
LARGEST = 80.0


def bounded_exp(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).exp()


def preference_metrics(stats: TokenStats, batch: Batch, chosen: Tensor, completion: Tensor | None = None) -> dict[str, Term]:
    """TRL's metrics of the tokens: `chosen` tells their side, `completion` which of them belong to the completion (default: all)."""
    ours = torch.ones_like(stats.logps) if completion is None else completion.to(stats.logps.dtype)
    mean_logits = stats.sum_logits.detach() / batch.V
    logps, sides = stats.logps.detach(), {"chosen": ours * chosen, "rejected": ours * ~chosen}
    metrics = {f"logits/{side}": Term(mean_logits * weight, over=weight) for side, weight in sides.items()}
    return metrics | {
        "entropy": Term(stats.entropy * ours, over=ours),
        "mean_token_accuracy": Term(stats.is_top1 * sides["chosen"], over=sides["chosen"]),
        "nll_loss": Term(-logps * chosen, over="chosen_tokens"),
    }


METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")
TOKEN_METRICS = ("logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy", "nll_loss")


@dataclass(frozen=True, kw_only=True)
class PairedLoss(TokenLoss):
    """What the losses of pairs share."""

    scope: ClassVar = "group"
    unit: ClassVar = "pairs"
    sequences_per_group: ClassVar = 2
    context_parallel: ClassVar = True
    observes: ClassVar = ("entropy", "is_top1", "sum_logits")
    metric_names: ClassVar = METRICS + TOKEN_METRICS


def pair_metrics(logps: tuple[Tensor, Tensor], rewards: tuple[Tensor, Tensor]) -> dict[str, Term]:
    """TRL's metrics of the pairs, from their (chosen, rejected) log-probabilities and rewards."""
    (chosen, rejected), (better, worse) = logps, rewards
    values = (better, worse, (better > worse).to(better.dtype), better - worse, chosen, rejected)
    return {name: Term(x.detach(), over="pairs") for name, x in zip(METRICS, values, strict=True)}


@dataclass(frozen=True, kw_only=True)
class ReferencedLoss(TokenLoss):
    """A loss that compares with a reference model, given by its log-probabilities or by its hidden states and head.

    Args:
        ref_softcap, ref_logit_scale: of the reference's head; "same" as the trained one's.
    """

    ref_softcap: float | str | None = "same"
    ref_logit_scale: float | str = "same"

    reference: ClassVar = True
    token_inputs: ClassVar = ("ref_logps",)
    sequence_inputs: ClassVar = ("ref_sequence_logps",)

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def walk_options(self) -> dict:
        """The fields that another walk beside the loss's own shares with it, its head left aside."""
        return {name: getattr(self, name) for name in ("ignore_index", "logits_budget", "logits_dtype", "compact", "tp_group")}

    @property
    def ref_head(self) -> Head:
        softcap = self.softcap if self.ref_softcap == "same" else self.ref_softcap
        return Head(softcap, self.logit_scale if self.ref_logit_scale == "same" else self.ref_logit_scale, self.temperature)

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, ref_logps: Tensor | None = None, ref_hidden: Tensor | None = None,
        ref_weight: Tensor | None = None, ref_bias: Tensor | None = None, **arguments,
    ) -> LossOutput:  # fmt: skip
        given = [name for name, x in (("ref_logps", ref_logps), ("ref_hidden", ref_hidden)) if x is not None]
        wanted = 1 if self.needs_reference else 0
        expect(
            len(given) == wanted, "ref_logps", "one of ref_logps and ref_hidden" if wanted else "no reference for this loss",
            " and ".join(given) or "neither", "pass one of them" if wanted else "leave it out",
        )  # fmt: skip
        inputs = {}
        if ref_hidden is not None:
            check_reference(ref_hidden, ref_weight, ref_bias, weight, targets)
            if self.reduction == "none":
                with torch.no_grad():
                    ref_logps = linear_logprobs(
                        ref_hidden, ref_weight, targets, bias=ref_bias, **self.ref_head._asdict(), **self.walk_options
                    ).logps
            else:
                inputs = {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}
        if ref_logps is not None:
            per_token = ref_logps.shape == targets.shape
            if self.cp_group is not None and targets.dim() == 1:
                # A rank's packed slice may have as many tokens as the call has sequences.
                others = resolved(self, weight).slices.sum(torch.tensor(not per_token, dtype=torch.int64, device=targets.device))
                per_token = not others.item()
            inputs["ref_logps" if per_token else "ref_sequence_logps"] = ref_logps
        return super().__call__(hidden, weight, targets, **inputs, **arguments)

    def sequence_ref_logps(self, batch: Batch, weights: Tensor | None = None) -> Tensor:
        """(sequences,) log-probabilities under the reference; `weights` of the tokens are already in those given per sequence."""
        if batch.ref_sequence_logps is not None:
            return batch.ref_sequence_logps
        return batch.sum_by_sequence(batch.ref_logps if weights is None else batch.ref_logps * weights)


def check_reference(ref_hidden: Tensor, ref_weight: Tensor | None, ref_bias: Tensor | None, weight: Tensor, targets: Tensor) -> None:
    expect(ref_weight is not None, "ref_weight", "the reference's head (V, H)", None, "pass it with ref_hidden")
    fits = ref_weight.dim() == 2 and ref_weight.shape[0] == weight.shape[0] and ref_weight.shape[1] == ref_hidden.shape[-1]
    expect(
        fits, "ref_weight", f"shape ({weight.shape[0]}, {ref_hidden.shape[-1]})", tuple(ref_weight.shape),
        "the reference scores the same token ids, from its own hidden states",
    )  # fmt: skip
    expect(
        ref_hidden.shape[:-1] == targets.shape,
        "ref_hidden",
        f"shape {tuple(targets.shape)} + (H,)",
        tuple(ref_hidden.shape),
        "one per target",
    )
    if ref_bias is not None:
        expect(ref_bias.shape == weight.shape[:1], "ref_bias", f"shape ({weight.shape[0]},)", tuple(ref_bias.shape), "one per token id")


def _whole(x: Tensor) -> Tensor:
    """What FSDP has sharded, gathered."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def mean_logits_over_positions(
    loss: TokenLoss, hidden: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mean logit over every position of the chosen and of the rejected sequences, from the mean row of the head."""
    with torch.no_grad():
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        flat, row = hidden.reshape(-1, hidden.shape[-1]), _whole(weight.mean(0, dtype=dtype))
        half = flat.shape[0] // 2 if cu_seqlens is None else cu_seqlens[cu_seqlens.shape[0] // 2]
        is_chosen = torch.arange(flat.shape[0], device=flat.device) < half
        logits = (flat @ row.to(flat.dtype)).to(dtype) + (0.0 if bias is None else _whole(bias.to(dtype).mean()))
        logits = logits * (loss.logit_scale / loss.temperature)
        sides = (is_chosen, ~is_chosen)
        sums = torch.stack([x.sum() for side in sides for x in (torch.where(side, logits, 0.0), side.to(logits.dtype))])
        if loss.cp_group is not None:
            sums = loss.slices.sum(sums)
    return sums[0] / sums[1], sums[2] / sums[3]


@dataclass(frozen=True, kw_only=True)
class UnreferencedLoss(PairedLoss):
    """Pairs without a reference model.

    Args:
        logits_over: what the metrics logits/chosen and logits/rejected average over: "completion" tokens, or every "position", as TRL's
            CPO and ORPO do (then through the mean row of the head, which a softcap does not allow).
    """

    logits_over: str = "completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("logits_over", self.logits_over, ("completion", "position"))
        linear = self.logits_over == "completion" or self.softcap is None
        expect(linear, "logits_over", "'completion' with a softcap", repr(self.logits_over), "the mean row of the head knows no softcap")
        whole = self.logits_over == "completion" or self.tp_group is None
        expect(whole, "logits_over", "'completion' with tp_group", repr(self.logits_over), "no rank has the whole head to average")

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, cu_seqlens: Tensor | None = None, **arguments
    ) -> LossOutput:
        out = super().__call__(hidden, weight, targets, bias=bias, cu_seqlens=cu_seqlens, **arguments)
        if self.logits_over == "position":
            chosen, rejected = mean_logits_over_positions(resolved(self, weight), hidden, weight, bias, cu_seqlens)
            out.metrics.update({"logits/chosen": chosen, "logits/rejected": rejected})
        return out
