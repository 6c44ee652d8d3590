"""A chunk on its way through the loop: some rows, their logits, and the gradient that overwrites them."""

from dataclasses import dataclass

from torch import Tensor

from logitless.engine.plan import Step


@dataclass
class Chunk:
    """What is known of a chunk so far."""

    step: Step
    at: slice | Tensor  # where its rows are in the flat call
    logits: Tensor  # (C, V) products, in the loop's one buffer
    features: Tensor | None = None  # (C, H) what enters the product
    targets: Tensor | None = None  # (C,) as columns of the logits
    gradient: Tensor | None = None  # (C, V) d loss / d products up to `factor`, in the products' dtype, over the logits
    factor: Tensor | None = None  # (C,) of the gradient's rows; None: 1
    d_features: Tensor | None = None  # (C, H)

    @property
    def in_place(self) -> bool:
        """Whether the rows lie side by side in the call, so that results can be written where they belong."""
        return isinstance(self.at, slice)

    def gradient_place(self, dtype) -> Tensor:
        """Where the gradient goes: the logits themselves, or their first bytes seen in a narrower dtype."""
        logits = self.logits
        return logits if logits.dtype == dtype else logits.view(dtype)[:, : logits.shape[1]]
