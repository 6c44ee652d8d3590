"""`HeadCall`: the part of a public call that belongs to one LM head.

`make_head_call` checks the arguments of a public call and creates a `HeadCall`. Only Medusa and multi-token
prediction have several heads, with one `HeadCall` each.

`pack` converts the heads of a call to a flat list of tensors and a `Signature`; `unpack` is the inverse. Only
calls whose backward pass runs a pass, and compiled graphs, use them: the tensors become autograd's saved
tensors, or the arguments of an operator.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from logitless.engine.operands import SplitHead, check_operands, check_packed, checked_boundaries, shifted
from logitless.engine.sampling_mask import AlignedMask, Sets
from logitless.engine.spec import PER_TOKEN, LossSpec, Role, looks_at_sequences
from logitless.errors import check_number, type_error, value_error
from logitless.kernels import fused_projection
from logitless.parallel.groups import PLAIN, local_parameter
from logitless.parallel.sequences import WHOLE_SEQUENCES, WholeSequences
from logitless.parallel.vocabulary import WHOLE_VOCABULARY, ShardedVocabulary, Shards, WholeVocabulary

Named = Mapping[str, Tensor | None]


class Needs(NamedTuple):
    """Which tensors of a head need a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    layers: bool  # any parameter of the layers in front of the head


class Layers(NamedTuple):
    """The layers in front of one head of a module: `module.blocks(head)`."""

    module: nn.Module
    head: int
    tensors: Mapping[str, Tensor]  # parameters and buffers by name
    trained: tuple[str, ...] = ()  # names of the tensors that need a gradient
    autocast: torch.dtype | None = None


class TrainedIndices(NamedTuple):
    """The indices of a head's tensors in the `trained_tensors` of a public call."""

    hidden: int
    weight: int
    bias: int | None
    layers: tuple[int, ...]


class Replayable(NamedTuple):
    """A call whose pass may be captured, before its arguments are checked."""

    loss: LossSpec
    key: Hashable  # all on which its kernels depend, except for the values of `given`
    given: Named  # the tensors that are copied for each replay
    heads: Named  # those that the graph reads at their own addresses: "weight", "bias" and further heads
    bind: Callable[[Named], "HeadCall"]  # the checked call of other tensors in the place of `given`


@dataclass(frozen=True, kw_only=True)
class HeadCall:
    """The part of a public call that belongs to one LM head: tensors with one row per token, and constants.

    `make_head_call` creates it from the arguments of a call, and `unpack` from the tensors of a packed call.
    """

    loss: LossSpec
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H), or its trained columns (V, r)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,) int64
    dtype: torch.dtype  # of the products: that of the operands, or of autocast
    inputs: Mapping[str, Tensor | None]  # by declared name
    num_items: Tensor | None  # ()
    cu_seqlens: Tensor | None  # (sequences + 1,)
    sequence_count: int  # 0 if the loss does not depend on sequences
    frozen: Tensor | None  # (V, H - r), columns without gradient that precede the columns of `weight`
    layers: Layers | None = None
    coefficient: float = 1.0  # factor of this head's loss in the sum over heads
    sets: Sets | None = None  # the kept ids of each row, if the call has a sampling mask
    add_targets: bool = False  # whether a target that is missing from its row's set is added to the set
    # Which tensors need a gradient, and their indices in the trained tensors of the public call. None while
    # Dynamo traces the call.
    needs: Needs | None = None
    indices: TrainedIndices | None = None
    # The shard sizes and kernels of all ranks that share the head, after the ranks have exchanged them.
    shards: Shards | None = None
    # The arguments of which the call was made, if its pass may be captured.
    replayable: Replayable | None = None

    # Derived from the fields above, and set together with `needs`.
    trainable: bool = field(init=False)  # whether anything needs a gradient
    stat_dtype: torch.dtype = field(init=False)  # of per-token statistics
    sequences: WholeSequences = field(init=False)
    vocabulary: WholeVocabulary = field(init=False)
    V: int = field(init=False)  # size of the vocabulary; 0 for a sharded head before `shards` is set
    # Columns of a chunk of logits in the plan: those of the largest shard, so that all ranks have the same
    # chunks.
    width: int = field(init=False)
    # Whether the loss takes fp32 logits because a kernel for this head projects a chunk and computes its
    # statistics from the fp32 accumulators. Where the pass does not allow this kernel
    # (`readers.tokens.can_fuse_epilogue`), the chunk is stored in fp32. This depends on loss, device, dtypes
    # and head, but not on the number of rows or the grad mode, so that every pass over the same rows uses the
    # same logits. Logits may be fp32 without it: see `logits_dtype`. With a sharded head, the value is that
    # of this rank until `shards` is set.
    fp32_logits: bool = field(init=False)
    logits_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        if self.needs is None:
            return
        loss = self.loss
        shards = self.shards
        stat = stat_dtype_of(self.dtype)
        if loss.tp_group is None:
            V = width = self.weight.shape[0]
            vocabulary = WHOLE_VOCABULARY
        elif shards is None:
            V = width = 0
            vocabulary = ShardedVocabulary(loss.tp_group, ())
        else:
            V = shards.V
            width = max(shards.sizes)
            vocabulary = ShardedVocabulary(loss.tp_group, shards.sizes)
        if shards is None:
            projected = self.weight if self.frozen is None else self.frozen, self.inputs.get("ref_weight")
            served = fused_projection.serves(self.dtype, self.hidden.shape[1], *projected)
            fp32_logits = served and loss.reader.takes_fp32_logits(loss, stat)
        else:
            fp32_logits = shards.fp32_logits
        self.__dict__.update(
            trainable=any(self.needs),
            stat_dtype=stat,
            sequences=WHOLE_SEQUENCES if loss.cp_group is None else loss.sequences,
            vocabulary=vocabulary,
            V=V,
            width=width,
            fp32_logits=fp32_logits,
            logits_dtype=loss.logits_dtype or (stat if fp32_logits else self.dtype),
        )

    @property
    def keeps_dlogp_dhidden(self) -> bool:
        """Whether a pass that returns per-token statistics also keeps d logp / d hidden.

        This is so if only hidden needs a gradient, there is no sampling mask, and the reader allows it.
        """
        hidden_alone = self.needs.hidden and not (self.needs.weight or self.needs.bias)
        return hidden_alone and self.sets is None and self.loss.reader.allows_cached_grad(self.loss)

    def with_targets(self, targets: Tensor, inputs: Mapping[str, Tensor | None]) -> "HeadCall":
        """Return the call with other targets and inputs of the same shapes and dtypes.

        No other field depends on their values. `dataclasses.replace` would derive all of them again.
        """
        call = object.__new__(HeadCall)
        call.__dict__.update(self.__dict__, targets=targets, inputs=inputs)
        return call

    def made_of(self, arguments: Replayable) -> "HeadCall":
        """Return the call with the arguments of which it was made."""
        call = self.with_targets(self.targets, self.inputs)
        call.__dict__["replayable"] = arguments
        return call

    def with_shards(self, shards: Shards | None) -> "HeadCall":
        """Return the call with the shard sizes and kernels of all ranks; unchanged if `shards` is None."""
        if shards is None:
            return self
        for name, x in self.inputs.items():
            if x is not None and self.loss.roles[name] is Role.VOCABULARY:
                check_vocabulary_input(name, x, shards.V)
        return replace(self, shards=shards)


def stat_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of per-token statistics for products in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def d_hidden_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of d_hidden before the deferred factor is applied, for products in `dtype`.

    For fp16 it is fp32: without the factor, the values may overflow although the final gradient does not.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def make_head_call(
    loss: LossSpec,
    hidden: Tensor,  # (..., H)
    weight: Tensor | SplitHead,  # (V, H)
    targets: Tensor,  # (...)
    bias: Tensor | None,  # (V,)
    inputs: Mapping[str, Tensor | None],
    *,
    num_items: float | Tensor | None = None,
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    aligned_mask: AlignedMask | None = None,
) -> HeadCall:
    """Check the arguments of a public call, and return them as a `HeadCall` with one row per token.

    `LinearLoss.prepare`, a method of the loss, has already computed the inputs that the loss declares.
    """
    frozen = None
    if isinstance(weight, SplitHead):
        frozen = local_parameter("weight", weight.frozen.detach(), loss.tp_group)
        weight = weight.trained
    if type(weight) not in PLAIN:
        weight = local_parameter("weight", weight, loss.tp_group)
    if bias is not None and type(bias) not in PLAIN:
        bias = local_parameter("bias", bias, loss.tp_group)
    dtype = check_operands(hidden, weight, targets, bias, frozen)
    stat = stat_dtype_of(dtype)
    for name, wanted in (("accum_dtype", loss.accum_dtype), ("logits_dtype", loss.logits_dtype)):
        if wanted is not None and wanted != dtype and wanted != torch.promote_types(wanted, stat):
            raise value_error(
                name, f"None, {dtype} or a wider dtype", wanted, "set it to None for the default"
            )
    sequence_count = 0
    if cu_seqlens is not None:
        cu_seqlens = checked_boundaries(cu_seqlens, hidden, loss.boundaries_argument)
        check_packed("hidden", hidden, 2, loss.boundaries_argument)
    if looks_at_sequences(loss):
        sequence_count = _sequence_count(loss, hidden, cu_seqlens)
    if shift:
        if hidden.dim() <= 1:
            raise value_error("shift", "False for hidden (H,)", True, "a single token has no next token")
    flat = {name: None for name in loss.roles}
    for name, x in inputs.items():
        if x is not None:
            _check_input(loss, name, x, targets, sequence_count)
            if shift and loss.roles[name] is Role.TOKEN:
                x = shifted(x, 0, targets.dim() - 1, cu_seqlens)
            if loss.roles[name] in PER_TOKEN:
                x = x.reshape(-1, *x.shape[targets.dim() :])
            if loss.roles[name] is Role.VOCABULARY and loss.tp_group is None:
                check_vocabulary_input(name, x, weight.shape[0])
            if loss.roles[name] is Role.HEAD:
                x = local_parameter(name, x.detach(), loss.tp_group)
            elif isinstance(x, Tensor) and x.requires_grad:
                is_features = loss.roles[name] is Role.FEATURES or name == "teacher_hidden"
                if is_features or not torch.is_grad_enabled():
                    x = x.detach()
                elif loss.reduction != "none":
                    check_constant(name, x)
            flat[name] = x
    if shift:
        targets = shifted(targets.long(), loss.ignore_index, targets.dim() - 1, cu_seqlens)
    needs = indices = None
    if not torch.compiler.is_compiling():
        grad = torch.is_grad_enabled()
        has_bias = bias is not None
        needs = Needs(
            grad and hidden.requires_grad,
            grad and weight.requires_grad,
            grad and has_bias and bias.requires_grad,
            False,
        )
        indices = TrainedIndices(0, 1, 2 if has_bias else None, ())
    return HeadCall(
        loss=loss,
        hidden=hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1]),
        weight=weight,
        bias=bias,
        targets=targets.reshape(-1).long(),
        dtype=dtype,
        inputs=flat,
        num_items=None if num_items is None else _num_items(loss, num_items, stat, hidden.device),
        cu_seqlens=cu_seqlens,
        sequence_count=sequence_count,
        frozen=frozen,
        sets=None if aligned_mask is None else aligned_mask.sets,
        add_targets=aligned_mask is not None and aligned_mask.add_targets,
        needs=needs,
        indices=indices,
    )


def check_constant(name: str, x: object) -> None:
    """Raise ValueError if the gradient of an input would be lost: the passes treat inputs as constants."""
    if isinstance(x, Tensor) and x.requires_grad:
        remedy = "detach it: only hidden states, the head and its bias get gradients"
        raise value_error(name, "a tensor that requires no gradient", "one that does", remedy)


def _check_input(loss: LossSpec, name: str, x: object, targets: Tensor, sequence_count: int) -> None:
    """Check the type and the shape of an input, which its role determines."""
    role = loss.roles[name]
    shape = targets.shape
    if role is Role.WHOLE:
        return
    if not isinstance(x, Tensor):
        raise type_error(name, "a tensor", type(x).__name__, "pass torch.tensor(...)")
    if role is Role.SEQUENCE:
        if x.shape[:1] != (sequence_count,):
            raise value_error(
                name, f"shape ({sequence_count},), one entry per sequence", tuple(x.shape), "match the batch"
            )
    elif role in PER_TOKEN:
        if x.shape[: len(shape)] != shape:
            raise value_error(
                name,
                f"a shape that starts with targets' {tuple(shape)}",
                tuple(x.shape),
                "pass one entry per token",
            )


def check_vocabulary_input(name: str, x: Tensor, V: int) -> None:
    """Check the shape of an input (V,), once the size of the vocabulary is known."""
    got = tuple(x.shape)
    if got != (V,):
        raise value_error(name, f"shape ({V},), one per token id", got, "pass one entry per token id")


def _num_items(loss: LossSpec, num_items: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if loss.reduction != "mean":
        raise value_error(
            "num_items",
            f"None with reduction={loss.reduction!r}",
            num_items,
            "only reduction='mean' divides by it",
        )
    if not isinstance(num_items, Tensor):
        if not torch.compiler.is_compiling():  # reading a symbolic number makes it a constant
            check_number("num_items", num_items, "a finite number or a 0-d tensor")
        num_items = torch.full((), num_items, dtype=dtype, device=device)
    if num_items.dim() != 0:
        raise value_error("num_items", "a number or a 0-d tensor", tuple(num_items.shape), "sum it first")
    if torch.is_grad_enabled():
        check_constant("num_items", num_items)
    return num_items.detach().to(device)


def _sequence_count(loss: LossSpec, hidden: Tensor, cu_seqlens: Tensor | None) -> int:
    if cu_seqlens is None and hidden.dim() < 3:
        if loss.scope != "batch" or Role.SEQUENCE in loss.roles.values():
            raise value_error("hidden", "shape (B, T, H)", tuple(hidden.shape), "or pass cu_seqlens")
        return 1
    count = hidden.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    group = loss.sequences_per_group
    if count % group != 0:
        raise value_error(
            "hidden", f"a multiple of {group} sequences", count, "pass all sequences of every group"
        )
    return count


# Placeholders for the sets in a call without a sampling mask.
NO_SETS = (None,) * len(Sets._fields)


class PackedHead(NamedTuple):
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
    parts: tuple[PackedHead, ...]
    autocast: bool
    module: nn.Module | None  # the parts run its `blocks(head)`, with the tensors of the call
    add_targets: bool = False  # see `HeadCall`

    def without_gradients(self) -> "Signature":
        """Return the signature of the same call with no tensor that needs a gradient."""
        return self._replace(needs=(False,) * len(self.needs))


def trained_tensors(heads: Sequence[HeadCall]) -> tuple[list[Tensor], list[TrainedIndices]]:
    """The trained tensors of one public call, and their indices for each head.

    These are hidden, weight, bias and the tensors of the layers of each head, also those that need no
    gradient: `Signature.needs` and `Needs` tell which do. A tensor that several heads share is there once,
    and gets a single gradient.
    """
    trained: list[Tensor] = []
    indices = []
    for head in heads:
        of_head = []
        for x in (head.hidden, head.weight, head.bias, *_layers_of(head).values()):
            index = None if x is None else len(trained)
            for at, known in enumerate(trained):
                if known is x:
                    index = at
            if index == len(trained):
                trained.append(x)
            of_head.append(index)
        indices.append(TrainedIndices(*of_head[:3], tuple(of_head[3:])))
    return trained, indices


def _layers_of(head: HeadCall) -> Mapping[str, Tensor]:
    return {} if head.layers is None else head.layers.tensors


def with_needs(heads: Sequence[HeadCall]) -> tuple[list[Tensor], list[HeadCall]]:
    """The trained tensors of one public call, and the heads with `needs`, `indices` and trained layers."""
    head = heads[0]
    if len(heads) == 1 and head.layers is None:
        return [head.hidden, head.weight, *([] if head.bias is None else [head.bias])], list(heads)
    grad = torch.is_grad_enabled()
    trained, indices = trained_tensors(heads)
    calls = []
    for head, at in zip(heads, indices, strict=True):
        layers = head.layers
        if layers is not None:
            names = [name for name, x in layers.tensors.items() if grad and x.requires_grad]
            autocast = head.dtype if torch.is_autocast_enabled(head.hidden.device.type) else None
            layers = layers._replace(trained=tuple(names), autocast=autocast)
        needs = head.needs._replace(layers=layers is not None and bool(layers.trained))
        calls.append(replace(head, needs=needs, indices=at, layers=layers))
    return trained, calls


def pack(heads: Sequence[HeadCall]) -> tuple[Signature, list[Tensor | None], int]:
    """Pack the heads of one public call. Returns (signature, tensors, number of sequences)."""
    trained, indices = trained_tensors(heads)
    parts = []
    for head, at in zip(heads, indices):
        number = None if head.layers is None else head.layers.head
        parts.append(PackedHead(head.coefficient, at, number, tuple(_layers_of(head))))
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


def _layers(signature: Signature, part: PackedHead, tensors: Sequence[Tensor | None]) -> Layers:
    named = dict(zip(part.names, part.indices.layers, strict=True))
    trained = tuple(name for name, index in named.items() if signature.needs[index])
    autocast = signature.dtype if signature.autocast else None
    layers = {name: tensors[index] for name, index in named.items()}
    return Layers(signature.module, part.head, layers, trained, autocast)
