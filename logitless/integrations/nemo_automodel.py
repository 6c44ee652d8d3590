"""NeMo-Automodel 0.7.0: the cross-entropy of its recipes, from hidden states and the LM head.

    loss_fn:
      _target_: logitless.integrations.nemo_automodel.LogitlessCrossEntropy
      logits_budget: 2684354560

The recipes pass hidden states to every `LinearCrossEntropy`. `LogitlessCrossEntropy` is a subclass of
`ChunkedCrossEntropy`, whose `prepare_lm_weight` checks the head, gathers it from FSDP2 and casts it to the
dtype of the products.
"""

import torch
from torch import Tensor

from logitless.errors import value_error
from logitless.integrations.versions import check_version, log_replacement, unavailable_error
from logitless.losses import CrossEntropyLoss

try:
    from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
except ImportError as error:
    raise unavailable_error("nemo_automodel", error) from error


class LogitlessCrossEntropy(ChunkedCrossEntropy):
    """Cross-entropy that keeps one chunk of logits in memory, within `logits_budget` bytes.

    Args:
        ignore_index: labels with this id are not supervised.
        reduction: "sum", "mean" or "none".
        logits_budget: bytes that a chunk of logits and its temporaries may take; default that of
            `CrossEntropyLoss`.
    """

    def __init__(
        self, ignore_index: int = -100, reduction: str = "sum", logits_budget: int | str | None = None
    ) -> None:
        super().__init__(compile=False, ignore_index=ignore_index, reduction=reduction)
        check_version("nemo_automodel")
        self.loss = CrossEntropyLoss(
            ignore_index=ignore_index, reduction=reduction, logits_budget=logits_budget
        )
        log_replacement("NeMo-Automodel", "ChunkedCrossEntropy", logits_budget)

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: "torch.distributed.ProcessGroup | None" = None,
        loss_weights: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the loss of `ChunkedCrossEntropy.forward`, with the same arguments.

        Raises:
            ValueError: `num_label_tokens` or `loss_weights` with another reduction than "sum"; `logits_dtype`
                is not None, torch.float32 or the dtype of the head.
        """
        if self.reduction != "sum" and (num_label_tokens is not None or loss_weights is not None):
            remedy = "num_label_tokens and loss_weights require a sum"
            raise value_error("reduction", "'sum'", repr(self.reduction), remedy)
        # `logits_dtype` is only validated. `ChunkedCrossEntropy` rounds the product to the head's dtype
        # before it casts the logits to `logits_dtype`, so the accepted values all give the same loss.
        if logits_dtype not in (None, torch.float32, lm_weight.dtype):
            expected = f"None, torch.float32 or the head's {lm_weight.dtype}"
            remedy = "let the head's dtype be that of the logits"
            raise value_error("logits_dtype", expected, logits_dtype, remedy)
        if hidden_states.ndim == 3 and hidden_states.shape[0] == 1 and labels.ndim == 1:
            hidden_states = hidden_states[0]  # packed sequences (1, n, H), with labels (n,)
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        loss = self.loss(
            hidden_states.to(weight.dtype),
            weight,
            labels.to(hidden_states.device),
            token_weights=loss_weights,
            mask=None if mask is None else mask.to(hidden_states.device) != 0,
        ).loss
        if num_label_tokens is None:
            return loss
        return loss / num_label_tokens if num_label_tokens else loss * 0.0
