"""A forward pass that scores tokens in place of logits.

TRL 1.16 calls `model(..., labels=labels, fused_lm_head=True)` and reads a `FusedCausalLMOutput`.
`attach_chunked_head` answers that call with our losses. It all happens inside the model's own forward pass,
where the hooks of DDP, FSDP and DeepSpeed fire.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from logitless.engine.head_view import HeadView
from logitless.engine.operands import SplitHead
from logitless.models.exchange import exchange, withdraw
from logitless.models.logits import deferred, undeferred
from logitless.parallel.groups import local_parameter

KEY = "score"


class Score(Protocol):
    """Scores the labelled tokens and returns fields of `FusedCausalLMOutput`, `log_probs` among them."""

    def __call__(
        self,
        hidden: Tensor,  # (B, T, H)
        weight: Tensor | SplitHead,  # (V, H)
        bias: Tensor | None,  # (V,)
        labels: Tensor,  # (B, T)
        shift: bool,  # whether position i is scored on label i + 1
        options: dict[str, float | None],  # softcap and logit_scale, as the model's own forward pass has them
    ) -> dict[str, Tensor]: ...


def projected(hidden: Tensor, view: HeadView) -> tuple[Tensor, Tensor | SplitHead, Tensor | None]:
    """The operands of a head, with FSDP's shards gathered."""
    hidden, weight, bias = view.operands(hidden)
    whole = weight if isinstance(weight, SplitHead) else local_parameter("weight", weight, None)
    return hidden, whole, local_parameter("bias", bias, None)


def attach_chunked_head(model: PreTrainedModel, score: Score) -> Callable[[], None]:
    """Makes `model(..., labels=..., fused_lm_head=True)` return `score`'s answer; every other call runs as
    before. Returns its undoing."""
    withdraw(model, KEY)  # a model may come to a second trainer

    def answer(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        # A function is the same one in a deep copy of the model, and the trainer behind it is not copied.
        return score(*args, **kwargs)

    undo = exchange(model, KEY, _scored_forward, answer)

    def undo_all() -> None:
        undo()
        undeferred(model)

    return undo_all


def _scored_forward(
    model: PreTrainedModel,
    score: Score,
    stock: Callable,
    *args: Any,
    fused_lm_head: bool = False,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,  # already aligned, as context and sequence parallelism pass them
    **kwargs: Any,
) -> Any:
    if not fused_lm_head:
        own = {"labels": labels, "shift_labels": shift_labels}
        return stock(*args, **kwargs, **{name: x for name, x in own.items() if x is not None})
    targets = labels if shift_labels is None else shift_labels
    count = kwargs.pop("num_items_in_batch", None)
    kwargs |= {"use_cache": False, "return_dict": True}
    with deferred(model, summed=False):
        out = stock(*args, labels=targets, **kwargs)

    names: list[str] = []

    def values(hidden: Tensor, view: HeadView) -> tuple[Tensor, ...]:
        hidden, weight, bias = projected(hidden, view)
        found = score(hidden, weight, bias, targets.to(hidden.device), shift_labels is None, view.options)
        names.extend(found)
        return tuple(found.values())  # hooks of modules look for tensors in tuples

    fields = dict(zip(names, out.logits.computed(values)))
    # Read by TRL under DeepSpeed's sequence parallelism only; elsewhere `compute_loss` divides the sum by its
    # own count
    count = fields["label_mask"].sum().clamp(min=1) if count is None else count
    loss = -fields["log_probs"].sum() / count
    # Of the model's own loss the cross-entropy was left out: what remains is its router loss.
    loss = loss + out.loss
    return FusedCausalLMOutput(loss=loss, aux_loss=getattr(out, "aux_loss", None), **fields)
