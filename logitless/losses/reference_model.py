"""Base class of losses with a reference model: its head and log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from logitless.engine.operands import shifted
from logitless.engine.sampling_mask import AlignedMask
from logitless.errors import value_error
from logitless.kernels.head.transform import LogitTransform
from logitless.losses.arguments import CallArguments
from logitless.losses.base import TokenLoss
from logitless.losses.declarations import cached_loss
from logitless.losses.logprobs import TokenStatistics
from logitless.parallel.groups import check_alike

# Arguments of a reference that is passed as hidden states and head.
MODEL = ("ref_hidden", "ref_weight", "ref_bias")


@dataclass(frozen=True, kw_only=True)
class DetachedStatistics(TokenStatistics):
    """Statistics of an additional pass without gradients. In KTO, its boundaries are `kl_cu_seqlens`."""

    boundaries_argument: ClassVar = "kl_cu_seqlens"


@dataclass(frozen=True, kw_only=True)
class ComparedLoss(TokenLoss):
    """Base class of losses with a reference model, passed as log-probabilities or as hidden states and head.

    Args:
        ref_softcap: `softcap` of the reference's head. "same": that of the trained head.
        ref_logit_scale: `logit_scale` of the reference's head. "same": that of the trained head.
    """

    ref_softcap: float | Literal["same"] | None = "same"
    ref_logit_scale: float | Literal["same"] = "same"

    reference: ClassVar = True

    @property
    def needs_reference(self) -> bool:
        """Whether the options of the loss require a reference model."""
        return True

    @property
    def ref_transform(self) -> LogitTransform:
        softcap = self.softcap if self.ref_softcap == "same" else self.ref_softcap
        scale = self.logit_scale if self.ref_logit_scale == "same" else self.ref_logit_scale
        return LogitTransform(softcap, scale, self.temperature)

    def prepare(self, call: CallArguments) -> None:
        """Check the reference.

        With reduction="none", compute the reference's log-probabilities, because an unreduced loss only gets
        statistics of the trained head.
        """
        self._check_one_reference(call.inputs)
        hidden, weight, bias = (call.inputs.get(name) for name in MODEL)
        if hidden is not None:
            check_reference(self, hidden, weight, bias, call.weight, call.targets)
        super().prepare(call)
        if hidden is not None and self.reduction == "none":
            targets = call.targets.long()
            if call.shift:
                targets = shifted(targets, self.ignore_index, cu_seqlens=call.cu_seqlens)
            logps = self.detached_logps(
                hidden, weight, bias, targets, self.ref_transform, aligned_mask=call.aligned_mask
            )
            # Align them with the unshifted labels, because the call shifts both.
            call.inputs["ref_logps"] = logps.roll(1, -1) if call.shift else logps
            for name in MODEL:
                call.inputs.pop(name, None)

    def _check_one_reference(self, inputs: Mapping[str, Tensor | None]) -> None:
        """Raise ValueError unless there is one reference, or none if the loss does not need one."""
        names = [name for name in ("ref_logps", *MODEL) if inputs.get(name) is not None]
        got = " and ".join(names) or "neither"
        name = type(self).__name__
        if not self.needs_reference:
            if names:
                raise value_error(
                    "ref_logps",
                    f"no reference for this {name}",
                    got,
                    "leave it out, or set the option that needs it",
                )
        elif names != ["ref_logps"] and names[:1] != ["ref_hidden"]:
            raise value_error(
                "ref_logps", "one of ref_logps and ref_hidden (with ref_weight)", got, "pass one of them"
            )

    def detached_logps(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        kl_cu_seqlens: Tensor | None = None,
        aligned_mask: AlignedMask | None = None,
    ) -> Tensor:
        """Compute the log-probabilities of the targets, in targets' shape, in a pass without gradients.

        `targets` and the sets of `aligned_mask` are already shifted. `kl_cu_seqlens` is only checked.
        """
        names = ("ignore_index", "logits_budget", "logits_dtype", "compact", "tp_group")
        options = transform._asdict() | {name: getattr(self, name) for name in names}
        loss = cached_loss(DetachedStatistics, **options)
        with torch.no_grad():
            statistics, _ = loss.statistics(
                hidden, weight, targets, bias=bias, cu_seqlens=kl_cu_seqlens, sampling_mask=aligned_mask
            )
        return statistics["logps"]


def check_reference(
    loss: ComparedLoss,
    ref_hidden: Tensor,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    weight: Tensor,
    targets: Tensor,
) -> None:
    """Check the shapes of a reference's hidden states and head against the trained head and the targets."""
    if ref_weight is None:
        raise value_error("ref_weight", "the reference's head (V, H)", None, "pass it with ref_hidden")
    V = weight.shape[0]
    H = ref_hidden.shape[-1]
    if ref_weight.shape != (V, H):
        raise value_error(
            "ref_weight",
            f"shape ({V}, {H})",
            tuple(ref_weight.shape),
            "the reference has the same vocabulary, and the hidden size of ref_hidden",
        )
    if loss.tp_group is not None:
        check_alike("ref_weight", ref_weight, weight)
    if ref_hidden.shape[:-1] != targets.shape:
        raise value_error(
            "ref_hidden",
            f"shape {tuple(targets.shape)} + (H,)",
            tuple(ref_hidden.shape),
            "pass one row per target",
        )
    if ref_bias is not None:
        got = tuple(ref_bias.shape)
        if got != (V,):
            raise value_error("ref_bias", f"shape ({V},)", got, "pass one entry per token id")
