"""TRL's ORPO and CPO (SimPO, AlphaPO): the trainers that build the full logits of both sequences of every
pair.

Their `concatenated_forward` turns logits into a mean or a sum of log-probabilities, an NLL, and logits that
are only ever averaged for the log. Ours answers the same call from per-token numbers; what TRL makes of it
stays TRL's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_peft_available
from trl.experimental.cpo import CPOConfig as StockCPOConfig
from trl.experimental.cpo import CPOTrainer as StockCPOTrainer
from trl.experimental.orpo import ORPOConfig as StockORPOConfig
from trl.experimental.orpo import ORPOTrainer as StockORPOTrainer

from .mixins import ChunkedLossConfigMixin, ChunkedLossTrainerMixin
from .per_token import PerTokenScore


class AllPositionsScore(PerTokenScore):
    """Adds the mean logit of every position, prompts and padding too, as these trainers log it. Without a
    softcap it is the hidden state's product with the mean row of the head; with one, every position is
    projected once more, without gradient."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool
    ) -> dict[str, Tensor]:
        fields = super().__call__(hidden, weight, bias, labels, shift)
        with torch.no_grad():
            if self.loss.softcap is None:
                mean = (hidden.to(weight.dtype) @ weight.mean(0)).float() + (
                    0.0 if bias is None else bias.float().mean()
                )
                mean = mean * self.loss.logit_scale / self.loss.temperature
            else:
                every = torch.zeros_like(labels)
                mean = (
                    self.every_position.numbers(hidden, weight, every, bias=bias)[0]["sum_logits"]
                    / weight.shape[0]
                )
        return fields | {"mean_logits": mean}


class FullLogitsTrainerMixin(ChunkedLossTrainerMixin):
    """For the trainers that call the model themselves: our head is put on it once they are constructed."""

    # What TRL's own method leaves out of the mean of logits at the end of each row
    logged_positions: slice

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.uses_chunked_loss:
            return
        if self.is_encoder_decoder:
            raise ValueError(
                "model: expected a decoder with use_chunked_loss=True, got an encoder-decoder; set "
                "use_chunked_loss=False."
            )
        model = self.accelerator.unwrap_model(self.model)
        if is_peft_available():
            from peft import PeftModel

            model = model.get_base_model() if isinstance(model, PeftModel) else model
        self._add_chunked_head(model)

    def chunked_score(self, model: PreTrainedModel, **stock_options: Any) -> AllPositionsScore:
        return AllPositionsScore(self, model, **stock_options)

    def scored(
        self, model: Any, batch: dict[str, Any], padding_value: int, *, prompts: bool
    ) -> tuple[Any, Tensor, int]:
        """The model's answer for chosen and rejected sequences, which of its tokens are completions, and how
        many pairs there are.

        `prompts`: score the tokens of the prompts too.
        """
        joined = self.concatenated_inputs(
            batch, is_encoder_decoder=False, padding_value=padding_value, device=self.accelerator.device
        )
        ids, attention = joined["concatenated_input_ids"], joined["concatenated_attention_mask"]
        completions = joined["concatenated_labels"]
        labels = torch.where(attention == 1, ids, -100) if prompts else completions
        router = {"output_router_logits": True} if self.aux_loss_enabled else {}
        out = model(ids, attention_mask=attention, labels=labels, fused_lm_head=True, **router)
        return out, completions[:, 1:] != -100, batch["chosen_labels"].shape[0]

    def answer(self, out: Any, logps: Tensor, nll: Tensor, pairs: int) -> tuple[Tensor, ...]:
        """The tuple that TRL's `get_batch_loss_metrics` unpacks; of the logits it takes the mean."""
        logits = out.mean_logits[:, self.logged_positions]
        found = (logps[:pairs], logps[pairs:], logits[:pairs], logits[pairs:], nll)
        return (*found, out.aux_loss) if self.aux_loss_enabled else found


def mean_nll(log_probs: Tensor, mask: Tensor) -> Tensor:
    return -log_probs.sum() / mask.sum()


@dataclass
class ORPOConfig(ChunkedLossConfigMixin, StockORPOConfig):
    """`trl.experimental.orpo.ORPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class ORPOTrainer(FullLogitsTrainerMixin, StockORPOTrainer):
    """`trl.experimental.orpo.ORPOTrainer`; with `ORPOConfig(use_chunked_loss=True)` the full logits
    disappear."""

    logged_positions = slice(None, -1)

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        if not self.uses_chunked_loss:
            return super().concatenated_forward(model, batch)
        # The NLL counts the prompt as well, so that one walk over all tokens serves both.
        out, completions, pairs = self.scored(model, batch, self.padding_value, prompts=True)
        logps = (out.log_probs * completions).sum(-1) / completions.sum(-1)
        return self.answer(out, logps, mean_nll(out.log_probs[:pairs], out.label_mask[:pairs]), pairs)


@dataclass
class CPOConfig(ChunkedLossConfigMixin, StockCPOConfig):
    """`trl.experimental.cpo.CPOConfig` with `use_chunked_loss` (default False) and `logits_budget` (bytes,
    default the library's)."""


class CPOTrainer(FullLogitsTrainerMixin, StockCPOTrainer):
    """`trl.experimental.cpo.CPOTrainer`, SimPO and AlphaPO with it; with `CPOConfig(use_chunked_loss=True)`
    the full logits disappear."""

    logged_positions = slice(None)

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        if not self.uses_chunked_loss:
            return super().concatenated_forward(model, batch)
        out, completions, pairs = self.scored(model, batch, self.pad_token_id, prompts=False)
        logps = out.log_probs.sum(-1)
        if self.loss_type in ("ipo", "simpo"):
            logps = logps / completions.sum(-1)
        nll = mean_nll(out.log_probs[:pairs], completions[:pairs]) if self.cpo_alpha else logps.new_zeros(())
        return self.answer(out, logps, nll, pairs)
