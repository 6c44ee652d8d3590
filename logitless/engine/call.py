"""`Call`: one head's share of a call, its tensors and what of them needs a gradient; and the only place that packs and unpacks calls.

A public call becomes a list of `Call`, one per head and nearly always one. Autograd and the opaque operators see a flat list of
tensors instead, and a `Signature` that says what they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.engine.operands import Operands, shifted
from logitless.engine.spec import PER_TOKEN, LossSpec, Role
from logitless.errors import expect
from logitless.parallel.groups import local_parameter
from logitless.parallel.sequences import WholeSequences
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, ShardedVocabulary, WholeVocabulary


class Needs(NamedTuple):
    """Which tensors of a head need a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    layers: bool = False  # any parameter of the layers in front of the head

    @property
    def head(self) -> bool:
        return self.weight or self.bias

    @property
    def features(self) -> bool:
        """Whether the product with d_logits that leads back to the hidden states is needed."""
        return self.hidden or self.layers


class Layers(NamedTuple):
    """Layers between the hidden states and head number `head` of a module: `module.blocks(head)`."""

    module: nn.Module
    head: int
    tensors: Mapping[str, Tensor]  # parameters and buffers by name
    trained: tuple[str, ...] = ()  # those that need a gradient
    autocast: torch.dtype | None = None


class Slots(NamedTuple):
    """Which of a signature's trained tensors a head uses."""

    hidden: int
    weight: int
    bias: int | None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """One head: hidden states times weight, and the loss of it."""

    loss: LossSpec
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H), or its trained columns (V, r)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,) int64
    inputs: Mapping[str, Tensor | None]  # by declared name
    num_items: Tensor | None  # ()
    cu_seqlens: Tensor | None  # (sequences + 1,)
    sequence_count: int  # 0 where the loss does not look at sequences
    dtype: torch.dtype  # of the products
    needs: Needs
    slots: Slots
    vocabulary: WholeVocabulary
    frozen: Tensor | None = None  # (V, H - r), columns without gradient in front of those of `weight`
    layers: Layers | None = None
    coefficient: float = 1.0  # of this head's loss in the whole

    @property
    def N(self) -> int:
        return self.targets.shape[0]

    @property
    def V(self) -> int:
        """Size of the vocabulary."""
        return self.vocabulary.total(self.weight.shape[0])

    @property
    def width(self) -> int:
        """Columns of a chunk of logits to plan for: the same on all ranks, so that they walk the same chunks."""
        return self.vocabulary.widest(self.weight.shape[0])

    @property
    def stat_dtype(self) -> torch.dtype:
        """Of per-token numbers."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.loss.logits_dtype or self.dtype

    @property
    def sequences(self) -> WholeSequences:
        return self.loss.sequences

    @property
    def trainable(self) -> bool:
        return any(self.needs)


class Options(NamedTuple):
    """What a public call takes beside the operands and the loss's own inputs."""

    num_items: float | Tensor | None = None
    shift: bool = False
    cu_seqlens: Tensor | None = None


def make_call(loss: LossSpec, operands: Operands, options: Options, inputs: Mapping[str, Tensor | None]) -> Call:
    """Check a public call and flatten it to one row per token."""
    dtype = operands.check()
    hidden, weight, targets, bias, frozen = operands
    stat = torch.promote_types(dtype, torch.float32)
    for name, wanted in (("accum_dtype", loss.accum_dtype), ("logits_dtype", loss.logits_dtype)):
        fits = wanted is None or wanted == dtype or wanted == torch.promote_types(wanted, stat)
        expect(fits, name, f"None, {dtype} or a wider dtype", wanted, "leave it None for the default")
    sequence_count, cu_seqlens = _sequences(loss, hidden, options.cu_seqlens)
    flat = {name: _flat_input(loss, name, inputs.get(name), targets.shape, sequence_count) for name in loss.roles}
    if options.shift:
        ends = None if cu_seqlens is None else cu_seqlens[1:]
        dim = targets.dim() - 1
        flat = {name: shifted(x, 0, dim, ends) if x is not None and loss.roles[name] is Role.TOKEN else x for name, x in flat.items()}
        targets = shifted(targets, loss.ignore_index, dim, ends)
    call = Call(
        loss=loss,
        hidden=hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        targets=targets.reshape(-1).long(),
        dtype=dtype,
        sequence_count=sequence_count,
        inputs={name: _rows(x, targets) if loss.roles[name] in PER_TOKEN else x for name, x in flat.items()},
        num_items=_num_items(loss, options.num_items, stat, hidden.device),
        cu_seqlens=cu_seqlens,
        frozen=frozen,
        # Known once the call is unpacked.
        needs=Needs(False, False, False),
        slots=Slots(0, 1, None),
        vocabulary=WHOLE_VOCABULARY,
    )
    if loss.tp_group is None:
        _check_vocabulary_inputs(call)
    return call


def _rows(x: Tensor | None, targets: Tensor) -> Tensor | None:
    """(*targets.shape, ...) -> (N, ...)."""
    return None if x is None else x.reshape(-1, *x.shape[targets.dim() :])


def _flat_input(loss: LossSpec, name: str, x: Tensor | None, shape: torch.Size, sequence_count: int) -> Tensor | None:
    """One of the loss's inputs, checked against its role."""
    role = loss.roles[name]
    if x is None or role is Role.WHOLE:
        return x
    expect(isinstance(x, Tensor), name, "a tensor", type(x).__name__, "pass torch.tensor(...)", TypeError)
    if role is Role.HEAD:
        return local_parameter(name, x.detach(), loss.tp_group)
    if role is Role.VOCABULARY:
        return x
    if role is Role.SEQUENCE:
        expected = f"shape ({sequence_count},), one entry per sequence"
        expect(x.shape[:1] == (sequence_count,), name, expected, tuple(x.shape), "match the batch")
        return x
    fits, expected = x.shape[: len(shape)] == shape, f"a shape that starts with targets' {tuple(shape)}"
    expect(fits, name, expected, tuple(x.shape), "give one entry per token")
    return x


def _num_items(loss: LossSpec, given: float | Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if given is None:
        return None
    expect(loss.reduction != "none", "num_items", "None with reduction='none'", given, "divide the values yourself")
    if not isinstance(given, Tensor):
        given = torch.full((), given, dtype=dtype, device=device)
    expect(given.dim() == 0, "num_items", "a number or a 0-d tensor", tuple(given.shape), "sum it first")
    return given.to(device)


def _sequences(loss: LossSpec, hidden: Tensor, cu_seqlens: Tensor | None) -> tuple[int, Tensor | None]:
    """How many sequences the call has (0 for a loss that does not look at them), and the boundaries of packed ones."""
    if cu_seqlens is not None:
        kind = type(cu_seqlens).__name__
        expect(isinstance(cu_seqlens, Tensor), "cu_seqlens", "a tensor", kind, "pass torch.tensor(...)", TypeError)
        whole = not cu_seqlens.is_floating_point() and cu_seqlens.dim() == 1
        got = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        expect(whole, "cu_seqlens", "(sequences + 1,) int64 boundaries", got, "pass boundaries")
        expected = "shape (N, H) with cu_seqlens"
        expect(hidden.dim() == 2, "hidden", expected, tuple(hidden.shape), "flatten the tokens or leave it out")
        cu_seqlens = cu_seqlens.to(hidden.device, torch.int64)
    if loss.scope == "token" and loss.unit == "tokens":
        return 0, cu_seqlens
    if cu_seqlens is None and hidden.dim() < 3:
        flat = loss.scope == "batch" and Role.SEQUENCE not in loss.roles.values()
        expect(flat, "hidden", "shape (B, T, H)", tuple(hidden.shape), "or pass cu_seqlens")
        return 1, None
    count, group = hidden.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, loss.sequences_per_group
    expect(count % group == 0, "hidden", f"a multiple of {group} sequences", count, "give every group all of its sequences")
    return count, cu_seqlens


# -- Packing


class Part(NamedTuple):
    """One head of a packed call."""

    coefficient: float
    slots: Slots
    head: int | None  # number of the head whose layers come first; None without layers
    names: tuple[str, ...]  # of the layers' tensors


class Signature(NamedTuple):
    """All of a call that is no tensor, and constant for a compiled graph."""

    loss: LossSpec
    dtype: torch.dtype
    needs: tuple[bool, ...]  # which of the trained tensors need a gradient
    parts: tuple[Part, ...]
    autocast: bool
    module: nn.Module | None  # whose `blocks(head)` the parts run; each call brings its tensors

    @property
    def trained(self) -> int:
        """How many tensors may need a gradient: the first ones of a packed call."""
        return len(self.needs)

    def without_gradients(self) -> "Signature":
        """The same call where nothing needs a gradient."""
        return self._replace(needs=(False,) * len(self.needs))


def pack(calls: Sequence[Call]) -> tuple[Signature, list[Tensor | None], int]:
    """Heads of one public call -> signature, tensors, number of sequences. A tensor that several heads use is packed once."""
    trained: list[Tensor] = []

    def slot(x: Tensor) -> int:
        for index, known in enumerate(trained):
            if known is x:
                return index
        trained.append(x)
        return len(trained) - 1

    parts = []
    for call in calls:
        head, tensors = (None, {}) if call.layers is None else (call.layers.head, call.layers.tensors)
        bias = None if call.bias is None else slot(call.bias)
        slots = Slots(slot(call.hidden), slot(call.weight), bias, tuple([slot(x) for x in tensors.values()]))
        parts.append(Part(call.coefficient, slots, head, tuple(tensors)))
    first, last, grad = calls[0], calls[-1], torch.is_grad_enabled()
    # The base head comes first, and has no layers.
    module = None if last.layers is None else last.layers.module
    needs = tuple([grad and x.requires_grad for x in trained])
    autocast = torch.is_autocast_enabled(first.hidden.device.type)
    signature = Signature(first.loss, first.dtype, needs, tuple(parts), autocast, module)
    shared = [first.num_items, first.cu_seqlens, first.frozen, *(first.inputs[name] for name in first.loss.roles)]
    return signature, [*trained, *(call.targets for call in calls), *shared], first.sequence_count


def unpack(signature: Signature, tensors: Sequence[Tensor | None], sequence_count: int) -> list[Call]:
    """The heads of a packed call."""
    loss, trained, heads = signature.loss, signature.trained, len(signature.parts)
    num_items, cu_seqlens, frozen, *inputs = tensors[trained + heads :]
    inputs = dict(zip(loss.roles, inputs, strict=True))
    calls = []
    for part, targets in zip(signature.parts, tensors[trained : trained + heads], strict=True):
        slots, needs = part.slots, signature.needs
        weight = tensors[slots.weight]
        layers = None if part.head is None else _layers(signature, part, tensors)
        vocabulary = WHOLE_VOCABULARY if loss.tp_group is None else ShardedVocabulary.of(weight, loss.tp_group)
        bias = slots.bias is not None and needs[slots.bias]
        call = Call(
            loss=loss,
            hidden=tensors[slots.hidden],
            weight=weight,
            bias=None if slots.bias is None else tensors[slots.bias],
            targets=targets,
            dtype=signature.dtype,
            needs=Needs(needs[slots.hidden], needs[slots.weight], bias, layers is not None and bool(layers.trained)),
            sequence_count=sequence_count,
            inputs=inputs,
            num_items=num_items,
            cu_seqlens=cu_seqlens,
            frozen=frozen,
            layers=layers,
            coefficient=part.coefficient,
            slots=slots,
            vocabulary=vocabulary,
        )
        if loss.tp_group is not None:
            _check_vocabulary_inputs(call)
        calls.append(call)
    return calls


def _check_vocabulary_inputs(call: Call) -> None:
    for name, role in call.loss.roles.items():
        x = call.inputs[name]
        if role is Role.VOCABULARY and x is not None:
            expected, got = f"shape ({call.V},), one per token id", tuple(x.shape)
            expect(got == (call.V,), name, expected, got, "give every token id an entry")


def _layers(signature: Signature, part: Part, tensors: Sequence[Tensor | None]) -> Layers:
    named = dict(zip(part.names, part.slots.layers, strict=True))
    trained = tuple(name for name, index in named.items() if signature.needs[index])
    autocast = signature.dtype if signature.autocast else None
    return Layers(signature.module, part.head, {name: tensors[i] for name, i in named.items()}, trained, autocast)
