"""TRL's SFT with `CrossEntropyLoss`: one walk over the logits (3 GEMMs, 2 with a frozen head) where TRL takes
two (4 and 3).

TRL's `compute_loss` sums and divides per-token numbers. The fused strategy needs no per-token
log-probabilities, it needs the sum. So our head hands over each field already summed, `compute_loss` runs as
TRL wrote it, and what it does about gradient accumulation, parallelism, the router loss and the logs stays
TRL's. Label smoothing, for which TRL builds the full logits, is part of the same walk.
"""

from dataclasses import dataclass
from typing import Any

import trl
import trl.trainer.sft_trainer
from torch import Tensor
from transformers import PreTrainedModel

from logitless import CrossEntropyLoss

from .head import Score, head_options
from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin, swapped


@dataclass
class SFTConfig(ChunkedLossConfigMixin, trl.SFTConfig):
    """`trl.SFTConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes, default the
    library's)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_chunked_loss and self.loss_type == "dft" and self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor: expected 0 with loss_type='dft', got "
                f"{self.label_smoothing_factor}; the DFT loss is "
                "not smoothed, so leave it out."
            )


class SFTTrainer(ChunkedLossTrainerMixin, trl.SFTTrainer):
    """`trl.SFTTrainer`; with `SFTConfig(use_chunked_loss=True)` its loss and gradients are the same, without
    the logits.

    Raises:
        ValueError: the flag is on together with `compute_loss_func`, which asks for logits, or with label
            smoothing of a model with a router loss, which TRL would drop; or PEFT adapts the LM head (raised
            by TRL).
    """

    stock_module = trl.trainer.sft_trainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.uses_chunked_loss:
            return
        if self.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func: expected None with use_chunked_loss=True, got a function of the full "
                "logits; leave it "
                "out, or set use_chunked_loss=False."
            )
        if self.args.label_smoothing_factor and self.aux_loss_enabled:
            raise ValueError(
                f"label_smoothing_factor: expected 0 for a model with a router loss, got "
                f"{self.args.label_smoothing_factor}; "
                "TRL leaves the router loss out of a smoothed loss, so say which you want: set "
                "router_aux_loss_coef=0.0, or "
                "no smoothing."
            )

    def chunked_score(self, model: PreTrainedModel, **stock_options: Any) -> Score:
        loss = CrossEntropyLoss(
            reduction="sum",
            dft=self.args.loss_type == "dft",
            label_smoothing=self.args.label_smoothing_factor,
            logits_budget=self.args.logits_budget,
            **head_options(model.config),
        )

        def score(
            hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool
        ) -> dict[str, Tensor]:
            output = loss(hidden, weight, labels, bias=bias, shift=shift)
            self.last_plan = output.plan
            count = output.metrics["num_tokens"]
            return {
                "log_probs": -output.loss,
                "entropy": output.metrics["entropy"] * count,
                "is_top1": output.metrics["token_accuracy"] * count,
                "label_mask": count,
            }

        return score

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.uses_chunked_loss:
            return super().compute_loss(model, inputs, *args, **kwargs)
        # DFT's weights and the smoothing are in the sum already; all that TRL has left to do is the plain
        # loss's part.
        with swapped(self.args, loss_type="nll"), swapped(self, label_smoother=None):
            return super().compute_loss(model, inputs, *args, **kwargs)
