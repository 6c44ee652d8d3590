"""Kahneman-Tversky optimization (KTO): single sequences that are labelled desirable or undesirable."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.operands import check_packed, checked_boundaries, holds_flags, shifted
from logitless.engine.spec import Fault
from logitless.engine.terms import Term
from logitless.errors import check_choice, check_number, type_error, value_error
from logitless.losses.arguments import CallArguments
from logitless.losses.base import LossOutput
from logitless.losses.heads import resolve_heads
from logitless.losses.inputs import HeadWeight, ReferenceInputs
from logitless.losses.numerics import sigmoid
from logitless.losses.preference import PairedLoss, ReferencedLoss, mean_over
from logitless.losses.reference_model import check_reference

KTOType = Literal["kto", "apo_zero_unpaired"]
# Loss type -> margin, a function of the reward beta * log-ratio and of beta * KL. The loss of a desirable
# sequence is sigma(-margin), and the loss of an undesirable sequence is sigma(margin).
KTO_MARGINS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kto": lambda reward, kl: reward - kl,
    "apo_zero_unpaired": lambda reward, kl: reward,
}

# Descriptions of the accepted `labels` and `kl`, for error messages.
FLAGS = "booleans, or integers that are 0 or 1"
REFERENCE_POINT = "a number, a 0-d tensor or a mapping"


@dataclass(frozen=True, kw_only=True)
class KTOLoss(ReferencedLoss):
    """Kahneman-Tversky optimization (KTO), for single sequences that are labelled desirable or undesirable.

        desirable    w_d * (1 - sigma(beta * (log-ratio - KL)))
        undesirable  w_u * (1 - sigma(beta * (KL - log-ratio)))

    The log-ratio of a sequence is log p(policy) - log p(reference), summed over its tokens.

    Args:
        beta: strength of the regularization towards the reference model.
        loss_type: "kto", or "apo_zero_unpaired" (the same loss without the KL).
        desirable_weight: w_d.
        undesirable_weight: w_u.

    Inputs:
        hidden: (B, T, H), or (N, H) with `cu_seqlens` (B + 1,).
        weight: (V, H), or the LM head itself.
        targets: (B, T) int64, or (N,) with `cu_seqlens`.
        labels: (B,) bool, or integers that are 0 or 1; True for desirable sequences.
        ref_logps, ref_hidden, ref_weight, ref_bias: the reference, as in `DPOLoss`.
        kl: the reference point of "kto": the mean log-ratio of unrelated completions. It is detached and
            clamped to at least 0. Either a number or 0-d tensor, which the caller averages over the ranks; or
            a mapping of tensors, from which the loss computes it in two additional passes without gradient.
            The mapping has kl_hidden (B', T', H), kl_targets (B', T'), and either ref_logps, (B',) or (B',
            T'), or ref_hidden (B', T', H'), which is projected with the call's `ref_weight` and `ref_bias`.
            If the completions are packed, the shapes are (N', H), (N',) and (N', H'), with kl_cu_seqlens (B'
            + 1,). `shift=True` also shifts kl_targets and per-token ref_logps. `mask` does not apply to
            kl_targets: set ignored tokens in kl_targets to `ignore_index`.
        num_items: the number of sequences by which the mean divides.
        **arguments: the other arguments of every loss, see `LinearLoss.__call__`.

    Metrics: rewards/chosen, rewards/rejected (means over the desirable and the undesirable sequences),
    rewards/margins (0 unless the call has both kinds), `logps/*`, `logits/*`, entropy, kl.

    Reference: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306.

    Examples:
        >>> hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(32, 8), torch.randint(32, (2, 5))
        >>> reference = {"ref_hidden": hidden, "ref_weight": weight}  # the policy itself: log-ratios of 0
        >>> out = KTOLoss()(hidden, weight, targets, labels=torch.tensor([True, False]), kl=0.0, **reference)
        >>> round(out.loss.item(), 4)
        0.5
    """

    beta: float = 0.1
    loss_type: KTOType = "kto"
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
        check_choice("loss_type", self.loss_type, KTO_MARGINS)
        if self.beta <= 0:
            raise value_error("beta", "a positive number", self.beta, "TRL's default is 0.1")

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        logps = batch.sum_by_sequence(stats.logps)
        labels = batch.labels.bool()
        reward = self.beta * (logps - self.sequence_ref_logps(batch))
        margin = KTO_MARGINS[self.loss_type](reward, self.beta * batch.kl)
        losses = sigmoid(torch.where(labels, -margin, margin))
        losses = torch.where(labels, self.desirable_weight * losses, self.undesirable_weight * losses)
        metrics = {"kl": Term(batch.kl.expand_as(logps), over="sequences"), "entropy": Term(stats.entropy)}
        mean_logits = stats.sum_logits / batch.V
        tokens = batch.spread(labels)
        for side, these, those in (("chosen", labels, tokens), ("rejected", ~labels, ~tokens)):
            metrics[f"rewards/{side}"] = mean_over(reward, these, of="sequences")
            metrics[f"logps/{side}"] = mean_over(logps, these, of="sequences")
            metrics[f"logits/{side}"] = mean_over(mean_logits, those)
        return {"kto": Term(losses, over="sequences")}, metrics

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        labels: Tensor,
        kl: Tensor | float | Mapping[str, Tensor] | None = None,
        **arguments: Unpack[ReferenceInputs],
    ) -> LossOutput:
        return super().__call__(hidden, weight, targets, labels=labels, kl=kl, **arguments)

    def prepare(self, call: CallArguments) -> None:
        labels = call.inputs["labels"]
        if labels.dim() != 1:
            expected = "shape (B,), one bool per sequence"
            remedy = "True for a desirable sequence"
            raise value_error("labels", expected, tuple(labels.shape), remedy)
        if not holds_flags(labels):
            remedy = "pass labels > 0, True for a desirable sequence"
            raise type_error("labels", FLAGS, labels.dtype, remedy)
        call.inputs["kl"] = self._reference_point(call).clamp(min=0)
        super().prepare(call)

    def _reference_point(self, call: CallArguments) -> Tensor:
        """`kl` as a detached 0-d tensor; 0 for a loss type that does not use it."""
        kl = call.inputs["kl"]
        needs_kl = self.loss_type == "kto"
        if (kl is not None) != needs_kl:
            expected = REFERENCE_POINT if needs_kl else f"None for {self.loss_type}"
            raise value_error("kl", expected, kl, "only loss_type='kto' has a reference point")
        if isinstance(kl, Mapping):
            kl = self._mean_log_ratio(kl, call)
        options = {"dtype": torch.promote_types(call.hidden.dtype, torch.float32)}
        options["device"] = call.hidden.device
        if not isinstance(kl, Tensor):
            if kl is not None:
                check_number("kl", kl, "a finite number, a 0-d tensor or a mapping")
            return torch.full((), kl or 0.0, **options)
        if kl.numel() != 1:
            got = f"shape {tuple(kl.shape)}"
            raise value_error("kl", REFERENCE_POINT, got, "average it over the completions first")
        return kl.detach().to(**options).reshape(())

    def finish(self, out: LossOutput, call: CallArguments) -> LossOutput:
        margin = out.metrics["rewards/chosen"] - out.metrics["rewards/rejected"]
        flags = call.inputs["labels"].bool()
        out.metrics["rewards/margins"] = torch.where(flags.any() & ~flags.all(), margin, 0.0)
        return out

    def faults(self, targets: Tensor, inputs: Mapping[str, Tensor | None], V: int) -> list[Fault]:
        """The check that integer labels are 0 or 1."""
        labels = inputs["labels"]
        if labels.dtype == torch.bool:
            return []
        count = (labels != labels.bool()).sum()
        return [
            Fault(count, "labels", FLAGS, "{count} others", "pass labels > 0, True for a desirable sequence")
        ]

    def _mean_log_ratio(self, kl: Mapping[str, Tensor], call: CallArguments) -> Tensor:
        """The mean over the completions in `kl` of their log-ratios, each summed over its tokens."""
        hidden, ref_hidden = kl.get("kl_hidden"), kl.get("ref_hidden")
        if call.heads:  # a LoRA adapter on the head adds columns to the hidden states
            _, resolved = resolve_heads(self, {"hidden": hidden, "ref_hidden": ref_hidden, **call.heads})
            hidden = resolved["hidden"]
            if "ref_hidden" in kl:
                ref_hidden = resolved["ref_hidden"]
        ref_weight, ref_bias = call.inputs.get("ref_weight"), call.inputs.get("ref_bias")
        if "ref_hidden" in kl and call.inputs.get("ref_hidden") is None:
            # The head of the reference is used only for the reference point.
            call.inputs |= {"ref_weight": None, "ref_bias": None}
        sequences, starts = self._check_kl(kl)
        targets = kl["kl_targets"].long()
        reference = kl.get("ref_logps")
        per_token = True
        if reference is not None:
            per_token, reference = self.read_ref_logps(reference, targets, sequences, " in kl")
        if call.shift:
            targets = shifted(targets, self.ignore_index, cu_seqlens=starts)
            if reference is not None and per_token:
                reference = shifted(reference, 0.0, cu_seqlens=starts)
        policy = self.detached_logps(hidden, call.weight, call.bias, targets, self.logit_transform, starts)
        if reference is None:
            check_reference(self, ref_hidden, ref_weight, ref_bias, call.weight, targets)
            reference = self.detached_logps(ref_hidden, ref_weight, ref_bias, targets, self.ref_transform)
        elif per_token:
            reference = torch.where(targets == self.ignore_index, 0.0, reference)
        sums = policy.sum(), reference.detach().sum()
        if self.cp_group is not None:
            sums = self.sequences.sum(sums[0]), self.sequences.sum(sums[1]) if per_token else sums[1]
        return (sums[0] - sums[1]) / max(sequences, 1)

    def _check_kl(self, kl: Mapping[str, Tensor]) -> tuple[int, Tensor | None]:
        """Check `kl`, and return (number of completions, boundaries of packed completions or None)."""
        needed = {"kl_hidden", "kl_targets"}
        allowed = needed | {"kl_cu_seqlens", "ref_logps", "ref_hidden"}
        one_reference = ("ref_logps" in kl) != ("ref_hidden" in kl)
        if not (needed <= set(kl) <= allowed and one_reference):
            raise value_error(
                "kl",
                "kl_hidden, kl_targets and one of ref_logps and ref_hidden",
                sorted(kl),
                "pass these, and kl_cu_seqlens if they are packed",
            )
        self.check_tensors(**kl)
        targets = kl["kl_targets"]
        starts = kl.get("kl_cu_seqlens")
        if starts is None:
            if targets.dim() != 2:
                raise value_error(
                    "kl_targets",
                    "shape (B', T')",
                    tuple(targets.shape),
                    "pass their boundaries as kl_cu_seqlens in kl",
                )
            return targets.shape[0], None
        check_packed("kl_targets", targets, 1, "kl_cu_seqlens")
        starts = checked_boundaries(starts, targets, "kl_cu_seqlens")
        return starts.shape[0] - 1, starts
