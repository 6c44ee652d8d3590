"""Cross-entropy and its relatives: label smoothing, z-loss, class and token weights, dynamic fine-tuning."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from logitless.kernels.cross_entropy import TokenStats
from logitless.losses.base import LossOutput, TokenLoss
from logitless.losses.batch import Batch, Term
from logitless.losses.checks import check_vocabulary_input, expect


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss(TokenLoss):
    """Cross-entropy of `hidden @ weight.T` with `targets`, without the logits.

        loss_t = u_t [ (1 - ε) c_y (lse_t - z_y) + ε/V Σ_v c_v (lse_t - z_v) + λ lse_t² ]

    with c the class weights (1 without), u the token weights, ε `label_smoothing`, λ `z_loss`; with `dft` the first term is
    multiplied by the detached p_y. The mean divides by `num_items`, else by the number of supervised tokens (with class weights: by
    the sum of their c_y, as torch does).

    Args:
        label_smoothing: ε in [0, 1] (Szegedy et al., 2016, https://arxiv.org/abs/1512.00567).
        z_loss: λ >= 0 (PaLM, Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311).
        dft: dynamic fine-tuning (Wu et al., 2025, https://arxiv.org/abs/2508.05629).

    The call takes hidden (..., H), weight (V, H), targets (...) int64, and by keyword bias (V,), class_weights (V,), token_weights
    (...), num_items, shift, and accumulate_into and grad_scale, as every loss; it returns `LossOutput`, with the metrics
    token_accuracy, entropy (nats), z_loss and num_tokens. Means of metrics are over the supervised tokens. It raises ValueError or
    TypeError on arguments that do not fit together.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dft: bool = False

    token_inputs: ClassVar = ("token_weights",)
    shared_inputs: ClassVar = ("class_weights",)
    metric_names: ClassVar = ("token_accuracy", "entropy", "z_loss", "num_tokens")
    observes: ClassVar = ("entropy", "is_top1")

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(0 <= self.label_smoothing <= 1, "label_smoothing", "a number in [0, 1]", self.label_smoothing, "use 0.0 for none")
        expect(self.z_loss >= 0, "z_loss", "a number >= 0", self.z_loss, "use 0.0 for none")

    @property
    def differentiates(self) -> tuple[str, ...]:
        if self.label_smoothing:
            return ("logps", "lse", "sum_logits")
        return ("logps", "lse") if self.z_loss else ("logps",)

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        nll = -stats.logps * stats.logps.detach().exp() if self.dft else -stats.logps
        if batch.class_weights is not None:
            nll = nll * batch.class_weights.to(nll.dtype)[batch.targets.clamp(min=0)]
        if self.label_smoothing:
            total = batch.V if batch.class_weights is None else batch.class_weights.to(nll.dtype).sum()
            smooth = (total * stats.lse - stats.sum_logits) / batch.V
            nll = (1 - self.label_smoothing) * nll + self.label_smoothing * smooth
        z_loss = self.z_loss * stats.lse.square() if self.z_loss else torch.zeros_like(stats.lse)
        loss = nll + z_loss if self.z_loss else nll
        if batch.token_weights is not None:
            loss = loss * batch.token_weights
        metrics = {
            "token_accuracy": Term(stats.is_top1),
            "entropy": Term(stats.entropy),
            "z_loss": Term(z_loss),
            "num_tokens": Term(torch.ones_like(stats.lse), over=None),
        }
        return {"cross_entropy": Term(loss)}, metrics

    def normalizers(self, counts, targets, inputs):
        weights = inputs["class_weights"]
        if weights is None:
            return dict(counts)
        supervised = targets != self.ignore_index
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return dict(counts) | {"tokens": torch.where(supervised, wide[targets.clamp(0, weights.shape[0] - 1)], 0.0).sum()}

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, class_weights: Tensor | None = None,
        token_weights: Tensor | None = None, num_items: float | Tensor | None = None, shift: bool = False,
        accumulate_into: Tensor | None = None, grad_scale: float = 1.0,
    ) -> LossOutput:  # fmt: skip
        if self.tp_group is None:
            check_vocabulary_input("class_weights", class_weights, weight.shape[0])
        if token_weights is not None:
            expect(
                token_weights.shape == targets.shape, "token_weights", f"targets' shape {tuple(targets.shape)}",
                tuple(token_weights.shape), "give one weight per token",
            )  # fmt: skip
        return super().__call__(
            hidden, weight, targets, bias=bias, num_items=num_items, shift=shift,
            class_weights=class_weights, token_weights=token_weights, accumulate_into=accumulate_into, grad_scale=grad_scale,
        )  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, dft: bool = False, class_weights: Tensor | None = None,
    token_weights: Tensor | None = None, shift: bool = False, num_items: float | Tensor | None = None, **head,
) -> Tensor:  # fmt: skip
    """The loss of `CrossEntropyLoss` alone, as a function: `F.cross_entropy(hidden @ weight.T + bias, targets)` without logits.

    Args:
        hidden, weight, targets, bias, class_weights, token_weights, shift, num_items: as in the call of `CrossEntropyLoss`.
        ignore_index, reduction, label_smoothing, z_loss, dft, **head: as in its constructor.

    Returns:
        0-d fp32 tensor; with `reduction="none"` the shape of targets, 0 where ignored.
    """
    loss = CrossEntropyLoss(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, dft=dft, **head)
    return loss(
        hidden, weight, targets, bias=bias, class_weights=class_weights, token_weights=token_weights, shift=shift, num_items=num_items
    ).loss
