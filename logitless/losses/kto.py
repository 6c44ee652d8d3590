"""Kahneman-Tversky optimization: single sequences that are desirable or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.terms import Term
from logitless.errors import check_choice, expect
from logitless.losses.base import LossOutput
from logitless.losses.preference import PairedLoss, ReferencedLoss, check_reference

# Losses of (desirable, undesirable) sequences, of the reward beta * log-ratio and beta * KL.
KTO_LOSSES: Mapping[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "kto": lambda reward, kl: ((kl - reward).sigmoid(), (reward - kl).sigmoid()),
    "apo_zero_unpaired": lambda reward, kl: ((-reward).sigmoid(), reward.sigmoid()),
}


@dataclass(frozen=True, kw_only=True)
class KTOLoss(ReferencedLoss):
    """Kahneman-Tversky optimization: single sequences that are desirable or not.

        w_d * (1 - sigma(beta * (log-ratio - KL)))   or   w_u * (1 - sigma(beta * (KL - log-ratio)))

    Args:
        beta: strength of the pull towards the reference.
        loss_type: "kto", or "apo_zero_unpaired" (without the KL).
        desirable_weight, undesirable_weight: w_d, w_u.

    The call takes hidden (B, T, H) and targets (B, T), or packed ones with `cu_seqlens`; `labels` (B,) bool
    (True: desirable); a reference, as `DPOLoss` does; and for "kto" the reference point `kl`, 0-d and
    detached: the mean log-ratio of unrelated completions, averaged over the ranks by the caller, clamped at
    0. Or `kl` is a mapping from which it is computed by two more passes, without gradient: kl_hidden (B', T',
    H), kl_targets (B', T') and either ref_logps, (B',) or (B', T'), or ref_hidden (B', T', H'), whose head is
    the call's `ref_weight` and `ref_bias`. `num_items` is the number of sequences.

    Metrics: rewards/chosen, rewards/rejected (means over the desirable and the undesirable sequences),
    rewards/margins (0 unless the call has both kinds), logps/*, logits/*, entropy, kl.

    Reference: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306.
    """

    beta: float = 0.1
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    scope: ClassVar = "group"
    unit: ClassVar = "sequences"
    context_parallel: ClassVar = True
    sequence_inputs: ClassVar = (*ReferencedLoss.sequence_inputs, "labels")
    shared_inputs: ClassVar = ("kl",)
    observes: ClassVar = PairedLoss.observes
    metric_names: ClassVar = (
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
        "logits/chosen",
        "logits/rejected",
        "entropy",
        "kl",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss_type", self.loss_type, KTO_LOSSES)
        expect(self.beta > 0, "beta", "a positive number", self.beta, "TRL's default is 0.1")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps, labels = batch.sum_by_sequence(stats.logps), batch.labels
        reward = self.beta * (logps - self.sequence_ref_logps(batch))
        desirable, undesirable = KTO_LOSSES[self.loss_type](reward, self.beta * batch.kl)
        losses = torch.where(labels, self.desirable_weight * desirable, self.undesirable_weight * undesirable)
        metrics = {"kl": Term(batch.kl.expand(len(logps)), over="sequences"), "entropy": Term(stats.entropy)}
        mean_logits, tokens = stats.sum_logits / batch.V, batch.spread(labels)
        for side, these, those in (("chosen", labels, tokens), ("rejected", ~labels, ~tokens)):
            metrics[f"rewards/{side}"] = Term(reward * these, over=these.to(logps.dtype))
            metrics[f"logps/{side}"] = Term(logps * these, over=these.to(logps.dtype))
            metrics[f"logits/{side}"] = Term(mean_logits * those, over=those.to(logps.dtype))
        return {"kto": Term(losses, over="sequences")}, metrics

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        labels: Tensor,
        kl: Tensor | float | Mapping | None = None,
        bias: Tensor | None = None,
        **arguments,
    ) -> LossOutput:
        expected, got = "shape (B,), one bool per sequence", tuple(labels.shape)
        expect(labels.dim() == 1, "labels", expected, got, "True for a desirable sequence")
        needs_kl = self.loss_type == "kto"
        expected = "a number, a 0-d tensor or a mapping" if needs_kl else f"None for {self.loss_type}"
        expect((kl is not None) == needs_kl, "kl", expected, kl, "it is the reference point of 'kto' alone")
        if isinstance(kl, Mapping):
            ref_head = arguments.get("ref_weight"), arguments.get("ref_bias")
            kl = self.resolved(weight)._kl(kl, (weight, bias), ref_head)
        options = {"dtype": torch.promote_types(hidden.dtype, torch.float32), "device": hidden.device}
        if isinstance(kl, Tensor):
            kl = kl.detach().to(**options).reshape(())
        else:
            kl = torch.full((), kl or 0.0, **options)
        out = super().__call__(hidden, weight, targets, bias=bias, labels=labels.bool(), kl=kl, **arguments)
        margin = out.metrics["rewards/chosen"] - out.metrics["rewards/rejected"]
        out.metrics["rewards/margins"] = torch.where(labels.any() & ~labels.all(), margin, 0.0)
        return out

    def _kl(
        self,
        kl: Mapping[str, Tensor],
        head: tuple[Tensor, Tensor | None],
        ref_head: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """The mean log-ratio of unrelated completions, at least 0."""
        known = {"kl_hidden", "kl_targets", "ref_logps", "ref_hidden"}
        complete = {"kl_hidden", "kl_targets"} <= set(kl) <= known and ("ref_logps" in kl) != (
            "ref_hidden" in kl
        )
        expected = "kl_hidden, kl_targets and one of ref_logps and ref_hidden"
        expect(complete, "kl", expected, sorted(kl), "pass exactly these")
        targets, reference = kl["kl_targets"], kl.get("ref_logps")
        policy = self.detached_logps(kl["kl_hidden"], *head, targets, self.head)
        per_token = reference is None or reference.shape == targets.shape
        if reference is None:
            check_reference(kl["ref_hidden"], *ref_head, head[0], targets)
            reference = self.detached_logps(kl["ref_hidden"], *ref_head, targets, self.ref_head)
        elif per_token:
            reference = torch.where(targets == self.ignore_index, 0.0, reference)
        sums = policy.sum(), reference.detach().sum()
        if self.cp_group is not None:
            sums = self.sequences.sum(sums[0]), self.sequences.sum(sums[1]) if per_token else sums[1]
        return ((sums[0] - sums[1]) / targets.shape[0]).clamp(min=0)
