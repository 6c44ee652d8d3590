"""Medusa: heads that predict tokens after the next token, and the loss that trains these heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Never

import torch
from torch import Tensor, nn

from logitless.engine.call import Layers
from logitless.engine.head_view import is_head
from logitless.errors import type_error, value_error
from logitless.losses.base import LossOutput
from logitless.losses.heads import without_adapter
from logitless.losses.inputs import HeadWeight
from logitless.losses.multi_head import BlockHeads, MultiHeadLoss, WeightedHead


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)), initialized to the identity."""

    def __init__(self, hidden_size: int, **options):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, **options)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(BlockHeads):
    """K heads that predict tokens after the next token. Each has `num_layers` residual blocks and a
    projection.

    The state dict has the keys of the reference implementation's model:
    `medusa_head.{k}.{layer}.linear.{weight,bias}` and `medusa_head.{k}.{num_layers}.weight`. Its file
    `medusa_lm_head.pt` has them without the prefix, as `heads.medusa_head.state_dict()` does.

    Args:
        hidden_size: H of the backbone.
        vocab_size: V.
        num_heads: K, at least 1.
        num_layers: residual blocks per head.
        shared: use the base model's head for all heads, instead of one projection per head.
        device: device of the parameters. Default: torch's default device.
        dtype: dtype of the parameters. Default: torch's default dtype.

    Reference: Cai et al., 2024, https://arxiv.org/abs/2401.10774, section 2.1.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        shared: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if num_heads < 1:
            raise value_error(
                "num_heads", "at least 1", num_heads, "a model without heads needs no MedusaHeads"
            )
        if num_layers < 0:
            raise value_error("num_layers", "0 or more", num_layers, "the paper uses 1")
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.num_layers = num_layers
        self.shared = shared
        options = {"device": device, "dtype": dtype}
        self.medusa_head = nn.ModuleList()
        for _ in range(num_heads):
            blocks = [ResidualBlock(hidden_size, **options) for _ in range(num_layers)]
            projection = [] if shared else [nn.Linear(hidden_size, vocab_size, bias=False, **options)]
            self.medusa_head.append(nn.Sequential(*blocks, *projection))

    def __len__(self) -> int:
        return len(self.medusa_head)

    @torch.no_grad()
    def start_from(self, weight: Tensor) -> "MedusaHeads":
        """Copy the base head (V, H) into every projection: training starts from the base head's logits."""
        shape = (self.vocab_size, self.hidden_size)
        if weight.shape != shape:
            raise value_error("weight", f"the base head {shape}", tuple(weight.shape), "pass lm_head.weight")
        for k in range(len(self) if not self.shared else 0):
            self.projection(k).copy_(weight)
        return self

    def blocks(self, k: int) -> nn.Sequential:
        return self.medusa_head[k][: self.num_layers]

    def block_tensors(self, k: int) -> dict[str, Tensor]:
        tensors = {}
        for layer in range(self.num_layers):
            block = self.medusa_head[k][layer]
            for name, x in (*block.named_parameters(), *block.named_buffers()):
                tensors[f"{layer}.{name}"] = x
        return tensors

    def projection(self, k: int) -> Tensor | None:
        """The projection (V, H) of head k; None with `shared`, where the base model's head is used."""
        return None if self.shared else self.medusa_head[k][self.num_layers].weight

    def forward(self, hidden: Tensor, base_weight: HeadWeight | None = None) -> Tensor:
        """Compute the logits of all heads, (K, ..., V). For decoding: it stores the full logits."""
        if self.shared:
            if base_weight is None:
                remedy = "pass the base model's head"
                raise value_error("base_weight", "a head, because the heads are shared", None, remedy)
            base_weight = getattr(base_weight, "weight", base_weight)  # of a module
        weights = [base_weight if self.shared else self.projection(k) for k in range(len(self))]
        return torch.stack(
            [nn.functional.linear(self.blocks(k)(hidden), weight) for k, weight in enumerate(weights)]
        )


@dataclass(frozen=True, kw_only=True)
class MedusaLoss(MultiHeadLoss):
    """Weighted sum of the cross-entropies of the base head and of K Medusa heads.

        base_coefficient * CE(base, i + 1) + sum_k coefficient_k * CE(head k, i + 2 + k)

    At position i, the base head predicts token i + 1, and head k (k = 0, ..., K - 1) predicts token i + 2 +
    k.

    Args:
        coefficients: one weight per head; default `decay ** k`.
        decay: factor between consecutive default coefficients; 0.8 in the paper.
        base_coefficient: weight of the base head's loss; 0 in stage 1 of the paper, in which the backbone and
            the base head are frozen.

    The fields of `CrossEntropyLoss` apply to every head, except `reduction="none"`, `return_logps` and
    `return_predictions`, which are refused.

    Inputs:
        hidden: (B, T, H), or (N, H) with `cu_seqlens` (sequences + 1,).
        heads: `MedusaHeads`. With `tp_group`, each rank passes its rows of the vocabulary in `base_weight`
            and in `MedusaHeads(H, rows, ...)`, and the residual blocks are replicated.
        targets: (B, T) int64, or (N,) with `cu_seqlens`: unshifted labels, as with `shift=True` in other
            losses.
        base_weight: (V, H), or the base model's LM head. Required, unless `base_coefficient` is 0 and the
            heads have projections.
        base_bias: (V,).
        mask: same shape as targets. Labels with mask 0 (False) are not supervised.
        num_items: the divisor of the mean of every head; default the number of targets of the head.

    Only tensors that require a gradient get one. Freeze the backbone and the base head for stage 1.

    Metrics: base/loss, base/accuracy, head_{k}/loss and head_{k}/accuracy (top-1). The losses are not
    multiplied by the coefficients.

    Reference: Cai et al., 2024, https://arxiv.org/abs/2401.10774, section 2.2.

    Examples:
        >>> hidden, weight, heads = torch.randn(2, 5, 8), torch.randn(32, 8), MedusaHeads(8, 32, num_heads=2)
        >>> out = MedusaLoss()(hidden, heads, torch.randint(32, (2, 5)), base_weight=weight)
        >>> [name for name in sorted(out.metrics) if name.endswith("loss")]
        ['base/loss', 'head_0/loss', 'head_1/loss']
    """

    coefficients: Sequence[float] | None = None
    decay: float = 0.8
    base_coefficient: float = 1.0

    remedies: ClassVar = {"shift": "targets are unshifted labels already"}

    def __call__(
        self,
        hidden: Tensor,
        heads: MedusaHeads,
        targets: Tensor,
        *,
        base_weight: HeadWeight | None = None,
        base_bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items: float | Tensor | None = None,
        mask: Tensor | None = None,
        **unknown: Never,
    ) -> LossOutput:
        loss = self
        if is_head(base_weight):
            loss, base_weight, base_bias = without_adapter(self, "base_weight", base_weight, base_bias)
        base = {"base_weight": base_weight, "base_bias": base_bias}
        if unknown:
            raise self.unknown_keywords(unknown)
        self.check_tensors(hidden=hidden, targets=targets, mask=mask, cu_seqlens=cu_seqlens, **base)
        if not isinstance(heads, MedusaHeads):
            raise type_error(
                "heads",
                "a MedusaHeads module",
                type(heads).__name__,
                "construct MedusaHeads(hidden_size, vocab_size, num_heads)",
            )
        K = len(heads)
        coefficients = (
            tuple(self.decay**k for k in range(K)) if self.coefficients is None else self.coefficients
        )
        if len(coefficients) != K:
            raise value_error(
                "coefficients",
                f"{K} numbers, one per head",
                len(coefficients),
                "set it to None for powers of decay",
            )
        needed = self.base_coefficient != 0 or heads.shared
        has_base = base_weight is not None
        if not has_base and needed:
            remedy = "pass it, because the heads share it" if heads.shared else "or set base_coefficient=0.0"
            raise value_error("base_weight", "the base head (V, H)", None, remedy)
        if has_base:
            if base_weight.shape[0] != heads.vocab_size:
                raise value_error(
                    "base_weight",
                    f"{heads.vocab_size} rows, like the heads",
                    tuple(base_weight.shape),
                    "the base head and the Medusa heads predict the same ids",
                )
        parts = []
        if self.base_coefficient:
            parts.append(WeightedHead("base", self.base_coefficient, hidden, base_weight, base_bias, 1))
        for k, coefficient in enumerate(coefficients):
            weight = base_weight if heads.shared else heads.projection(k)
            layers = Layers(heads, k, heads.block_tensors(k)) if heads.num_layers else None
            if coefficient:
                parts.append(WeightedHead(f"head_{k}", coefficient, hidden, weight, None, k + 2, layers))
        if not parts:
            raise value_error("coefficients", "one that is not 0", coefficients, "a loss needs a head")
        return loss.solve_parts(parts, targets, cu_seqlens, num_items, mask)
