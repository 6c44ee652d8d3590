"""Direct preference optimization (DPO) and its variants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from logitless.engine.batch import Batch, TokenStats
from logitless.engine.terms import Term
from logitless.errors import check_choice, value_error
from logitless.losses.arguments import CallArguments
from logitless.losses.base import LossOutput
from logitless.losses.dpo_types import (
    AVERAGED,
    DIFFERENCES,
    DIVERGENCES,
    DPO_LOSSES,
    DPO_TYPES,
    OTHER_NAMES,
    SORTED,
    DPOType,
    FDivergence,
    Pairs,
)
from logitless.losses.inputs import HeadWeight, ReferenceInputs
from logitless.losses.numerics import LARGEST
from logitless.losses.preference import (
    PairedLoss,
    ReferencedLoss,
    chosen_nll,
    of_pairs,
    pair_metrics,
    preference_metrics,
)


@dataclass(frozen=True, kw_only=True)
class DPOLoss(ReferencedLoss, PairedLoss):
    """Direct preference optimization (DPO) and its variants, for pairs of sequences and a reference model.

    For a chosen sequence c and a rejected sequence r, the default loss type "sigmoid" is

        -log sigma(beta * ((log p_c - log p_c^ref) - (log p_r - log p_r^ref)))

    Args:
        beta: strength of the regularization towards the reference model.
        loss_type: one of TRL's names, or a sequence of names whose losses are summed: sigmoid, hinge (SLiC),
            ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down,
            discopop, sigmoid_norm, and sft (the mean negative log-likelihood of the chosen tokens).
        loss_weights: one weight per name in `loss_type`; default 1 each.
        average_logps: divide the log-probability of each sequence, under policy and reference, by its length.
            None is TRL's choice: True for ipo and sigmoid_norm, False for the other types. sft is always a
            mean over tokens. Regardless of this option, `ref_logps` per sequence are sums, and the metrics
            are computed from sums.
        label_smoothing: assumed fraction of flipped labels. Used by sigmoid (cDPO), exo_pair, robust, aot and
            aot_unpaired.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence" (f-DPO).
        f_alpha_divergence_coef: alpha of "alpha_divergence".
        ld_alpha: weight of the tokens beyond the length of a pair's shorter sequence (LD-DPO). None: 1.
        use_weighting: weight each pair by its probability under the policy (WPO).
        discopop_tau: temperature of the gate in discopop.
        reference_free: use 0 as the reference's log-probabilities.

    Inputs:
        hidden: (2B, T, H), the B chosen sequences first, then the B rejected ones in the same order; or (N,
            H) with `cu_seqlens` (2B + 1,).
        weight: (V, H), or the LM head itself.
        targets: (2B, T) int64, or (N,) with `cu_seqlens`.
        ref_logps: log-probabilities under the reference model: (2B,) sums per sequence, to which the weights
            of `ld_alpha` are already applied; or per token, in targets' shape. They get no gradient.
        ref_hidden: (2B, T, H'), hidden states of the reference model, as an alternative to `ref_logps`. They
            get no gradient.
        ref_weight: (V, H'), the weight of the reference's head.
        ref_bias: (V,), the bias of the reference's head.
        num_items: the number of pairs by which the mean divides; for `loss_type="sft"`, the number of chosen
            tokens.
        position_ids: integers in targets' shape: the position of each token in its whole sequence. Required
            with both `ld_alpha` and `cp_group`, otherwise refused.
        **arguments: the other arguments of every loss, see `LinearLoss.__call__`.

    Metrics have TRL's names: `rewards/*`, `logps/*` (sums per sequence), `logits/*` (means over the
    completion tokens and the vocabulary), entropy, mean_token_accuracy and nll_loss (of the chosen tokens).

    References: Rafailov et al., 2023, https://arxiv.org/abs/2305.18290. TRL's documentation of
    `DPOConfig.loss_type` has the references of the other types.

    Examples:
        >>> hidden, weight = torch.randn(4, 5, 8), torch.randn(32, 8)  # 2 chosen sequences, then 2 rejected
        >>> targets = torch.randint(32, (4, 5))
        >>> reference = {"ref_hidden": hidden, "ref_weight": weight}  # the policy itself: the loss is log 2
        >>> round(DPOLoss(beta=0.1)(hidden, weight, targets, **reference).loss.item(), 4)
        0.6931
    """

    beta: float = 0.1
    loss_type: DPOType | Sequence[DPOType] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    average_logps: bool | None = None
    label_smoothing: float = 0.0
    f_divergence_type: FDivergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False
    discopop_tau: float = 0.05
    reference_free: bool = False

    prediction_inputs: ClassVar = ("position_ids",)

    def __post_init__(self) -> None:
        names = (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)
        if not names:
            raise value_error("loss_type", "at least one name", names, f"choose from {', '.join(DPO_TYPES)}")
        for name in names:
            check_choice("loss_type", name, DPO_TYPES, OTHER_NAMES)
        weights = (1.0,) * len(names) if self.loss_weights is None else self.loss_weights
        object.__setattr__(self, "loss_type", names)
        object.__setattr__(self, "loss_weights", tuple(weights) if isinstance(weights, list) else weights)
        super().__post_init__()
        if len(weights) != len(names):
            raise value_error(
                "loss_weights",
                f"{len(names)} numbers, one per loss_type",
                len(weights),
                "pass one weight per loss_type",
            )
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        smoothing = self.label_smoothing
        alpha = self.ld_alpha
        if self.beta <= 0:
            raise value_error("beta", "a positive number", self.beta, "TRL's default is 0.1")
        if not 0 <= smoothing <= 1:
            raise value_error("label_smoothing", "a number in [0, 1]", smoothing, "use 0.0 for none")
        if self.discopop_tau <= 0:
            raise value_error("discopop_tau", "a positive number", self.discopop_tau, "the paper's is 0.05")
        if alpha is not None and not 0 <= alpha <= 1:
            raise value_error("ld_alpha", "a number in [0, 1] or None", alpha, "use None for 1")
        if "exo_pair" in self.loss_type:
            if not 0 < smoothing < 1:
                raise value_error(
                    "label_smoothing", "a number in (0, 1) for exo_pair", smoothing, "the paper's is 1e-3"
                )
        if "robust" in self.loss_type:
            if smoothing >= 0.5:
                raise value_error(
                    "label_smoothing", "less than 0.5 for robust", smoothing, "the paper's is 0.1"
                )

    def _check_combinations(self) -> None:
        divergence = self.f_divergence_type
        check_choice("f_divergence_type", divergence, DIVERGENCES)
        unfit = [name for name in self.loss_type if name not in DIFFERENCES and divergence != "reverse_kl"]
        if unfit:
            raise value_error(
                "f_divergence_type",
                f"'reverse_kl' for {unfit}",
                repr(divergence),
                "other divergences require a loss that depends only on the difference of two scores",
            )
        unfit = sorted(SORTED & set(self.loss_type)) if self.use_weighting else []
        if unfit:
            raise value_error(
                "use_weighting",
                f"False for {unfit}",
                True,
                "a loss that sorts the batch does not compare the sequences of a pair",
            )

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        position_ids: Tensor | None = None,
        **arguments: Unpack[ReferenceInputs],
    ) -> LossOutput:
        return super().__call__(hidden, weight, targets, position_ids=position_ids, **arguments)

    def prepare(self, call: CallArguments) -> None:
        has_positions = call.inputs["position_ids"] is not None
        needed = self.cp_group is not None and self.ld_alpha is not None
        if needed and not has_positions:
            expected = "each token's position in its whole sequence, for ld_alpha with cp_group"
            raise value_error("position_ids", expected, None, "pass position_ids, sliced like hidden")
        if has_positions and not needed:
            remedy = "positions are computed from the targets"
            expected = "None unless cp_group and ld_alpha are both set"
            raise value_error("position_ids", expected, "a tensor", remedy)
        super().prepare(call)

    @property
    def scope(self) -> str:
        return "batch" if SORTED & set(self.loss_type) else "group"

    @property
    def unit(self) -> str:
        return "chosen_tokens" if set(self.loss_type) == {"sft"} else "pairs"

    @property
    def observes(self) -> tuple[str, ...]:
        return (*super().observes, "log_sum_sq_probs") if self.use_weighting else super().observes

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def terms(self, stats: TokenStats, batch: Batch) -> tuple[dict[str, Term], dict[str, Term]]:
        pairs = self.pairs(stats, batch)
        weighted = list(zip(self.loss_type, self.loss_weights, strict=True))
        pairs_by_average = {False: pairs, True: pairs.averaged()}
        averages = {name: name in AVERAGED for name in self.loss_type}
        averages = averages if self.average_logps is None else dict.fromkeys(averages, self.average_logps)
        values = [
            weight * DPO_LOSSES[name](self, pairs_by_average[averages[name]])
            for name, weight in weighted
            if name != "sft"
        ]
        factor = self.pair_weights(stats, batch)
        terms = {"dpo": Term(sum(values) * factor, over="pairs")} if values else {}
        if "sft" in self.loss_type:
            weight = sum(weight for name, weight in weighted if name == "sft")
            factor = batch.spread(torch.cat((factor, factor))) if self.use_weighting else 1.0
            terms["sft"] = Term(weight * factor * chosen_nll(stats, batch), over="chosen_tokens")
        rewards = self.beta * pairs.chosen, self.beta * pairs.rejected
        metrics = pair_metrics((pairs.chosen_logps, pairs.rejected_logps), rewards)
        return terms, metrics | preference_metrics(stats, batch, batch.is_chosen)

    def pairs(self, stats: TokenStats, batch: Batch) -> Pairs:
        """The log-probabilities of the sequences of each pair, under policy and reference."""
        weights = None
        if self.ld_alpha is not None:
            shared = torch.minimum(*of_pairs(batch.lengths))
            beyond = batch.positions >= batch.spread(torch.cat((shared, shared)))
            weights = 1 - (1 - self.ld_alpha) * beyond.to(stats.logps.dtype)
        policy = batch.sum_by_sequence(stats.logps if weights is None else stats.logps * weights)
        reference = (
            self.sequence_ref_logps(batch, weights) if self.needs_reference else torch.zeros_like(policy)
        )
        scores = DIVERGENCES[self.f_divergence_type](self, policy - reference)
        lengths = batch.lengths.clamp(min=1).to(policy.dtype)
        return Pairs(*of_pairs(policy), *of_pairs(reference), *of_pairs(scores), *of_pairs(lengths))

    def pair_weights(self, stats: TokenStats, batch: Batch) -> Tensor | float:
        """(pairs,) WPO's weights.

        The product over both sequences of exp(mean over the tokens of log p - log sum p^2).
        """
        if not self.use_weighting:
            return 1.0
        aligned = batch.sum_by_sequence(stats.logps.detach() - stats.log_sum_sq_probs)
        chosen, rejected = of_pairs(aligned / batch.lengths.clamp(min=1))
        # Not bounded below: a small weight may multiply a large loss, such as that of forward_kl.
        return (chosen + rejected).clamp(max=LARGEST).exp()
