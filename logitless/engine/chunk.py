"""`Chunk`: the rows of one step of the chunk loop, their logits, and the gradient that overwrites them."""

from dataclasses import dataclass

from torch import Tensor

from logitless.engine.plan import Step


@dataclass
class Chunk:
    """The tensors of a chunk; the loop fills those that are None at first."""

    step: Step
    row_index: slice | Tensor  # positions of the chunk's rows in the flat call: a slice, or (C,) indices
    logits: Tensor  # (C, V) products, a view of the loop's one buffer
    # (C, V) buffer of the gradient: the memory of the logits, in their dtype or viewed in a narrower one.
    grad_buffer: Tensor
    features: Tensor | None = None  # (C, H) input of product 1
    targets: Tensor | None = None  # (C,) as columns of the logits
    ignore_index: int | None = None  # the value of an ignored target in `targets`
    gradient: Tensor | None = None  # (C, V) d loss / d products up to `factors`, in the products' dtype
    factor: Tensor | None = None  # (C,) row factor that the kernel of the gradient returned; None: 1
    factors: tuple[Tensor, ...] = ()  # (C,) each, up to two: row factors that the gradient lacks
    d_features: Tensor | None = None  # (C, H)
    trained: Tensor | None = None  # (C, H') features of the trained columns, the input of product 3
