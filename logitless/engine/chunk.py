"""A chunk on its way through the loop: some rows, their logits, and the gradient that overwrites them."""

from dataclasses import dataclass

from torch import Tensor

from logitless.engine.plan import Step


@dataclass
class Chunk:
    """What is known of a chunk so far."""

    step: Step
    at: slice | Tensor  # where its rows are in the flat call: side by side, or anywhere
    logits: Tensor  # (C, V) products, in the loop's one buffer
    # (C, V) room for the gradient: the logits themselves, or the same memory seen in a narrower dtype.
    place: Tensor
    features: Tensor | None = None  # (C, H) what enters the product
    targets: Tensor | None = None  # (C,) as columns of the logits
    ignored: int | None = None  # what stands for an ignored one among them
    gradient: Tensor | None = None  # (C, V) d loss / d products up to `factors`, in the products' dtype
    factor: Tensor | None = None  # (C,) that came with the gradient; None: 1
    factors: tuple[Tensor, ...] = ()  # (C,) each, up to two: what the gradient's rows lack
    d_features: Tensor | None = None  # (C, H)
    trained: Tensor | None = None  # (C, H') what the gradient is multiplied with for d_weight
