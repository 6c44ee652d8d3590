"""Multi-token prediction: several hidden states with one shared head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Never

from torch import Tensor

from logitless.engine.head_view import is_head
from logitless.errors import type_error, value_error
from logitless.losses.base import LossOutput
from logitless.losses.heads import without_adapter
from logitless.losses.inputs import HeadWeight
from logitless.losses.multi_head import MultiHeadLoss, WeightedHead


@dataclass(frozen=True, kw_only=True)
class MultiTokenLoss(MultiHeadLoss):
    """Multi-token prediction: several hidden states per position with one shared head.

        sum_k coefficient_k * CE(weight @ hidden_k, i + 1 + k)

    At position i, the hidden states of depth k = 0, 1, ... predict token i + 1 + k.

    Args:
        coefficients: one weight per depth; default 1 for depth 0 and 0.3 for the others (lambda of
            DeepSeek-V3).
        isolated: whether only the loss of depth 0 contributes to the gradient of the head. The losses of the
            other depths then treat the head as a constant, and need 2 products instead of 3. They still
            contribute to the gradients of their hidden states. To keep these gradients out of the backbone,
            detach the hidden states that the model passes to its MTP modules.

    Inputs:
        hiddens: a sequence of tensors (B, T, H), one per depth; or (N, H) with `cu_seqlens` (sequences + 1,).
        weight: (V, H), or the LM head itself.
        targets: (B, T) int64, or (N,) with `cu_seqlens`: unshifted labels, as with `shift=True` in other
            losses.
        bias: (V,).
        mask: same shape as targets. Labels with mask 0 (False) are not supervised.
        num_items: the divisor of the mean of every depth; default the number of targets of the depth.

    Metrics: depth_{k}/loss, depth_{k}/accuracy.

    References: Gloeckle et al., 2024, https://arxiv.org/abs/2404.19737; DeepSeek-AI, 2024,
    https://arxiv.org/abs/2412.19437, section 2.2.

    Examples:
        >>> hidden, weight = [torch.randn(2, 5, 8) for _ in range(2)], torch.randn(32, 8)
        >>> out = MultiTokenLoss()(hidden, weight, torch.randint(32, (2, 5)))
        >>> depths = [out.metrics[f"depth_{k}/loss"] for k in (0, 1)]
        >>> torch.allclose(out.loss, depths[0] + 0.3 * depths[1], atol=1e-4)
        True
    """

    coefficients: Sequence[float] | None = None
    isolated: bool = False

    remedies: ClassVar = {"shift": "targets are unshifted labels already"}

    def __call__(
        self,
        hiddens: Sequence[Tensor],
        weight: HeadWeight,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items: float | Tensor | None = None,
        mask: Tensor | None = None,
        **unknown: Never,
    ) -> LossOutput:
        loss = self
        if is_head(weight):
            loss, weight, bias = without_adapter(self, "weight", weight, bias)
        if unknown:
            raise self.unknown_keywords(unknown)
        self.check_tensors(targets=targets, bias=bias, mask=mask, cu_seqlens=cu_seqlens)
        if not isinstance(hiddens, (tuple, list)) or not all(isinstance(x, Tensor) for x in hiddens):
            raise type_error(
                "hiddens",
                "a list or tuple of tensors",
                type(hiddens).__name__,
                "pass [hidden] for a single depth",
            )
        depths = len(hiddens)
        if depths == 0:
            raise value_error(
                "hiddens",
                "at least one tensor of hidden states",
                depths,
                "pass the hidden states of depth 0",
            )
        coefficients = (1.0,) + (0.3,) * (depths - 1) if self.coefficients is None else self.coefficients
        if len(coefficients) != depths:
            raise value_error(
                "coefficients",
                f"{depths} numbers, one per hidden state",
                len(coefficients),
                "pass one per hidden state, or set it to None",
            )
        parts = [
            WeightedHead(
                f"depth_{k}",
                coefficient,
                hidden,
                weight,
                bias,
                k + 1,
                constant_head=self.isolated and k > 0,
            )
            for k, (hidden, coefficient) in enumerate(zip(hiddens, coefficients, strict=True))
            if coefficient
        ]
        if not parts:
            raise value_error("coefficients", "one that is not 0", coefficients, "a loss needs a head")
        return loss.solve_parts(parts, targets, cu_seqlens, num_items, mask)
