"""`CallArguments`: the arguments of one call of a loss, before they become the engine's `HeadCall`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from logitless.engine.call import HeadCall, prepare
from logitless.engine.layout import SequenceLayout
from logitless.engine.operands import SplitHead
from logitless.engine.sampling_mask import AlignedMask
from logitless.engine.spec import LossSpec


@dataclass
class CallArguments:
    """The arguments of a call, which `LinearLoss.prepare` reads and changes.

    Attributes:
        loss: the loss that computes the call, with the softcap and logit_scale of a head module, and with
            `tp_group` and `cp_group` resolved to process groups.
        hidden: (..., H).
        weight: (V, H); the weight of the module if the caller passed a head module.
        targets: (...), with `ignore_index` where `mask` is 0; None if the call has no targets.
        inputs: additional tensors of the loss by name. After `prepare`, the inputs that the class declares.
        heads: weights and biases as the caller passed them, by name; empty if no head is a module.
        cu_seqlens: (sequences + 1,) int64 boundaries on hidden's device.
        kept: the sampling mask, aligned with hidden; None if the call has no sampling mask.

    The other attributes are the keyword arguments of every loss (`LinearLoss.__call__`).
    """

    loss: LossSpec
    hidden: Tensor
    weight: Tensor | SplitHead
    targets: Any
    inputs: dict[str, Any]
    heads: Mapping[str, Any] = field(default_factory=dict)
    kept: AlignedMask | None = None
    bias: Tensor | None = None
    num_items: float | Tensor | None = None
    shift: bool = False
    cu_seqlens: Tensor | None = None
    mask: Tensor | None = None
    accumulate_into: Tensor | None = None
    accumulate_now: bool = False
    grad_scale: float = 1.0

    def layout(self) -> SequenceLayout:
        """The sequences of the call. With `shift`, the layout shifts targets and inputs per token."""
        return SequenceLayout(
            self.hidden,
            self.targets,
            self.loss.ignore_index,
            self.cu_seqlens,
            shift=self.shift,
            slices=self.loss.sequences,
            kept=self.kept,
        )

    def head_call(self) -> HeadCall:
        """Check each input by its role, and return the call as a `HeadCall` with one row per token."""
        return prepare(
            self.loss,
            self.hidden,
            self.weight,
            self.targets,
            self.bias,
            self.inputs,
            num_items=self.num_items,
            shift=self.shift,
            cu_seqlens=self.cu_seqlens,
            kept=self.kept,
        )


# Keyword arguments of every loss: the fields of `CallArguments` with a default, except `heads`
# and `kept`.
SHARED = (
    "bias",
    "num_items",
    "shift",
    "cu_seqlens",
    "mask",
    "accumulate_into",
    "accumulate_now",
    "grad_scale",
)
