"""A weighted sum of cross-entropies of several heads over the same tokens.

Every head is one `HeadCall` of the engine, with separate targets. Heads with the same hidden states (Medusa)
add to one d_hidden. In multi-token prediction, each depth has separate hidden states and a separate d_hidden.
A d_weight that only one head uses is cast from fp32 when that head is done. The chunk loop runs the layers in
front of a head forward and backward for each chunk. Therefore memory grows with the number of heads only by
the gradients of their parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from logitless.engine.base import Mode, run_calls
from logitless.engine.call import Layers, make_head_call
from logitless.engine.graph_names import constant_in_graphs, register_module
from logitless.engine.operands import (
    SplitHead,
    apply_mask,
    check_packed,
    checked_boundaries,
    sequence_numbers,
)
from logitless.errors import type_error, value_error
from logitless.losses.agreement import check_agreement
from logitless.losses.arguments import warn_of_zeros
from logitless.losses.base import LossOutput
from logitless.losses.cross_entropy import CrossEntropyLoss
from logitless.parallel.agreement import debugging
from logitless.parallel.groups import PLAIN, local_parameter


@dataclass
class WeightedHead:
    """One head of a loss: its coefficient, operands and offset."""

    name: str
    coefficient: float
    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    offset: int  # position i predicts token i + offset
    layers: Layers | None = None  # in front of the weight
    constant_head: bool = False  # whether weight and bias get no gradient from this part


def ahead(labels: Tensor, offset: int, ignore_index: int, cu_seqlens: Tensor | None) -> Tensor:
    """Shift the labels (B, T) or packed (N,) left by `offset` within each sequence, as targets of a head."""
    T = labels.shape[-1]
    positions = torch.arange(T, device=labels.device) + offset
    inside = positions < T
    if cu_seqlens is not None:
        inside = positions < cu_seqlens[1:][sequence_numbers(cu_seqlens, positions - offset)]
    return torch.where(inside, labels[..., positions.clamp(max=max(T - 1, 0))], ignore_index)


class BlockHeads(nn.Module):
    """Base class of modules with several heads, each with layers in front of its projection."""

    def blocks(self, k: int) -> nn.Module:
        """The layers in front of head k."""
        raise NotImplementedError

    def block_tensors(self, k: int) -> dict[str, Tensor]:
        """Parameters and buffers of `blocks(k)` by name."""
        raise NotImplementedError

    @constant_in_graphs
    def name_in_graphs(self) -> str:
        """The name of this module in a compiled graph."""
        return register_module(self)


@dataclass(frozen=True, kw_only=True)
class MultiHeadLoss(CrossEntropyLoss):
    """Base class of losses with several heads: a weighted sum of cross-entropies, computed head by head."""

    def __post_init__(self) -> None:
        coefficients = getattr(self, "coefficients", None)
        if isinstance(coefficients, list):
            object.__setattr__(self, "coefficients", tuple(coefficients))
        super().__post_init__()
        if self.reduction == "none":
            raise value_error(
                "reduction", "'mean' or 'sum' for several heads", repr(self.reduction), "sum over the heads"
            )
        if self.return_logps:
            raise value_error(
                "return_logps", "False for several heads", True, "each head has different log-probabilities"
            )
        if self.return_predictions:
            raise value_error(
                "return_predictions", "False for several heads", True, "each head has different predictions"
            )

    def solve_parts(
        self,
        parts: Sequence[WeightedHead],
        targets: Tensor,
        cu_seqlens: Tensor | None,
        num_items: float | Tensor | None,
        mask: Tensor | None,
    ) -> LossOutput:
        """Compute the weighted sum of the parts, with the loss and the accuracy of each part as metrics."""
        if mask is not None:
            targets = apply_mask(targets, mask, self.ignore_index)
        if targets.dim() == 0:
            raise value_error(
                "targets", "shape (B, T)", tuple(targets.shape), "pass the labels of whole sequences"
            )
        if cu_seqlens is not None:
            check_packed("targets", targets, 1)
            cu_seqlens = checked_boundaries(cu_seqlens, targets)
        loss = self.resolved(parts[0].weight)
        if loss.tp_group is not None and debugging():
            first = parts[0]
            tensors = {"hidden": first.hidden, "weight": first.weight, "targets": targets, "bias": first.bias}
            check_agreement(loss, tensors, [part.name for part in parts])
        flat: list[tuple[Tensor, Tensor]] = []
        local: list[tuple[Tensor | None, Tensor | None]] = []
        heads = []
        for part in parts:
            if isinstance(part.weight, SplitHead):
                raise type_error(
                    "weight",
                    "a tensor (V, H)",
                    type(part.weight).__name__,
                    "train the full head, or call linear_logprobs for each head",
                )
            labels = ahead(targets.long(), part.offset, self.ignore_index, cu_seqlens)
            # A head that several parts share is gathered once, and gets a single gradient.
            weight, bias = part.weight, part.bias
            if loss.tp_group is not None or type(weight) not in PLAIN:
                for name, x in (("weight", weight), ("bias", bias)):
                    if not any(x is original for original, _ in local):
                        local.append((x, local_parameter(name, x, loss.tp_group)))
                weight, bias = (
                    next(local_x for original, local_x in local if original is x) for x in (weight, bias)
                )
            # With a DTensor and a plain tensor, one may be a whole head and the other a shard.
            rows = heads[0].weight.shape[0] if heads else weight.shape[0]
            if weight.shape[0] != rows:
                raise value_error(
                    part.name,
                    f"{rows} rows on this rank, like {parts[0].name}",
                    weight.shape[0],
                    "shard all heads in the same way",
                )
            if part.constant_head:
                weight = weight.detach()
                bias = None if bias is None else bias.detach()
            head_call = make_head_call(
                loss, part.hidden, weight, labels, bias, {}, num_items=num_items, cu_seqlens=cu_seqlens
            )
            # Parts with the same hidden states share one flattened tensor, so that it gets a single gradient.
            flattened = [rows for hidden, rows in flat if hidden is part.hidden]
            hidden = flattened[0] if flattened else head_call.hidden
            flat.append((part.hidden, hidden))
            heads.append(replace(head_call, hidden=hidden, coefficient=part.coefficient, layers=part.layers))
        value, metrics, _, plan = run_calls(heads, Mode.SOLVED)
        warn_of_zeros(mask, loss, plan)
        named = {}
        accuracy = 1 + self.metric_names.index("token_accuracy")
        for part, row in zip(parts, metrics.unbind(), strict=True):
            named |= {f"{part.name}/loss": row[0], f"{part.name}/accuracy": row[accuracy]}
        return LossOutput(value, named, plan)
