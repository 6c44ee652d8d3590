"""Base classes of the preference losses: pairs of sequences, a reference model, and TRL's metrics.

Sequences are padded (B, T), or packed with `cu_seqlens`. The targets of prompts and padding are
`ignore_index`. If the sequences form pairs, the B chosen sequences come first, then the B rejected ones. The
log-probability of a sequence is the sum over its supervised tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.layout import is_per_sequence, per_token_shape
from logitless.engine.terms import Term
from logitless.errors import check_choice, value_error
from logitless.losses.arguments import CallArguments
from logitless.losses.base import LossOutput, TokenLoss
from logitless.losses.inputs import CallInputs, HeadWeight
from logitless.losses.reference_model import ComparedLoss

PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
TOKEN_METRICS = ("logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy", "nll_loss")


def of_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sequences,) -> those of the chosen and of the rejected sequences, (pairs,) each."""
    chosen, rejected = x.reshape(2, -1).unbind()
    return chosen, rejected


def smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """-log sigma(x), with a fraction `label_smoothing` of the labels assumed to be flipped."""
    if not label_smoothing:
        return -logsigmoid(x)
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def mean_over(values: Tensor, mask: Tensor, of: str = "tokens") -> Term:
    """The mean of the values at which `mask` is True.

    All other values are ignored, even if they are infinite.
    """
    return Term(torch.where(mask, values, 0.0), over=mask.to(values.dtype), of=of)


def chosen_nll(stats: TokenStats, batch: Batch) -> Tensor:
    """(n,) negative log-probabilities of the tokens of chosen sequences; 0 for all other tokens."""
    return torch.where(batch.is_chosen, -stats.logps, 0.0)


def pair_metrics(logps: tuple[Tensor, Tensor], rewards: tuple[Tensor, Tensor]) -> dict[str, Term]:
    """TRL's metrics of pairs, given (chosen, rejected) log-probabilities and rewards of shape (pairs,)."""
    chosen, rejected, better, worse = (x.detach() for x in (*logps, *rewards))
    values = (better, worse, (better > worse).to(better.dtype), better - worse, chosen, rejected)
    return {name: Term(x, over="pairs") for name, x in zip(PAIR_METRICS, values, strict=True)}


def preference_metrics(
    stats: TokenStats,  # (n,) each
    batch: Batch,
    chosen: Tensor,  # (n,) bool: of a chosen sequence
    completion: Tensor | None = None,  # (n,) bool: of a completion; None if all tokens are
) -> dict[str, Term]:
    """TRL's metrics that are means over tokens.

    `logits/*` are means over tokens and vocabulary. As in TRL, they are -inf if a part of the bias is -inf.
    """
    better = chosen
    worse = ~chosen
    entropy = Term(stats.entropy)
    if completion is not None:
        better, worse = completion & better, completion & worse
        entropy = mean_over(stats.entropy, completion)
    mean_logits = stats.sum_logits / batch.V
    of_chosen = mean_over(mean_logits, better)
    return {
        "logits/chosen": of_chosen,
        "logits/rejected": mean_over(mean_logits, worse),
        "entropy": entropy,
        "mean_token_accuracy": Term(torch.where(better, stats.is_top1, 0.0), of_chosen.over),
        "nll_loss": Term(chosen_nll(stats, batch).detach(), over="chosen_tokens"),
    }


# Arguments of other libraries' losses that take chosen and rejected sequences separately.
PARTS = ("hidden", "targets", "chosen", "rejected")
CONCATENATE = "concatenate the sequences, chosen first: torch.cat((chosen, rejected))"


@dataclass(frozen=True, kw_only=True)
class PairedLoss(TokenLoss):
    """Base class of losses of pairs."""

    scope: ClassVar = "group"
    unit: ClassVar = "pairs"
    sequences_per_group: ClassVar = 2
    context_parallel: ClassVar = True
    observes: ClassVar = ("entropy", "is_top1", "sum_logits")
    metric_names: ClassVar = PAIR_METRICS + TOKEN_METRICS
    remedies: ClassVar = dict.fromkeys(PARTS, CONCATENATE)


@dataclass(frozen=True, kw_only=True)
class ReferencedLoss(ComparedLoss):
    """Base class of losses of sequences with a reference model.

    The reference is passed as log-probabilities per token or per sequence, or as hidden states and head.
    """

    token_inputs: ClassVar = ("ref_logps",)
    sequence_inputs: ClassVar = ("ref_sequence_logps",)

    def prepare(self, call: CallArguments) -> None:
        ref_input = call.inputs.get("ref_logps")
        super().prepare(call)
        if ref_input is None:
            return
        sequences = (call.targets if call.cu_seqlens is None else call.cu_seqlens[1:]).shape[0]
        # Flat tokens without sequences are refused in a later check.
        has_sequences = call.cu_seqlens is not None or call.targets.dim() > 1
        per_token, ref_logps = self.read_ref_logps(
            ref_input.detach(), call.targets, sequences if has_sequences else 1
        )
        del call.inputs["ref_logps"]
        call.inputs["ref_logps" if per_token else "ref_sequence_logps"] = ref_logps

    def read_ref_logps(
        self, ref_logps: Tensor, targets: Tensor, sequences: int, where: str = ""
    ) -> tuple[bool, Tensor]:
        """Check the shape of `ref_logps`.

        Args:
            ref_logps: one log-probability per sequence, (sequences,) or (sequences, 1), or per token, in
                targets' shape or (1, N) in a packed call.
            targets: (B, T), or packed (N,).
            sequences: number of sequences.
            where: text after the expected shape in the error message.

        Returns:
            (per_token, ref_logps): whether they are per token; in targets' shape if they are, else
            (sequences,).

        Raises:
            ValueError: `ref_logps` has another shape, or its shape is ambiguous (see `is_per_sequence`).
        """
        name = "ref_logps"
        if is_per_sequence(name, ref_logps, targets, sequences, sums=True, slices=self.sequences):
            return False, ref_logps.reshape(-1)
        token_logps = per_token_shape(ref_logps, targets)
        if token_logps.shape != targets.shape:
            expected = f"shape ({sequences},) or targets' {tuple(targets.shape)}{where}"
            remedy = "give each sequence or token its own"
            raise value_error(name, expected, tuple(ref_logps.shape), remedy)
        return True, token_logps

    def sequence_ref_logps(self, batch: Batch, weights: Tensor | None = None) -> Tensor:
        """(sequences,) log-probabilities under the reference model.

        `weights` (n,) are applied to log-probabilities per token, not to sums per sequence that the caller
        passed.
        """
        if batch.ref_sequence_logps is not None:
            return batch.ref_sequence_logps
        return batch.sum_by_sequence(batch.ref_logps if weights is None else batch.ref_logps * weights)


@dataclass(frozen=True, kw_only=True)
class UnreferencedLoss(PairedLoss):
    """Base class of losses of pairs without a reference model.

    Args:
        logits_over: the positions over which the metrics logits/chosen and logits/rejected average.
            "completion": the completion tokens. "position": all positions, as in TRL's CPO and ORPO; computed
            from the mean row of the head, which is not possible with a softcap.
    """

    logits_over: Literal["completion", "position"] = "completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("logits_over", self.logits_over, ("completion", "position"))
        by_row = self.logits_over == "position"
        got = repr(self.logits_over)
        if by_row and self.softcap is not None:
            raise value_error(
                "logits_over",
                "'completion' with a softcap",
                got,
                "a softcap does not commute with the mean over the vocabulary",
            )
        if by_row and self.tp_group is not None:
            raise value_error(
                "logits_over", "'completion' with tp_group", got, "the mean row needs all rows of the head"
            )

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        **arguments: Unpack[CallInputs],
    ) -> LossOutput:
        return super().__call__(hidden, weight, targets, **arguments)

    def finish(self, out: LossOutput, call: CallArguments) -> LossOutput:
        if self.logits_over == "position":
            chosen, rejected = mean_logits_over_positions(
                self, call.hidden, call.weight, call.bias, call.cu_seqlens
            )
            out.metrics.update({"logits/chosen": chosen, "logits/rejected": rejected})
        return out


def mean_logits_over_positions(
    loss: TokenLoss,
    hidden: Tensor,  # (2B, T, H), or (N, H) packed
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    cu_seqlens: Tensor | None,  # (2B + 1,)
) -> tuple[Tensor, Tensor]:
    """Return the mean logit over all positions of the chosen sequences, and of the rejected sequences.

    The mean of a position's logits over the vocabulary is computed from the mean row and the mean bias of the
    head.
    """
    with torch.no_grad():
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        flat = hidden.reshape(-1, hidden.shape[-1])
        row = _whole(weight.mean(0, dtype=dtype))
        half = flat.shape[0] // 2 if cu_seqlens is None else cu_seqlens[cu_seqlens.shape[0] // 2]
        is_chosen = torch.arange(flat.shape[0], device=flat.device) < half
        logits = (flat @ row.to(flat.dtype)).to(dtype) + (
            0.0 if bias is None else _whole(bias.to(dtype).mean())
        )
        logits = logits * (loss.logit_scale / loss.temperature)
        sides = (is_chosen, ~is_chosen)
        sums = [x.sum() for side in sides for x in (torch.where(side, logits, 0.0), side.to(logits.dtype))]
        sums = torch.stack(sums)
        if loss.cp_group is not None:
            sums = loss.sequences.sum(sums)
    return sums[0] / sums[1].clamp(min=1), sums[2] / sums[3].clamp(min=1)


def _whole(x: Tensor) -> Tensor:
    """Gather a DTensor; return any other tensor unchanged."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
