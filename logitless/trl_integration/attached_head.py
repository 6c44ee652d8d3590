"""What the trainers share that know no fused head: they call models for logits, ours asks the same models for log-probabilities."""

from typing import Any

from .distillation_trainers import _base
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
            raise ValueError("model: expected a decoder with use_chunked_loss=True, got an encoder-decoder; set use_chunked_loss=False.")
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                self._add_chunked_head(_base(self.accelerator.unwrap_model(model)))

    def scored(self, model: Any, **inputs: Any) -> Any:
        """The model's `FusedCausalLMOutput` for inputs with `labels` or `shift_labels`."""
        # A reference was prepared before it got our head, which is therefore outside the autocast that Accelerate put around it.
        with self.accelerator.autocast():
            return model(**inputs, fused_lm_head=True)
