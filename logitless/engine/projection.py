"""`Projection`: the products of a `Chunk` with the head, and the layers in front of the head."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.engine.call import HeadCall, Layers, d_hidden_dtype
from logitless.engine.hooks import identity_hooks
from logitless.engine.plan import Kind, Plan, Write
from logitless.engine.rows import Rows
from logitless.kernels import fused_projection
from logitless.kernels.head.scale import scale_all
from logitless.kernels.matmul import accumulate, hidden_gradient, project


@dataclass
class Chunk:
    """Rows of a call that are in memory together, with their logits and the gradient of the logits.

    The loop fills the tensors that are None at first. `gradient` is `grad_buffer`, except for a `LogitsLoss`
    without a kernel and for gathered logits.
    """

    start: int
    stop: int
    kind: Kind
    reads: bool  # whether `Reader.read` computes the statistics of the logits; False: it only projects
    # Whether the gradient of the logits is written in this visit; False: the chunk is only read, and
    # projected again later, or in another pass.
    writes: bool
    row_index: slice | Tensor  # positions of the chunk's rows in the flat call: a slice, or (C,) indices
    logits: Tensor  # (C, V) products, a view of the loop's one buffer
    # (C, V) buffer of the gradient: the memory of the logits, in their dtype or viewed in a narrower dtype.
    grad_buffer: Tensor
    features: Tensor | None = None  # (C, H) input of product 1
    targets: Tensor | None = None  # (C,) as columns of the logits
    ignore_index: int | None = None  # the value of an ignored target in `targets`
    # d loss / d products up to `factors`: (C, V) in the dtype of the products; of gathered logits (C, k) or
    # (S,), in the dtype of the statistics
    gradient: Tensor | None = None
    factor: Tensor | None = None  # (C,) row factor that the kernel of the gradient returned; None: 1
    factors: tuple[Tensor, ...] = ()  # (C,) each, up to two: row factors that the gradient lacks
    d_features: Tensor | None = None  # (C, H)
    # (C, H) product 2 in fp32, before the row factors; None: `d_features` has the product.
    d_product: Tensor | None = None
    trained: Tensor | None = None  # (C, H') features of the trained columns, the input of product 3

    @property
    def rows(self) -> slice:
        """The chunk's rows, in the order of the loop."""
        return slice(self.start, self.stop)

    @property
    def count(self) -> int:
        return self.stop - self.start


class Projection:
    """The head of a call, with the products of the chunk loop. It collects d_hidden if hidden needs a
    gradient.

    Args:
        call: the call.
        rows: the rows of the call to project.
        gradients: whether the pass computes gradients.
    """

    # Product 3: (total, gradient, features, first=) -> total (+)= gradient.T @ features.
    accumulate = staticmethod(accumulate)

    def __init__(self, call: HeadCall, rows: Rows, *, gradients: bool):
        self.call = call
        self.rows = rows
        self.needs = call.needs
        # (V, H) in the dtype of the products
        self.weight = call.weight.to(call.dtype) if call.frozen is None else _joined(call)
        self.frozen_columns = 0 if call.frozen is None else call.frozen.shape[1]
        self.layers = None if call.layers is None else LayerPasses(call.layers, gradients=call.trainable)
        self.d_hidden: Tensor | None = None  # (N, H), 0 in rows that are not projected
        self._wide: Tensor | None = None  # (rows of the largest chunk, H) fp32, see `Chunk.d_product`
        if self.needs.hidden and gradients:
            make = torch.empty if rows.count == call.hidden.shape[0] else torch.zeros
            dtype = d_hidden_dtype(self.weight.dtype)
            self.d_hidden = make(call.hidden.shape, dtype=dtype, device=self.weight.device)

    def new_buffer(self, plan: Plan, *, fused_epilogue: bool) -> tuple[Tensor, Tensor]:
        """Allocate the buffers (logits, gradient) of a chunk: views of the same memory in different dtypes.

        With `fused_epilogue`, one kernel projects and reads, so no logits are stored. The buffer then only
        holds the gradient, and has no rows if the plan writes no gradient.
        """
        if fused_epilogue:
            rows = 0 if plan.writes is Write.NEVER else plan.token_chunk
            return (place := fused_projection.new_gradient_buffer(self.weight, rows)), place
        rows = plan.token_chunk
        V = self.weight.shape[0]
        dtype = self.call.logits_dtype
        logits = self.weight.new_empty((rows, V), dtype=dtype)
        return logits, logits if dtype == self.weight.dtype else logits.view(self.weight.dtype)[:, :V]

    def take(self, chunk: Chunk) -> None:
        """Set the chunk's features (in the dtype of the products) and targets (as columns of the logits)."""
        call = self.call
        x = call.hidden[chunk.row_index].to(self.weight.dtype)
        chunk.features = x if self.layers is None else self.layers.forward(x)
        targets = call.targets[chunk.row_index]
        chunk.targets, chunk.ignore_index = call.vocabulary.columns(targets, call.loss.ignore_index)

    def project(self, chunk: Chunk) -> None:
        """Product 1: features -> logits."""
        project(chunk.features, self.weight, chunk.logits)

    def backproject(self, chunk: Chunk) -> None:
        """Product 2: gradient -> d_features, up to the chunk's factors; skipped if it is not needed.

        If a row factor follows, the product is kept in fp32 until then, so that it is rounded once.
        """
        if not (self.needs.hidden or self.needs.layers):
            return
        chunk.d_features = out = self.d_features(chunk)
        if chunk.factor is not None and out.dtype == torch.bfloat16:
            if self._wide is None or self._wide.shape[0] < chunk.count:
                self._wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            out = chunk.d_product = self._wide[: chunk.count]
        hidden_gradient(chunk.gradient, self.weight, out)

    def d_features(self, chunk: Chunk) -> Tensor:
        """The buffer of d_features: the chunk's rows of d_hidden if they are a slice, else a new tensor."""
        if isinstance(chunk.row_index, slice) and self.d_hidden is not None and self.layers is None:
            return self.d_hidden[chunk.row_index]
        return torch.empty_like(chunk.features, dtype=d_hidden_dtype(self.weight.dtype))

    def scale(self, chunk: Chunk) -> None:
        """Apply the row factors, in one launch, to d_features and to the features of the trained columns.

        The latter are the input of product 3: all features or, with LoRA, those that the adapter's columns of
        the weight multiply.
        """
        pairs = []
        if self.needs.weight:
            x = chunk.features
            writable = self.layers is None and (
                isinstance(chunk.row_index, Tensor) or x.dtype != self.call.hidden.dtype
            )
            if self.frozen_columns:
                x = x[:, self.frozen_columns :].clone(memory_format=torch.contiguous_format)
                writable = True
            chunk.trained = x if writable or not chunk.factors else torch.empty_like(x)
            pairs.append((x, chunk.trained))
        if chunk.d_features is not None:
            product = chunk.d_features if chunk.d_product is None else chunk.d_product
            pairs.append((product, chunk.d_features))
        if chunk.factors:
            scale_all(pairs, chunk.factors)

    def reduce(self, chunk: Chunk):
        """Start the sum of d_features over the ranks of a sharded head; None if there is no such sum."""
        return None if chunk.d_features is None else self.call.vocabulary.start_sum(chunk.d_features)

    def scatter(self, chunk: Chunk, arrival) -> None:
        """Wait for the sum over ranks, run the layers' backward pass, and write the rows of d_hidden."""
        if arrival is not None:
            arrival.wait()
        if chunk.d_features is None:
            return
        d_rows = chunk.d_features if self.layers is None else self.layers.backward(chunk.d_features)
        if self.d_hidden is None:
            return
        if isinstance(chunk.row_index, Tensor):
            self.d_hidden.index_copy_(0, chunk.row_index, d_rows.to(self.d_hidden.dtype))
        elif self.layers is not None:
            self.d_hidden[chunk.row_index] = d_rows


def _joined(call: HeadCall) -> Tensor:
    """Concatenate the frozen and the trained columns of the head."""
    frozen, weight = call.frozen, call.weight
    joined = frozen.new_empty((frozen.shape[0], call.hidden.shape[1]), dtype=call.dtype)
    joined[:, : frozen.shape[1]], joined[:, frozen.shape[1] :] = frozen, weight
    return joined


class LayerPasses:
    """Runs the layers in front of a head forward and backward per chunk.

    Only the activations of the current chunk are kept.
    """

    def __init__(self, layers: Layers, *, gradients: bool):
        self._gradients = gradients
        self._module = layers.module.blocks(layers.head)
        self._autocast = layers.autocast
        self.trained = layers.trained
        self._leaves = {
            name: x.detach().requires_grad_(name in self.trained) for name, x in layers.tensors.items()
        }
        self._x = self._y = None
        self.sums: Mapping[str, Tensor] = {
            name: torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for name, x in layers.tensors.items()
            if name in self.trained
        }

    def forward(self, x: Tensor) -> Tensor:
        # The body of an operator runs outside the autocast context of its caller.
        autocast = torch.autocast(x.device.type, dtype=self._autocast, enabled=self._autocast is not None)
        with torch.set_grad_enabled(self._gradients), identity_hooks(), autocast:
            self._x = x.detach().requires_grad_(self._gradients)
            self._y = torch.func.functional_call(self._module, self._leaves, (self._x,))
        return self._y.detach().to(x.dtype)

    def backward(self, d_y: Tensor) -> Tensor:
        wanted = [self._x, *(self._leaves[name] for name in self.trained)]
        d_x, *gradients = torch.autograd.grad(self._y, wanted, d_y.to(self._y.dtype))
        for total, gradient in zip(self.sums.values(), gradients, strict=True):
            total += gradient
        self._x = self._y = None
        return d_x
