"""For trainers that know no fused head: they call models for logits, ours asks the same models for
log-probabilities."""

from typing import Any

from transformers import PreTrainedModel

from .distillation_trainers import _base
from .head import Score, attach_chunked_head
from .mixins import ChunkedLossTrainerMixin


class AttachedHeadTrainerMixin(ChunkedLossTrainerMixin):
    """Puts our head on the policy, and on the reference where there is one, once they are constructed.

    Raises:
        ValueError: the flag is on for an encoder-decoder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.uses_chunked_loss:
            return
        if self.model.config.is_encoder_decoder:
            raise ValueError(
                "model: expected a decoder with use_chunked_loss=True, got an encoder-decoder; set "
                "use_chunked_loss=False."
            )
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                model = _base(self.accelerator.unwrap_model(model))
                attach_late(self, model, self.chunked_score(model))


def attach_late(trainer: Any, model: PreTrainedModel, score: Score) -> None:
    """`attach_chunked_head` for a model that Accelerate may have prepared: its autocast goes around the score
    too."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        with trainer.accelerator.autocast():
            return score(*args, **kwargs)

    attach_chunked_head(model, answer if hasattr(model, "_original_forward") else score)
