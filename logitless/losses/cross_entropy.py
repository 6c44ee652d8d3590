"""Cross-entropy, with label smoothing, z-loss, class weights, token weights and dynamic fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.terms import Term
from logitless.errors import value_error
from logitless.losses.arguments import CallArguments, accept_missing_targets, check_options
from logitless.losses.base import LossOutput, TokenLoss
from logitless.losses.declarations import OPTIONAL_FIELDS, cached_loss
from logitless.losses.inputs import CallInputs, HeadOptions, HeadWeight, Reduction


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss(TokenLoss):
    """Cross-entropy between the logits `hidden @ weight.T` and `targets`, computed without the full logits.

        loss_t = u_t [ (1 - ε) c_y (lse_t - z_y) + ε/V Σ_v c_v (lse_t - z_v) + λ lse_t² ]

    Here z are the logits of token t, y is its target, c are the class weights and u the token weights
    (default 1), ε is `label_smoothing` and λ is `z_loss`. With `dft`, the first term is multiplied by the
    detached probability of the target. `reduction="mean"` divides the sum by `num_items`. The default is the
    number of supervised tokens; with class weights, it is the sum of c_y over these tokens, as in
    `torch.nn.CrossEntropyLoss`.

    Args:
        label_smoothing: ε in [0, 1] (Szegedy et al., 2016, https://arxiv.org/abs/1512.00567).
        z_loss: λ >= 0 (PaLM, Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311).
        dft: dynamic fine-tuning (Wu et al., 2025, https://arxiv.org/abs/2508.05629).

    Inputs:
        hidden: (..., H).
        weight: (V, H), or the LM head itself.
        targets: (...) int64 token ids, or `ignore_index`.
        class_weights: (V,), c, without gradient.
        token_weights: (...), u, without gradient except with reduction="none".
        **arguments: the arguments of every loss, see `LinearLoss.__call__`: bias (V,), mask (...), num_items,
            shift, cu_seqlens, accumulate_into, grad_scale.

    Returns:
        A `LossOutput`. Its metrics are token_accuracy, entropy (in nats) and z_loss, which are means over the
        supervised tokens, and num_tokens, the number of supervised tokens.

    Raises:
        ValueError: shapes or options do not match, or a target is outside the vocabulary.
        TypeError: an argument is unknown or has the wrong type.

    Examples:
        >>> hidden, weight = torch.randn(6, 8), torch.randn(32, 8, requires_grad=True)
        >>> targets = torch.randint(32, (6,))
        >>> out = CrossEntropyLoss()(hidden, weight, targets)
        >>> torch.allclose(out.loss, torch.nn.functional.cross_entropy(hidden @ weight.T, targets), atol=1e-4)
        True
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dft: bool = False

    token_inputs: ClassVar = ("token_weights",)
    vocabulary_inputs: ClassVar = ("class_weights",)
    sum_logits_weights: ClassVar = "class_weights"
    metric_names: ClassVar = ("token_accuracy", "entropy", "z_loss", "num_tokens")
    observes: ClassVar = ("entropy", "is_top1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing <= 1:
            raise value_error(
                "label_smoothing", "a number in [0, 1]", self.label_smoothing, "use 0.0 for none"
            )
        if self.z_loss < 0:
            raise value_error("z_loss", "a number >= 0", self.z_loss, "use 0.0 for none")

    @property
    def differentiates(self) -> tuple[str, ...]:
        if self.label_smoothing:
            return ("logps", "lse", "sum_logits")
        return ("logps", "lse") if self.z_loss else ("logps",)

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        z_loss = self.z_loss * stats.lse.square() if self.z_loss else torch.zeros_like(stats.lse)
        metrics = {
            "token_accuracy": Term(stats.is_top1),
            "entropy": Term(stats.entropy),
            "z_loss": Term(z_loss),
            "num_tokens": Term(torch.ones_like(stats.lse), over=None),
        }
        return {"cross_entropy": Term(self.values(stats, batch))}, metrics

    def values(self, stats: TokenStats, batch: Batch) -> Tensor:
        """(n,) the loss of each token."""
        nll = -stats.logps * stats.logps.detach().exp() if self.dft else -stats.logps
        if batch.class_weights is not None:
            nll = nll * of_targets(batch.class_weights.to(nll.dtype), batch.targets)
        if self.label_smoothing:
            total = batch.V if batch.class_weights is None else batch.class_weights.to(nll.dtype).sum()
            smooth = (total * stats.lse - stats.sum_logits) / batch.V
            nll = (1 - self.label_smoothing) * nll + self.label_smoothing * smooth
        loss = nll + self.z_loss * stats.lse.square() if self.z_loss else nll
        return loss if batch.token_weights is None else loss * batch.token_weights.to(loss.dtype)

    def normalizers(
        self, counts: Mapping[str, Tensor], targets: Tensor, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        weights = inputs["class_weights"]
        if weights is None:
            return dict(counts)
        supervised = targets != self.ignore_index
        return dict(counts) | {"tokens": torch.where(supervised, of_targets(weights, targets), 0.0).sum()}

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        class_weights: Tensor | None = None,
        token_weights: Tensor | None = None,
        **arguments: Unpack[CallInputs],
    ) -> LossOutput:
        inputs = {"class_weights": class_weights, "token_weights": token_weights}
        return super().__call__(hidden, weight, targets, **inputs, **arguments)

    def prepare(self, call: CallArguments) -> None:
        class_weights, token_weights = call.inputs["class_weights"], call.inputs["token_weights"]
        if class_weights is not None:
            # In fp32 at least, so that their sum, the normalizer, is as accurate as the loss.
            wide = torch.promote_types(call.hidden.dtype, torch.float32)
            call.inputs["class_weights"] = class_weights.to(torch.promote_types(class_weights.dtype, wide))
        if token_weights is not None and token_weights.shape != call.targets.shape:
            expected = f"targets' shape {tuple(call.targets.shape)}"
            got = tuple(token_weights.shape)
            raise value_error("token_weights", expected, got, "pass one weight per token")


def of_targets(class_weights: Tensor, targets: Tensor) -> Tensor:
    """(n,) class weight of each target.

    The weight of an ignored target, which may be any integer, is arbitrary.
    """
    return class_weights[targets.clamp(0, class_weights.shape[0] - 1)]


# The fields that `linear_cross_entropy`, which returns the loss alone, takes.
OPTIONS = tuple(field.name for field in fields(CrossEntropyLoss) if field.name not in OPTIONAL_FIELDS)


@accept_missing_targets
def linear_cross_entropy(
    hidden: Tensor,
    weight: HeadWeight,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    shift: bool = False,
    mask: Tensor | None = None,
    num_items: float | Tensor | None = None,
    **head: Unpack[HeadOptions],
) -> Tensor:
    """Compute `F.cross_entropy(hidden @ weight.T + bias, targets)` without the full logits.

    The functional form of `CrossEntropyLoss`.

    Args:
        hidden: (..., H).
        weight: (V, H), or the LM head itself, as in every loss.
        targets: (...) int64 token ids, or `ignore_index`.
        bias: (V,).
        ignore_index: targets with this id are not supervised.
        reduction: "mean", "sum" or "none".
        label_smoothing: in [0, 1]: weight of the mean cross-entropy over all ids of the vocabulary. The
            cross-entropy of the target has the weight 1 - label_smoothing.
        z_loss: weight of lse^2, at least 0.
        dft: dynamic fine-tuning: multiply each token's cross-entropy by the detached probability of its
            target.
        class_weights: (V,) factors of the cross-entropy of each id, as in `F.cross_entropy`.
        token_weights: (...) factors of the loss of each token, like targets.
        shift: targets are unshifted labels of the same length: position i predicts targets[i + 1].
        mask: (...), same shape as targets, and shifted with them. Targets with mask 0 (False) are not
            supervised.
        num_items: divisor of the mean. Default: the number of supervised tokens or, with class_weights, the
            sum of the class weights of their targets.
        **head: softcap, logit_scale, temperature, logits_budget, accum_dtype, logits_dtype, compact,
            tp_group, as in every loss.

    Returns:
        0-d fp32 tensor (fp64 for fp64 operands). With `reduction="none"`, a tensor of targets' shape with 0
        for ignored targets.

    Raises:
        ValueError: shapes or options do not match, or a target is outside the vocabulary.
        TypeError: an option is unknown, or an argument has the wrong type.

    Examples:
        >>> hidden, weight, targets = torch.randn(6, 8), torch.randn(32, 8), torch.randint(32, (6,))
        >>> linear_cross_entropy(hidden, weight, targets, reduction="none").shape
        torch.Size([6])
    """
    check_options(head, OPTIONS, linear_cross_entropy)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "dft": dft}
    loss = cached_loss(CrossEntropyLoss, ignore_index=ignore_index, reduction=reduction, **options, **head)
    weights = {"class_weights": class_weights, "token_weights": token_weights}
    options = {"bias": bias, "shift": shift, "mask": mask, "num_items": num_items}
    return loss(hidden, weight, targets, **weights, **options).loss
