"""`LinearLoss`, the base class of all losses: options, class attributes and the call."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

import logitless.engine.operators  # noqa: F401, registers the operators of compiled graphs
from logitless.engine.base import Mode, replayed, run_calls
from logitless.engine.batch import Batch
from logitless.engine.call import HeadCall, Named, Replayable, make_head_call
from logitless.engine.captured import is_eligible, replayable
from logitless.engine.gradients import check_main_gradient
from logitless.engine.graph_names import constant_in_graphs, register_loss
from logitless.engine.head_view import is_head
from logitless.engine.operands import SplitHead, apply_mask, checked_boundaries
from logitless.engine.plan import Plan
from logitless.engine.sampling_mask import STATISTICS_OF_SETS, AlignedMask, SamplingMask, check_mask
from logitless.engine.spec import Role, roles_of
from logitless.engine.terms import Term
from logitless.engine.unreduced import unreduced_loss
from logitless.errors import check_choice, to_bytes, type_error, value_error
from logitless.kernels.head.transform import LogitTransform
from logitless.losses.agreement import check_agreement
from logitless.losses.arguments import (
    CallArguments,
    CheckedCall,
    accept_missing_targets,
    call_keywords,
    warn_of_zeros,
)
from logitless.losses.declarations import (
    NumericField,
    check_class,
    check_constructor,
    check_fields,
    check_names,
    check_statistics,
    identity_of,
    numeric_fields,
)
from logitless.losses.heads import HEADS, resolve_heads
from logitless.losses.inputs import HeadWeight, Reduction
from logitless.losses.output import LossOutput
from logitless.parallel.agreement import debugging
from logitless.parallel.groups import process_group
from logitless.parallel.sequences import WHOLE_SEQUENCES, SlicedSequences, WholeSequences

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

REDUCTIONS = ("mean", "sum", "none")
SCOPES = ("token", "group", "batch")


@dataclass(frozen=True, kw_only=True)
class LinearLoss(CheckedCall):
    """Base class of all losses, with the options for the logits, for memory and for parallelism.

    Args:
        ignore_index: targets with this id are not supervised. With `compact=True`, their rows are not
            projected, or their hidden states count as 0.
        reduction: "mean" (the sum divided by the normalizer of the loss's unit), "sum" or "none".
        softcap: c in logits = c * tanh(logit_scale * (h·w + b) / c) / temperature. None: no softcap.
        logit_scale: factor of h·w + b.
        temperature: divisor of the logits, applied after the softcap.
        logits_budget: maximum number of bytes for a chunk of logits and its temporaries, or text such as
            "2GiB". Default: 2.5 GiB on GPUs with at least 60 GiB, the smaller of 1 GiB and 1/32 of the memory
            on other GPUs, 256 MiB on CPUs.
        accum_dtype: dtype in which d_weight is summed over chunks. Default: fp32 (fp64 for fp64 operands) if
            there are several chunks or several heads, under torch.compile, and in fp16; else the dtype of the
            products: that of the operands, or of autocast. With accumulate_into, it must be None or the dtype
            of the main gradient.
        logits_dtype: dtype of the logits from which the loss is computed. torch.float32: the logits are not
            rounded. The dtype of the products (that of the operands, or of autocast): the logits are rounded
            to it. Default (None): the dtype of the products, with one exception. On Hopper, a `TokenLoss`
            with products in bf16 uses logits that are not rounded, unless it is reduced and needs the
            gradient of lse (label smoothing, z-loss). With `tp_group`, the exception requires the Hopper
            kernel on all ranks. This kernel computes the statistics of a chunk in the product and does not
            store the logits. The chunk is stored in fp32 on other devices, and if the loss needs predictions,
            class-weighted sums of the logits or, reduced, the gradient of a statistic
            other than log p(target).
        compact: True: remove unsupervised rows before the first product, which costs one host sync. False: no
            host sync, as CUDA graphs require; all rows are projected, and the packed sequences of a loss with
            scope "group" form one group. On a GPU, a small call (512 tokens with a vocabulary of 151,936, H
            2,048 and 80 GB) projects all rows in either case, which takes less time than the host takes to
            remove some.
        tp_group: process group for vocabulary parallelism; or a one-dimensional DeviceMesh; or, if the weight
            is a DTensor, the name of a dimension of its mesh. Each rank passes its rows of the head, in the
            order of the ranks: weight (V_r, H) and bias (V_r,), and the same for the heads of a teacher and a
            reference. hidden, targets, all other inputs and `logits_budget` must be equal on all ranks; set
            `logits_budget` if the GPUs differ. The shard sizes are exchanged in the call's one host sync. The
            first call, and a call after the sizes have changed, need a second host sync, and so does a
            `TokenLoss` with `reduction="none"`, which exchanges them again. With `compact=False`, each
            exchange is a host sync. Every rank gets the loss, the full d_hidden, and d_weight of its rows.
        cp_group: process group for context parallelism, in the same forms as `tp_group`. Supported by losses
            of policies, pairs and whole sequences. Each rank passes a slice of every sequence. Inputs per
            token are shifted before they are sliced; inputs per sequence are not sliced. A slice may contain
            any tokens of the sequence, for example chunks r and 2n - 1 - r of 2n chunks on rank r of n.
            Losses that depend on earlier tokens take `position_ids`. Every rank gets the loss and the metrics
            of the whole sequences, d_hidden of its tokens, and its contribution to d_weight, which must be
            summed over the group. If gradients are averaged instead (DDP, FSDP), multiply the loss by the
            size of the group before the backward pass.
    """

    ignore_index: int = -100
    reduction: Reduction = "mean"
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    logits_budget: int | str | None = None
    accum_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype | None = None
    compact: bool = True
    tp_group: "ProcessGroup | DeviceMesh | str | None" = None
    cp_group: "ProcessGroup | DeviceMesh | str | None" = None

    # The tokens that one evaluation of `terms` must contain: "token" (any slice), "group" (the tokens of
    # `sequences_per_group` sequences, 2 for a pair) or "batch" (all tokens).
    scope: ClassVar[str] = "token"
    # The unit that `num_items` counts: it replaces the divisor of the terms over this unit, and of no others.
    # It is refused if no term is over this unit. In fp16, the power of two in this unit's factor is applied
    # after the products.
    unit: ClassVar[str] = "tokens"
    # Names of the tensor arguments of `__call__`, in addition to `hidden`, `weight`, `targets`, `bias` and
    # the `teacher_*` and `ref_*` tensors. `token_inputs`: targets' shape, shifted with the targets.
    # `prediction_inputs`: targets' shape, aligned with hidden, not shifted. `sequence_inputs`: (B,).
    # `vocabulary_inputs`: (V,). `shared_inputs`: any shape, not cut to chunks.
    token_inputs: ClassVar[tuple[str, ...]] = ()
    prediction_inputs: ClassVar[tuple[str, ...]] = ()
    sequence_inputs: ClassVar[tuple[str, ...]] = ()
    vocabulary_inputs: ClassVar[tuple[str, ...]] = ()
    shared_inputs: ClassVar[tuple[str, ...]] = ()
    metric_names: ClassVar[tuple[str, ...]] = ()
    sequences_per_group: ClassVar[int] = 1
    teacher: ClassVar[bool] = False
    reference: ClassVar[bool] = False
    # Name of the prediction input that maps each row of `hidden` to a row of `teacher_hidden` (rows, H'), if
    # several rows share a row of the teacher. The engine then projects the rows in the order of the teacher's
    # rows, and each row of the teacher once per chunk. None: row i is compared with row i of the teacher.
    teacher_rows: ClassVar[str | None] = None
    return_logps: ClassVar[bool] = False
    return_predictions: ClassVar[bool] = False
    # See `TokenLoss`.
    differentiates: ClassVar[tuple[str, ...]] = ()
    observes: ClassVar[tuple[str, ...]] = ()
    # Name of the vocabulary input that weights the logits in `stats.sum_logits`.
    sum_logits_weights: ClassVar[str | None] = None
    # Whether `terms` supports `tp_group`. A `TokenLoss` always does. A `LogitsLoss` does if its `terms`
    # reduces over the columns only with the methods of `Batch`, so that it is correct for a shard of the
    # columns.
    vocab_parallel: ClassVar[bool] = True
    # Whether `terms` supports `cp_group`. If so, `terms` must combine tokens only through methods of `Batch`,
    # such as `sum_by_sequence`. If the scope is not "token", a term over "sequences" or "pairs" must have one
    # value per sequence or pair, and a term over any other unit must have one value per token.
    context_parallel: ClassVar[bool] = False
    # Name of the argument with the boundaries of packed sequences, for error messages.
    boundaries_argument: ClassVar[str] = "cu_seqlens"
    # Names of the inputs that are log-probabilities of the sampled tokens. They are checked against a
    # sampling mask.
    sampled_logps: ClassVar[tuple[str, ...]] = ()
    # Whether the caller guarantees that every token is supervised and has a valid target.
    unmasked: ClassVar[bool] = False
    # A method (targets, inputs, V) -> list of `Fault` that checks values of the inputs on the device. The
    # counts of the faults are read in the call's one host sync. None: the loss has no such checks.
    faults: ClassVar[Callable | None] = None
    # A string of the class and the field values, on which Dynamo guards; "" for a loss that a graph
    # constructs.
    identity: ClassVar[str] = ""
    # Derived from the class attributes above and from the annotations of the fields.
    # A plain dict: Dynamo does not trace a mapping proxy once the graph has changed any dict.
    roles: ClassVar[Mapping[str, Role]] = {}
    numeric: ClassVar[tuple[tuple[str, NumericField], ...]] = ()  # (name, field)

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        if inspect.isfunction(vars(cls).get("__call__")):
            accept_missing_targets(cls.__call__)
        cls.roles = roles_of(cls)
        cls.keywords = call_keywords(cls)
        cls.numeric = numeric_fields(cls)
        check_names(cls)
        complete = cls.terms is not LinearLoss.terms  # False for an abstract base class
        if complete and cls.scope == "token":
            if cls.sequence_inputs:
                raise type_error(
                    "sequence_inputs",
                    f"none in {cls.__name__}",
                    f"{cls.sequence_inputs} with scope 'token'",
                    "set scope to 'group' or 'batch'",
                )
        if complete:
            check_statistics(cls, cls.differentiates, cls.observes)

    def __new__(cls, *positional: Any, **options: Any) -> Self:
        if positional or not options.keys() <= cls.__dataclass_fields__.keys():
            check_constructor(cls, positional, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.logits_budget, str):
            object.__setattr__(self, "logits_budget", to_bytes("logits_budget", self.logits_budget))
        check_class(type(self), LinearLoss)
        check_statistics(type(self), self.differentiates, self.observes)
        check_fields(self)
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "identity", identity_of(self))
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("scope", self.scope, SCOPES)
        name = type(self).__name__
        if self.tp_group is not None and not self.vocab_parallel:
            raise value_error(
                "tp_group",
                f"None for {name}",
                self.tp_group,
                "implement `terms` for a vocabulary shard and set `vocab_parallel = True`",
            )
        if self.cp_group is not None and not self.context_parallel:
            per_token = "for a per-token loss, pass num_items=global_num_items(targets, group)"
            remedy = f"{per_token}; otherwise pass whole sequences"
            raise value_error("cp_group", f"None for {name}", self.cp_group, remedy)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "identity"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__dict__["identity"] = identity_of(self)

    @constant_in_graphs
    def name_in_graphs(self) -> str:
        """The name of this loss in a compiled graph."""
        return register_loss(self)

    @property
    def logit_transform(self) -> LogitTransform:
        """The transform of the logits: softcap, scale and temperature."""
        return LogitTransform(self.softcap, self.logit_scale, self.temperature)

    @property
    def sequences(self) -> WholeSequences:
        """The collectives over `cp_group`. Without `cp_group` they return their inputs."""
        return WHOLE_SEQUENCES if self.cp_group is None else SlicedSequences(self.cp_group)

    def terms(self, statistics: Any, batch: Batch, /) -> tuple[dict[str, Term], dict[str, Term]]:
        """Return (the terms of the loss, the metrics), both {name: Term}. Must be a pure function of tensors.

        Args:
            statistics: `TokenStats` in a `TokenLoss`; in a `LogitsLoss` logits (n, V), with `tp_group` this
                rank's columns (n, V_r).
            batch: targets and inputs of the same n rows.
        """
        raise NotImplementedError

    def normalizers(
        self, counts: Mapping[str, Tensor], targets: Tensor, inputs: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor]:
        """Return the divisor of the mean for each unit. Default: the number of these units in the call."""
        return dict(counts)

    def resolved(self, weight: Tensor | SplitHead) -> "LinearLoss":
        """The loss with `tp_group` and `cp_group` resolved to process groups."""
        declared = {
            name: getattr(self, name) for name in ("tp_group", "cp_group") if getattr(self, name) is not None
        }
        groups = {name: process_group(name, group, weight) for name, group in declared.items()}
        if len(set(groups.values())) != len(groups):
            raise value_error(
                "cp_group",
                "a process group other than tp_group",
                "tp_group",
                "a group shards either the vocabulary or the tokens",
            )
        return (
            self
            if all(groups[name] is group for name, group in declared.items())
            else replace(self, **groups)
        )

    @accept_missing_targets
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
        grad_scale: float = 1.0,
        **inputs: Tensor | None,
    ) -> LossOutput:
        """
        Args:
            hidden: (..., H); for losses of sequences (B, T, H), or (N, H) with `cu_seqlens`.
            weight: (V, H), in hidden's dtype (any dtype under autocast); or the LM head itself, whose bias,
                adapters, softcap and scale are then used: a torch.nn.Linear, also under PEFT, or the result
                of `logitless.models.head_of`.
            targets: (...) int64 token ids, or `ignore_index`.
            bias: (V,).
            num_items: divisor of the mean, in the unit of the loss. Under data parallelism, pass the global
                count divided by the world size (`global_num_items`).
            shift: whether targets are unshifted labels of the same length: position i predicts
                targets[i + 1], and the last position of every sequence predicts nothing. Inputs that are
                aligned with the targets are shifted as well.
            cu_seqlens: (sequences + 1,) int64 boundaries of packed sequences.
            mask: same shape as targets, and shifted with them; bool, or integers or floats that are 0 or 1.
                Targets with mask False (0) are not supervised, as if they were `ignore_index`. Other numbers
                are counted in the call's host sync and refused; with compact=False, they are asserted on the
                device. Pass an additive mask (0 keeps, -inf drops) as `mask == 0`. A float mask without a 1
                may be additive: the first such call warns, except under torch.compile, with compact=False and
                with cp_group.
            accumulate_into: (V, H) fp32 main gradient; (V_r, H) with tp_group. The backward pass adds the
                weight's gradient to it chunk by chunk, and does not change weight.grad. If the weight is also
                the embedding, weight.grad gets the gradient of the embedding: add both. No other tensor of
                this shape is allocated. Instead, the logits (including those of a teacher or reference) are
                projected twice: 4 products instead of 3, or 5 instead of 4 for a group that exceeds the
                budget. For V 128,256 and H 4,096 in bf16, this saves 3.1 GB, d_weight in fp32 and in bf16.
                `reduction` must not be "none", and `accum_dtype` must be None or the dtype of this tensor.
            grad_scale: factor of all gradients of a call with accumulate_into, for example 1 / the number of
                micro-batches. The loss itself must not be scaled: an upstream gradient other than 1 raises an
                error, unless no token is supervised. This check costs a host sync in the backward pass; with
                compact=False, it is an assertion on the device.
            inputs: the tensors that the class declares as inputs. A subclass with other arguments has a
                `__call__` that passes them to `super().__call__` by name, and `prepare` computes the declared
                inputs. A name that is not a keyword of the class is refused here, not by Python, as Python
                would not suggest the name that is meant.
        """
        if not set(inputs).issubset(self.keywords):
            raise self.unknown_keywords(inputs)
        shared = bias, num_items, shift, cu_seqlens, mask, accumulate_into, grad_scale
        return self.solve(CallArguments(self, hidden, weight, targets, inputs, *shared))

    def solve(self, call: CallArguments) -> LossOutput:
        """Compute the loss of a call with one head.

        `MedusaLoss` and `MultiTokenLoss`, which have several heads, use `MultiHeadLoss.solve_parts` instead.

        Steps:

        1. `read_heads` reads head modules. `bind` checks types, resolves process groups, applies the mask and
           checks the boundaries.
        2. `prepare`, which subclasses override, computes the declared inputs from the arguments of the user.
        3. `make_head_call` checks shapes by the role of each input, shifts, and flattens to one row per
           token.
        4. The engine runs the call: `run_calls`, or `unreduced_loss` with reduction="none".
        5. `finish`, which subclasses override, adds metrics that the engine does not compute.

        A call whose pass was captured as a CUDA graph takes the results of a replay (`replayed`) instead of
        `bind` and steps 2 to 4.
        """
        self.read_heads(call)
        arguments = replayable_arguments(call)
        result = None if arguments is None else replayed(arguments)
        if result is not None:
            value, metrics, tokens, plan = result
            return self.output(call, value, metrics[0], tokens, plan)
        head_call = self.bind(call)
        if arguments is not None:
            head_call = head_call.made_of(arguments)
        mode = Mode.SOLVED
        if call.accumulate_into is not None:
            check_main_gradient(head_call, call.weight, call.accumulate_into, call.grad_scale)
            mode = Mode.INTO_MAIN
        elif call.grad_scale != 1.0:
            expected = "1.0 without accumulate_into"
            raise value_error("grad_scale", expected, call.grad_scale, "scale the loss itself")
        if call.loss.reduction == "none":
            return self.output(call, *unreduced_loss(head_call, call.targets.shape))
        value, metrics, tokens, plan = run_calls([head_call], mode, call.accumulate_into, call.grad_scale)
        return self.output(call, value, metrics[0], tokens, plan)

    def output(
        self,
        call: CallArguments,
        value: Tensor,
        metrics: Tensor,
        tokens: Mapping[str, Tensor],
        plan: Plan | None,
    ) -> LossOutput:
        """The result of a call: step 5 of `solve`. The last of `metrics` are those of `metric_names`."""
        loss = call.loss
        if call.mask is not None:
            warn_of_zeros(call.mask, loss, plan)
        tokens = {name: x.view(call.targets.shape) for name, x in tokens.items()}
        names = loss.metric_names
        named = dict(zip(names, metrics.unbind()[-len(names) :], strict=True)) if names else {}
        return loss.finish(LossOutput(value, named, plan, tokens), call)

    def read_heads(self, call: CallArguments) -> None:
        """Replace the head modules of a call by their tensors, and its loss by one with their options."""
        inputs = call.inputs
        if is_head(call.weight, *inputs.values()) or not isinstance(call.weight, Tensor | SplitHead):
            self.check_tensors(hidden=call.hidden)
            operands = {"hidden": call.hidden, "weight": call.weight, "bias": call.bias, **inputs}
            call.heads = {name: operands[name] for name in HEADS if name in operands}
            call.loss, inputs = resolve_heads(self, operands)
            call.hidden, call.weight, call.bias = map(inputs.pop, ("hidden", "weight", "bias"))
            call.inputs = inputs

    def bind(self, call: CallArguments) -> HeadCall:
        """Check and prepare the arguments of a call, and return its `HeadCall`: steps 1 to 3 of `solve`."""
        self.read_heads(call)
        inputs = call.inputs
        mask = call.mask
        sampling_mask = inputs.pop("sampling_mask", None)
        loss = call.loss
        tensors = {"hidden": call.hidden, "targets": call.targets, "mask": mask}
        tensors |= {self.boundaries_argument: call.cu_seqlens, **inputs}
        for name, x in tensors.items():
            if isinstance(x, Tensor) and not x.is_meta or x is None and name != "targets":
                continue
            if name not in self.structured_inputs and self.roles.get(name) is not Role.WHOLE:
                self.check_tensors(**{name: x})
        if call.shift and loss.cp_group is not None:
            remedy = "shift whole sequences before they are sliced"
            raise value_error("shift", "False with cp_group", True, remedy)
        if mask is not None and call.targets is not None:
            call.targets = apply_mask(call.targets, mask, loss.ignore_index)
        if loss.tp_group is not None or loss.cp_group is not None:
            loss = call.loss = loss.resolved(call.weight)
            if debugging():
                names = ("hidden", "weight", "targets", "bias")
                passed = inputs | {"num_items": call.num_items, "accumulate_into": call.accumulate_into}
                passed = [name for name, x in passed.items() if x is not None]
                check_agreement(loss, {name: getattr(call, name) for name in names}, passed)
        if call.cu_seqlens is not None:
            call.cu_seqlens = checked_boundaries(call.cu_seqlens, call.hidden, loss.boundaries_argument)
        if sampling_mask is not None:
            call.aligned_mask = self.aligned_mask(sampling_mask, call)
        loss.prepare(call)
        return make_head_call(
            call.loss,
            call.hidden,
            call.weight,
            call.targets,
            call.bias,
            call.inputs,
            num_items=call.num_items,
            shift=call.shift,
            cu_seqlens=call.cu_seqlens,
            aligned_mask=call.aligned_mask,
        )

    def aligned_mask(self, mask: SamplingMask | AlignedMask, call: CallArguments) -> AlignedMask:
        """Check the sampling mask of a call, and align it with hidden."""
        if self.return_predictions:
            remedy = (
                "predictions over the full vocabulary are not computed with sampling_mask; "
                "call the loss without it"
            )
            raise value_error("return_predictions", "False with sampling_mask", True, remedy)
        for name in (*self.differentiates, *self.observes):
            if name not in STATISTICS_OF_SETS:
                remedy = f"leave {name} out of differentiates and observes, or call without the mask"
                raise value_error(
                    "sampling_mask", f"a loss of {', '.join(STATISTICS_OF_SETS)}", f"one of {name}", remedy
                )
        if isinstance(mask, AlignedMask):
            return mask
        check_mask(mask)
        return mask.aligned(call.targets, shift=call.shift, cu_seqlens=call.cu_seqlens)

    def prepare(self, call: CallArguments) -> None:
        """Compute the declared inputs, `call.inputs`, from the arguments of the user, and check these
        arguments.

        Losses whose arguments differ from the declared inputs override this method.
        """

    def finish(self, out: LossOutput, call: CallArguments) -> LossOutput:
        """Return the result of the call, given the result of the engine."""
        return out


def replayable_arguments(call: CallArguments) -> Replayable | None:
    """The arguments of a call whose pass may be captured, from `LinearLoss.bind` on; None for other calls."""
    loss = call.loss
    num_items = call.num_items
    if torch.compiler.is_compiling() or loss.reduction == "none":
        return None
    if loss.tp_group is not None or loss.cp_group is not None or call.grad_scale != 1.0:
        return None
    if call.cu_seqlens is not None or call.accumulate_into is not None:
        return None
    if type(call.shift) is not bool or not is_eligible(loss, call.hidden, call.weight, call.targets):
        return None
    if type(num_items) in (int, float) and math.isfinite(num_items) and loss.reduction == "mean":
        wide = torch.promote_types(call.hidden.dtype, torch.float32)
        call.num_items = num_items = torch.full((), num_items, dtype=wide, device=call.targets.device)
    if not (num_items is None or isinstance(num_items, Tensor)):
        return None
    given: dict[str, Tensor | None] = {"hidden": call.hidden, "targets": call.targets, "mask": call.mask}
    given["num_items"] = num_items
    heads: dict[str, Tensor | None] = {"weight": call.weight, "bias": call.bias}
    inputs = tuple(call.inputs)
    for name, x in call.inputs.items():
        (heads if loss.roles.get(name) is Role.HEAD else given)[name] = x
    shift = call.shift

    def bind(static: Named) -> HeadCall:
        tensors = {**static, **heads}
        passed = {name: tensors[name] for name in inputs}
        moved = CallArguments(loss, static["hidden"], heads["weight"], static["targets"], passed)
        moved.bias, moved.num_items = heads["bias"], static["num_items"]
        moved.shift, moved.mask = shift, static["mask"]
        return loss.bind(moved)

    return replayable(loss, given, heads, (shift, inputs), bind)
