"""Pack a public call into a flat list of tensors and a `Signature`, for the autograd Function and the
operators.

Only this module depends on the order of the tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.engine.call import HeadCall, Layers, Needs, TrainedIndices
from logitless.engine.sampling_mask import Sets
from logitless.engine.spec import LossSpec

# Placeholders for the sets in a call without a sampling mask.
NO_SETS = (None,) * len(Sets._fields)


class Part(NamedTuple):
    """One head of a packed call."""

    coefficient: float
    indices: TrainedIndices
    head: int | None  # index k of the layers in front of the head, `module.blocks(k)`; None without layers
    names: tuple[str, ...]  # names of the layers' tensors


class Signature(NamedTuple):
    """The non-tensor part of a call, which is constant in a compiled graph."""

    loss: LossSpec
    dtype: torch.dtype
    needs: tuple[bool, ...]  # which of the trained tensors, the first ones of a packed call, need a gradient
    parts: tuple[Part, ...]
    autocast: bool
    module: nn.Module | None  # the parts run its `blocks(head)`, with the tensors of the call
    add_targets: bool = False  # see `HeadCall`

    def without_gradients(self) -> "Signature":
        """Return the signature of the same call with no tensor that needs a gradient."""
        return self._replace(needs=(False,) * len(self.needs))


def pack(heads: Sequence[HeadCall]) -> tuple[Signature, list[Tensor | None], int]:
    """Pack the heads of one public call. Returns (signature, tensors, number of sequences).

    A tensor that several heads share is packed once, and gets a single gradient.
    """
    trained: list[Tensor] = []
    parts = []
    for head in heads:
        number = None if head.layers is None else head.layers.head
        layers = {} if head.layers is None else head.layers.tensors
        indices = []
        for x in (head.hidden, head.weight, head.bias, *layers.values()):
            index = None if x is None else len(trained)
            for at, packed in enumerate(trained):
                if packed is x:
                    index = at
            if index == len(trained):
                trained.append(x)
            indices.append(index)
        trained_indices = TrainedIndices(*indices[:3], tuple(indices[3:]))
        parts.append(Part(head.coefficient, trained_indices, number, tuple(layers)))
    first = heads[0]
    last = heads[-1]
    grad = torch.is_grad_enabled()
    # The base head comes first, and has no layers.
    module = None if last.layers is None else last.layers.module
    needs = tuple([grad and x.requires_grad for x in trained])
    autocast = torch.is_autocast_enabled(first.hidden.device.type)
    signature = Signature(first.loss, first.dtype, needs, tuple(parts), autocast, module, first.add_targets)
    sets = NO_SETS if first.sets is None else first.sets
    shared = [first.num_items, first.cu_seqlens, first.frozen, *sets, *first.inputs.values()]
    return signature, [*trained, *(head.targets for head in heads), *shared], first.sequence_count


def unpack(signature: Signature, tensors: Sequence[Tensor | None], sequence_count: int) -> list[HeadCall]:
    """Return the heads of a packed call. The inverse of `pack`."""
    loss = signature.loss
    needs = signature.needs
    heads = len(signature.parts)
    num_items, cu_seqlens, frozen, *rest = tensors[len(needs) + heads :]
    sets = Sets(*rest[: len(NO_SETS)])
    inputs = rest[len(NO_SETS) :]
    inputs = dict(zip(loss.roles, inputs, strict=True))
    calls = []
    for part, targets in zip(signature.parts, tensors[len(needs) : len(needs) + heads], strict=True):
        hidden, weight, bias, layers = part.indices
        trained = bool(layers) and any([needs[index] for index in layers])
        calls.append(
            HeadCall(
                loss=loss,
                hidden=tensors[hidden],
                weight=tensors[weight],
                bias=None if bias is None else tensors[bias],
                targets=targets,
                dtype=signature.dtype,
                inputs=inputs,
                num_items=num_items,
                cu_seqlens=cu_seqlens,
                sequence_count=sequence_count,
                frozen=frozen,
                layers=None if part.head is None else _layers(signature, part, tensors),
                coefficient=part.coefficient,
                sets=None if sets.ids is None else sets,
                add_targets=signature.add_targets,
                needs=Needs(needs[hidden], needs[weight], bias is not None and needs[bias], trained),
                indices=part.indices,
            )
        )
    return calls


def _layers(signature: Signature, part: Part, tensors: Sequence[Tensor | None]) -> Layers:
    named = dict(zip(part.names, part.indices.layers, strict=True))
    trained = tuple(name for name, index in named.items() if signature.needs[index])
    autocast = signature.dtype if signature.autocast else None
    layers = {name: tensors[index] for name, index in named.items()}
    return Layers(signature.module, part.head, layers, trained, autocast)
