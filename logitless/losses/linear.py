"""What every loss has: options, declarations, and the call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from logitless.engine.batch import Batch
from logitless.engine.call import Options, prepare
from logitless.engine.function import Mode, run_calls
from logitless.engine.main_gradient import check_main_gradient, check_now
from logitless.engine.operands import Operands, SplitHead, masked
from logitless.engine.operators import constant_in_graphs, register_loss
from logitless.engine.spec import Role, roles_of
from logitless.engine.terms import Term
from logitless.engine.unreduced import unreduced_loss
from logitless.errors import check_choice, expect
from logitless.kernels.head.transform import Head
from logitless.losses.agreement import check_agreement
from logitless.losses.declarations import (
    NumericField,
    check_class,
    check_fields,
    check_statistics,
    identity_of,
    numeric_fields,
)
from logitless.losses.heads import with_heads
from logitless.losses.inputs import HeadWeight, Reduction
from logitless.losses.keywords import CheckedCall
from logitless.losses.output import LossOutput, aligned
from logitless.parallel.agreement import debugging
from logitless.parallel.groups import process_group
from logitless.parallel.sequences import WHOLE_SEQUENCES, SlicedSequences, WholeSequences

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

OPERANDS = ("hidden", "weight", "targets", "bias")
REDUCTIONS = ("mean", "sum", "none")
SCOPES = ("token", "group", "batch")


@dataclass(frozen=True, kw_only=True)
class LinearLoss(CheckedCall):
    """What every loss has: how logits come from the head, and how the work is bounded.

    Args:
        ignore_index: targets with this id are not supervised. With `compact` they are not projected.
        reduction: "mean" (the sum over the normalizer of each unit), "sum" or "none".
        softcap: c in logits c * tanh(logit_scale * (h·w + b) / c) / temperature; None for no bound.
        logit_scale: factor of h·w + b.
        temperature: divides the logits in the end.
        logits_budget: bytes that a chunk of logits and its temporaries may take; default 2.5 GiB on cards of
            64 GiB and more, 1 GiB below, less on small cards and CPUs.
        accum_dtype: dtype in which d_weight is summed over chunks; default fp32 when there is more than one.
        logits_dtype: dtype of the chunk of logits; default that of the operands. fp32 gives log-probs without
            rounding noise. On Hopper one kernel projects bf16 and reads the logits in fp32, and stores none:
            with fp32, and by default unless a reduced loss needs the gradient of lse (label smoothing,
            z-loss); with `tp_group` where all ranks can. bf16 gives rounded logits there, too.
        compact: leave unsupervised rows out before the first product, at the price of one host sync. False
            reads nothing back, as a CUDA graph requires: every row is projected, and packed sequences that
            belong to groups are taken for one group.
        tp_group: the process group whose ranks hold a shard of the vocabulary each: weight (V_r, H), bias
            (V_r,) and their like are this rank's rows, in the order of the ranks, and hidden and targets are
            the same on all; so must `logits_budget` be, where the cards differ. The sizes of the shards are
            read in the call's one host sync; in another one where they are new, and with compact=False. Also
            a one-dimensional DeviceMesh or, for a DTensor weight, the name of its mesh dimension. Every rank
            gets the loss, d_hidden and its own d_weight.
        cp_group: the process group whose ranks hold a slice of every sequence each (context parallel), named
            like `tp_group`; of losses of policies, pairs and whole sequences. What comes per token is this
            rank's, shifted before it was sliced, what comes per sequence is whole. A slice may be any of the
            tokens (of 2n chunks, rank r of n may have r and 2n - 1 - r): what looks at earlier tokens takes
            `position_ids`. Every rank gets the whole loss and its metrics, d_hidden of its own tokens, and
            their share of d_weight: the sum over the group is the whole. Where the ranks' average is taken
            instead (DDP, FSDP), backpropagate the loss times the size of the group.
    """

    ignore_index: int = -100
    reduction: Reduction = "mean"
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    logits_budget: int | None = None
    accum_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype | None = None
    compact: bool = True
    tp_group: "ProcessGroup | DeviceMesh | str | None" = None
    cp_group: "ProcessGroup | DeviceMesh | str | None" = None

    # Tokens that must be seen together: "token", "group" (`sequences_per_group` sequences, 2 for a pair) or
    # "batch".
    scope: ClassVar[str] = "token"
    # The unit that `num_items` counts, and whose normalizer stays out of the chunk.
    unit: ClassVar[str] = "tokens"
    # Names of the tensors that the call takes besides the head's: in targets' shape, aligned with the targets
    # (`shift` moves them along) or with the positions that predict (it does not); (B,) per sequence; (V,) per
    # token id; or whole.
    token_inputs: ClassVar[tuple[str, ...]] = ()
    prediction_inputs: ClassVar[tuple[str, ...]] = ()
    sequence_inputs: ClassVar[tuple[str, ...]] = ()
    vocabulary_inputs: ClassVar[tuple[str, ...]] = ()
    shared_inputs: ClassVar[tuple[str, ...]] = ()
    metric_names: ClassVar[tuple[str, ...]] = ()
    sequences_per_group: ClassVar[int] = 1
    teacher: ClassVar[bool] = False
    reference: ClassVar[bool] = False
    return_logps: ClassVar[bool] = False
    return_predictions: ClassVar[bool] = False
    # See `TokenLoss`.
    differentiates: ClassVar[tuple[str, ...]] = ()
    observes: ClassVar[tuple[str, ...]] = ()
    # The one of `vocabulary_inputs` that weighs the logits in `stats.sum_logits`.
    sum_logits_weights: ClassVar[str | None] = None
    # Whether `terms` is right on a shard of the logits: see `Batch`. Per-token numbers always are.
    vocab_parallel: ClassVar[bool] = True
    # Whether `terms` is right where each rank has a slice of every sequence: it looks at others' tokens
    # through the batch alone, and unless its scope is "token", its values are per sequence or pair exactly
    # where their unit is, else per token.
    context_parallel: ClassVar[bool] = False
    # The argument that brings the boundaries of packed sequences, for errors.
    boundaries_argument: ClassVar[str] = "cu_seqlens"
    # Whether the caller knows that every token counts, and none can be wrong.
    unmasked: ClassVar[bool] = False
    # What of the inputs is wrong where only the device can tell, as a method (targets, inputs, V) -> list of
    # `Fault`: read in the call's one sync. None: nothing can be.
    faults: ClassVar[Callable | None] = None
    # The values of the fields as a text, which Dynamo guards on; empty for a loss made inside a graph.
    identity: ClassVar[str] = ""
    # Derived from the declarations above, and from the annotations of the fields.
    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({})
    numeric: ClassVar[Mapping[str, NumericField]] = MappingProxyType({})

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        cls.roles = MappingProxyType(roles_of(cls))
        cls.numeric = MappingProxyType(numeric_fields(cls))
        complete = cls.terms is not LinearLoss.terms  # not a base of other losses
        if complete and cls.scope == "token":
            got = f"{cls.sequence_inputs} with scope 'token'"
            remedy = "set scope to 'group' or 'batch'"
            expect(
                not cls.sequence_inputs, "sequence_inputs", f"none in {cls.__name__}", got, remedy, TypeError
            )
        if complete:
            check_statistics(cls, cls.differentiates, cls.observes)

    def __post_init__(self) -> None:
        check_class(type(self), LinearLoss)
        check_statistics(type(self), self.differentiates, self.observes)
        check_fields(self)
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "identity", identity_of(self))
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("scope", self.scope, SCOPES)
        name = type(self).__name__
        fits, remedy = self.tp_group is None or self.vocab_parallel, "write terms for shards: vocab_parallel"
        expect(fits, "tp_group", f"None for {name}", self.tp_group, remedy)
        alone = "pass num_items=global_num_items(targets, group) if its tokens stand alone"
        fits, remedy = self.cp_group is None or self.context_parallel, f"{alone}, else whole sequences"
        expect(fits, "cp_group", f"None for {name}", self.cp_group, remedy)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "identity"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__dict__["identity"] = identity_of(self)

    @constant_in_graphs
    def name_in_graphs(self) -> str:
        """A name that stands for this loss in a compiled graph."""
        return register_loss(self)

    @property
    def head(self) -> Head:
        """The transform of the logits."""
        return Head(self.softcap, self.logit_scale, self.temperature)

    @property
    def sequences(self) -> WholeSequences:
        """Which part of each sequence this rank has."""
        return WHOLE_SEQUENCES if self.cp_group is None else SlicedSequences(self.cp_group)

    def terms(self, numbers: Any, batch: Batch, /) -> tuple[dict[str, Term], dict[str, Term]]:
        """The loss itself, unreduced: ({name: Term}, {metric name: Term}). A pure function of tensors."""
        raise NotImplementedError

    def normalizers(
        self, counts: Mapping[str, Tensor], targets: Tensor, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """What the sum over each unit is divided by in a mean: how many of it the call contains."""
        return dict(counts)

    def resolved(self, weight: Tensor | SplitHead) -> "LinearLoss":
        """The loss with its groups as process groups, whatever names them."""
        given = {
            name: getattr(self, name) for name in ("tp_group", "cp_group") if getattr(self, name) is not None
        }
        groups = {name: process_group(name, group, weight) for name, group in given.items()}
        apart, remedy = len(set(groups.values())) == len(groups), "ranks differ in vocabulary or in tokens"
        expect(apart, "cp_group", "another group than tp_group", "the same", remedy)
        return (
            self if all(groups[name] is group for name, group in given.items()) else replace(self, **groups)
        )

    def refuse_shift(self) -> None:
        """Slices of sequences cannot be shifted: the last token of one predicts another rank's first."""
        expect(False, "shift", "False with cp_group", True, "shift whole sequences before they are sliced")

    def masked(self, targets: Tensor, mask: Tensor) -> Tensor:
        """Targets with `ignore_index` where the mask of a call is off."""
        weights = "token_weights" if "token_weights" in self.keywords else None
        return masked(targets, mask, self.ignore_index, weights)

    def __call__(
        self,
        hidden: Tensor,
        weight: HeadWeight,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        num_items: float | Tensor | None = None,
        shift: bool = False,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        accumulate_into: Tensor | None = None,
        accumulate_now: bool = False,
        grad_scale: float = 1.0,
        **inputs: Tensor | None,
    ) -> LossOutput:
        """
        Args:
            hidden: (..., H); (B, T, H), or flat (N, H) with `cu_seqlens`, where sequences matter.
            weight: (V, H), in hidden's dtype (any, under autocast); or the LM head itself: torch.nn.Linear,
                one under PEFT, or what `logitless.models.head_of` made of a model, with its bias, adapters,
                softcap and scale.
            targets: (...) int64 token ids, or `ignore_index`.
            bias: (V,).
            num_items: normalizer of the mean, in the loss's own unit; under data parallelism the global
                count / world size.
            shift: targets are unshifted labels of the same length, and inputs aligned with them go along:
                position i predicts targets[i + 1], and the last position of every sequence nothing.
            cu_seqlens: (sequences + 1,) int64 boundaries of packed sequences.
            mask: like targets, and shifted with them; bool, or integers that are 0 or 1. Where it is off (0),
                the target is not supervised, as if it were `ignore_index`.
            accumulate_into: (V, H) fp32, a "main gradient" (of this rank's rows, with tp_group): the backward
                pass adds the weight's gradient to it, chunk by chunk, and weight.grad stays as it is. No
                other tensor of that shape is made, at the price of projecting the logits (a teacher's and a
                reference's, too) a second time: 4 products for 3; a group beyond the budget takes 5 for 4.
                At V 128,256, H 4,096 in bf16 this saves 3.1 GB (d_weight in fp32, and in bf16) for one
                product more, 11 ms per 8,192 tokens on an H200. `reduction` must not be "none".
            accumulate_now: add to accumulate_into in the forward pass: 3 products for 4. The caller promises
                that a backward pass follows, once and with an upstream gradient of 1: a forward pass alone
                has added already. Refused where the forward pass may be run again (saved-tensor hooks, as of
                an activation checkpoint; torch.compile) and without autograd.
            grad_scale: factor of every gradient of a call with accumulate_into, 1 / the number of
                micro-batches for example: the loss itself must be differentiated as it is. An upstream
                gradient other than 1 is an error, at the price of a host sync in the backward pass; with
                compact=False it asserts on the device.
            inputs: the tensors that the loss declares.
        """
        if not inputs.keys() <= self.roles.keys():
            self.check_call([name for name in inputs if name not in self.internal_inputs])
        if mask is not None:
            self.check_call((), targets=targets, mask=mask)
            targets = self.masked(targets, mask)
        if not isinstance(weight, Tensor | SplitHead):
            now = {"accumulate_now": accumulate_now, "accumulate_into": accumulate_into, **inputs}
            given = {"bias": bias, "num_items": num_items, "shift": shift, "cu_seqlens": cu_seqlens, **now}
            given |= {"grad_scale": grad_scale, "hidden": hidden, "weight": weight}
            return with_heads(LinearLoss.__call__, self, targets, **given)
        if shift and self.cp_group is not None:
            self.refuse_shift()
        operands, options = Operands(hidden, weight, targets, bias), Options(num_items, shift, cu_seqlens)
        loss = self
        if self.tp_group is not None or self.cp_group is not None:
            loss = self.resolved(weight)
            if debugging():
                given = inputs | {"num_items": num_items, "accumulate_into": accumulate_into}
                tensors = dict(zip(OPERANDS, operands))
                check_agreement(loss, tensors, [name for name, x in given.items() if x is not None])
        given, mode = prepare(loss, operands, options, inputs), Mode.SOLVED
        if accumulate_into is not None:
            check_main_gradient(given, weight, accumulate_into, grad_scale)
            if accumulate_now:
                check_now(grad_scale)
            mode = Mode.INTO_MAIN_NOW if accumulate_now else Mode.INTO_MAIN
        elif accumulate_now:
            remedy = "pass the main gradient, or leave it out"
            expect(False, "accumulate_now", "False without accumulate_into", True, remedy)
        elif grad_scale != 1.0:
            expect(False, "grad_scale", "1.0 without accumulate_into", grad_scale, "scale the loss itself")
        if loss.reduction == "none":
            value, metrics, tokens, plan = unreduced_loss(given, targets.shape)
        else:
            value, metrics, tokens, plan = run_calls([given], mode, accumulate_into, grad_scale)
            metrics = metrics[0, 1:]
        if tokens:
            tokens = aligned(tokens, given.targets, targets.shape, self.ignore_index)
        return LossOutput(value, dict(zip(self.metric_names, metrics.unbind(), strict=True)), plan, tokens)
