"""A forward pass that scores tokens in place of logits.

TRL 1.16 calls `model(..., labels=labels, fused_lm_head=True)` and reads a `FusedCausalLMOutput`.
`attach_chunked_head` answers that call with our losses. It all happens inside the model's own forward pass,
where the hooks of DDP, FSDP and DeepSpeed fire.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

from logitless.engine.head_view import HeadView
from logitless.models.exchange import exchange, withdraw
from logitless.models.logits import deferred, undeferred

KEY = "score"

# Scores the labelled tokens: (hidden (B, T, H), head, labels (B, T), shift: whether position i is scored on
# label i + 1) -> fields of `FusedCausalLMOutput`, `log_probs` among them.
Score = Callable[[Tensor, HeadView, Tensor, bool], dict[str, Tensor]]


def attach_chunked_head(model: PreTrainedModel, score: Score) -> Callable[[], None]:
    """Makes `model(..., labels=..., fused_lm_head=True)` return `score`'s answer; every other call runs as
    before. Returns its undoing."""

    def answer(*args: Any) -> dict[str, Tensor]:
        # A function is the same one in a deep copy of the model, and the trainer behind it is not copied.
        return score(*args)

    return exchanged(model, _scored_forward, answer)


def exchanged(model: PreTrainedModel, forward: Callable, state: Any) -> Callable[[], None]:
    """Gives a model one of our forward passes, which defer its logits; returns its undoing."""
    withdraw(model, KEY)  # a model may come to a second trainer
    undo = exchange(model, KEY, forward, state)

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
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Any:
    if not fused_lm_head:
        own = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        return stock(*args, **kwargs, **{name: x for name, x in own.items() if x is not None})
    targets = labels if shift_labels is None else shift_labels
    kwargs |= {"use_cache": False, "return_dict": True}
    with deferred(model, summed=False):
        out = stock(*args, labels=targets, **kwargs)

    names: list[str] = []

    def values(hidden: Tensor, head: HeadView) -> tuple[Tensor, ...]:
        found = score(hidden, head, targets.to(hidden.device), shift_labels is None)
        names.extend(found)
        return tuple(found.values())  # hooks of modules look for tensors in tuples

    fields = dict(zip(names, out.logits.computed(values)))
    # Read by TRL under DeepSpeed's sequence parallelism only; elsewhere `compute_loss` divides the sum by its
    # own count
    count = fields["label_mask"].sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -fields["log_probs"].sum() / count
    # Of the model's own loss the cross-entropy was left out: what remains is its router loss.
    loss = loss + out.loss
    return FusedCausalLMOutput(loss=loss, aux_loss=getattr(out, "aux_loss", None), **fields)
