"""User code, as type checkers must take it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import logitless
from logitless import (
    Batch,
    CrossEntropyLoss,
    DPOLoss,
    GRPOLoss,
    JSDLoss,
    KTOLoss,
    LogitsLoss,
    LossOutput,
    MedusaHeads,
    MedusaLoss,
    ORPOLoss,
    REINFORCELoss,
    SamplerCorrection,
    SpeculatorLoss,
    Term,
    TokenLoss,
    TokenStats,
    linear_cross_entropy,
    linear_logprobs,
    linear_topk,
)


@dataclass(frozen=True, kw_only=True)
class ConfidentLoss(TokenLoss):
    beta: float = 0.01
    token_inputs: ClassVar = ("weights",)
    differentiates: ClassVar = ("logps", "entropy")
    metric_names: ClassVar = ("entropy",)

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        weights: Tensor = batch.weights
        return {"loss": Term(-weights * stats.logps - self.beta * stats.entropy)}, {
            "entropy": Term(stats.entropy)
        }


@dataclass(frozen=True, kw_only=True)
class BrierLoss(LogitsLoss):
    def terms(self, logits: Tensor, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        return {"brier": Term(logits.softmax(-1).square().sum(-1), over="tokens")}, {}


def train(hidden: Tensor, head: nn.Linear, targets: Tensor, other: Tensor) -> Tensor:
    weight = head.weight
    out: LossOutput = CrossEntropyLoss(label_smoothing=0.1, reduction="mean", return_logps=True)(
        hidden, head, targets, bias=None, shift=True, mask=targets > 0, class_weights=other
    )
    logps: Tensor = out.logps
    accuracy: Tensor = out.metrics["token_accuracy"]
    if out.plan is not None:
        print(out.plan.describe(), accuracy.item(), out.plan.chunks)
    total = out.loss + logps.sum()
    total = (
        total
        + DPOLoss(loss_type=("sigmoid", "sft"), average_logps=True)(
            hidden, weight, targets, ref_logps=other
        ).loss
    )
    total = total + DPOLoss()(hidden, weight, targets, ref_hidden=hidden, ref_weight=head, num_items=2).loss
    total = (
        total + KTOLoss(loss_type="kto")(hidden, weight, targets, labels=other, kl=0.1, ref_logps=other).loss
    )
    total = total + ORPOLoss()(hidden, weight, targets, nll_targets=targets).loss
    total = (
        total
        + GRPOLoss(loss_type="dapo", beta=0.1)(
            hidden, weight, targets, advantages=other, ref_hidden=hidden, ref_weight=weight, old_logps=other
        ).loss
    )
    icepop = SamplerCorrection(action="mask", low=0.5, high=5.0)
    corrected = GRPOLoss(
        trust_region="binary_tv",
        loss_agg_mode="token-mean",
        kl_estimator="k3+",
        kl_max=10.0,
        beta=0.001,
        sampler_correction=(icepop, SamplerCorrection(level="geometric", action="reject", low=0.9)),
    )
    factors = icepop.weights(other, other)
    out = corrected(
        hidden, weight, targets, advantages=other, old_logps=other, sampling_logps=factors, ref_logps=other
    )
    total = total + out.loss
    total = (
        total
        + REINFORCELoss(old_kl_coef=0.1)(hidden, weight, targets, advantages=other, old_logps=other).loss
    )
    total = (
        total
        + JSDLoss(divergence="jsd", support=None)(
            hidden, weight, teacher_hidden=hidden, teacher_weight=weight
        ).loss
    )
    total = total + MedusaLoss()(hidden, MedusaHeads(8, 32, 2), targets, base_weight=weight).loss
    draft = SpeculatorLoss(divergence="lk_hybrid", teacher_softmax="draft", coefficients=(1.0, 0.5))
    steps = draft(
        [hidden, hidden],
        head,
        targets,
        teacher_hidden=hidden,
        teacher_weight=head,
        draft_ids=other,
        num_items=2,
    )
    total = total + steps.loss + steps.metrics["accepted_length"]
    total = (
        total
        + ConfidentLoss()(hidden, weight, targets, weights=other).loss
        + BrierLoss()(hidden, head, targets).loss
    )
    total = total + linear_cross_entropy(hidden, head, targets, softcap=30.0, reduction="sum")
    numbers = linear_logprobs(hidden, weight, targets, entropy="metric", logits_dtype=torch.float32)
    best = linear_topk(hidden, weight, 2, softcap=None)
    logps, entropy, _ = linear_logprobs(hidden, weight, targets, entropy=True)
    total = total + logps.sum() + entropy.mean() + numbers.entropy.mean()
    report = logitless.check(CrossEntropyLoss(), hidden, weight, targets)
    plan = logitless.estimate(DPOLoss(), tokens=64, hidden_size=8, vocab_size=32, sequences=2)
    print(bool(report), plan.products, best.ids)
    return total + numbers.logps.sum()
